"""The fused forward of Llama-like models, with batch-invariant kernels."""
