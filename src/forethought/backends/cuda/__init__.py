"""Paged attention, fused operations and graphs on a CUDA device."""
