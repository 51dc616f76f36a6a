"""Verification: which drafted tokens are accepted, exactly or by a named lossy rule."""
