"""The embedded countdown model: its problems, search traces, corpus and training run."""
