"""Speed of decoding, measured on this machine and model."""
