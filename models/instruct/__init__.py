"""The embedded instruct model: its problems, dialogues, corpus and training run."""
