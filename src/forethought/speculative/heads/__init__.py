"""Learned modules that guess: weights and forward only, shared by drafting and training."""
