"""The KV cache: pages, page tables, prefix index (plain Python) and tensors (``storage``)."""
