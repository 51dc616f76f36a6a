"""The names under which ``tensorrt_llm.scaffolding.contrib`` has what is built in here."""
