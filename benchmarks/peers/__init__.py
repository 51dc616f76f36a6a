"""Every inference engine that is installed, on the same models: see ``__main__``."""
