"""Learned modules that draft: weights and forward only, shared by drafting and training."""
