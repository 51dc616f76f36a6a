"""The engine: token ids in, token ids out; text is turned into ids in ``llm``."""
