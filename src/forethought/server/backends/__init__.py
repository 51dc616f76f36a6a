"""What answers requests: the engine, a script, other servers."""
