"""The embedded reasoner's recipe: problems, traces, tokenizer, network, training, evaluation."""
