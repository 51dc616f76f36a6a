"""The module names of ``tensorrt_llm.scaffolding.contrib``."""
