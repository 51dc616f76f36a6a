"""Tokens through a network: loading, packing rows, attention over pages, logits."""
