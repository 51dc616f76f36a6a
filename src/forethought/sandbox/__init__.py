"""Programs of models, run in a process with limits."""
