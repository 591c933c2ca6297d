"""What goes wrong with a history, as one line for people."""

from __future__ import annotations


class HistoryError(ValueError):
    """A history that cannot be read or written; the message says what to do."""
