"""Reward models, and the controllers that score, judge and check candidates."""
