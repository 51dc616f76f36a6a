"""Training of the embedded reasoner: problems, traces, tokenizer, network, training, evaluation."""
