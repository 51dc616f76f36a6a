"""Text in, text out: tokenizer, live sessions, ``LLM`` and ``AsyncLLM``."""
