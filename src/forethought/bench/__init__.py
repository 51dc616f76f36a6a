"""Speed, measured on the machine and model at hand: what helps here, and by how much."""
