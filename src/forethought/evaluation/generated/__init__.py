"""Generators of problems; whether one is held out is a function of its numbers."""
