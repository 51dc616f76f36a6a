"""Models in GGUF files, as llama.cpp, ollama and LM Studio have them."""
