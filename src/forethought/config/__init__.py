"""What callers write: sampling, speculation, engine and guided-decoding settings. No torch."""
