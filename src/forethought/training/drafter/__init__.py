"""The recipe of a draft model: its target writes a corpus, a small network learns to guess it."""
