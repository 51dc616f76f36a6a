"""What a text answers: extraction, canonical forms, equivalence, answer spaces."""
