"""Recipes: what each kind of drafter is taught, one per file, found through ``table``."""
