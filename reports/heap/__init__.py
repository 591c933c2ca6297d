"""Heaps that were kept in files: what they are written and read as, and what is asked of them."""
