"""Chats, completions and responses over HTTP, and the lists of models and methods."""
