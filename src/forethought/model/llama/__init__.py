"""A lean forward for Llama-like networks, equal to the one that transformers defines."""
