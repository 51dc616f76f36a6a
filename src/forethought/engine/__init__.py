"""The machine: token ids in, token ids out. Knows nothing about text."""
