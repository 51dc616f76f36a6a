"""One file per way of guessing. They are found through ``speculative.table``, never by import."""
