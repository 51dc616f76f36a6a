"""The forward of Llama-like models on a CPU in C++, compiled for the processor at first use."""
