"""A distributed trainer for digit images: the same numbers on one process and on many."""

__version__ = "0.2.0"
