"""One file per drafter; ``speculative.registry`` finds them, no other drafter imports them."""
