"""Names of ``tensorrt_llm.scaffolding`` that this package has under others."""
