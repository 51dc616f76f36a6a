"""The whole engine once more, in one file of plain torch: ``engine.py``."""
