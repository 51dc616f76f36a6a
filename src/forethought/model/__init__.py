"""Model execution: loading, batches of rows, attention, the fused Llama network, sampling."""
