"""Faster forwards for one kind of machine each; without them everything runs in torch."""
