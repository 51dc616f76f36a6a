"""Speculative decoding: drafters propose trees of tokens, the target verifies them."""
