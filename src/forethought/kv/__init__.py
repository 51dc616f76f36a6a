"""The KV cache: which page holds which tokens (plain Python), and the tensors (``storage``)."""
