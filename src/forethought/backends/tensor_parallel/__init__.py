"""Tensor parallelism: one model on several devices, each with a slice of every layer."""
