"""Judges: what must have come back, when, and what it means if it did not."""
