"""Guessing ahead: drafters propose trees of tokens; ``verify`` keeps what the target says too."""
