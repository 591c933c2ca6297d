"""From text to tokens and back, one token after the other: a tokenizer's text, or tokens that are spelled out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 4
"""Tokens of the prompt that the first new token's text may depend on, as vLLM has it."""

_LONGEST = 4
"""Tokens that one character may take: UTF-8 has up to 4 bytes."""

_SPELLED = re.compile(r"<(\d{1,9})>")
_PLAIN = frozenset({10, *range(32, 127)} - {ord("<")})


class TokenText:
    """Text of tokens.

    Without a tokenizer, as with random weights, a text's bytes in UTF-8 are its tokens. In a token's text, what can be
    printed in ASCII stands for itself, and all else as `<845>`, which is read as that token again: the text of any
    tokens has these very tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        if self._tokenizer is not None:
            return list(self._tokenizer.encode(text).ids)
        # In turns: what stands between, and a number.
        parts = _SPELLED.split(text)
        return [
            token
            for index, part in enumerate(parts)
            for token in ([int(part)] if index % 2 else part.encode(errors="replace"))
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the special ones of a tokenizer."""
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens)))
        return "".join(chr(token) if token in _PLAIN else f"<{token}>" for token in tokens)


class Detokenizer:
    """The text of one answer while its tokens come, until one of the texts comes that end it.

    Text is held back as long as it may change: the bytes of a character that is not whole, and what may begin a text
    that ends the answer.
    """

    def __init__(self, text: TokenText, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._text = text
        self._stops = stops
        self._window = list(prompt[-CONTEXT:])
        self._read = len(self._window)
        self._held = ""

    def add(self, token: int) -> str | None:
        """Take in the next token, and return the text that ends the answer, if it is there now."""
        self._window.append(token)
        before, after = self._text.decode(self._window[: self._read]), self._text.decode(self._window)
        if after.endswith("\ufffd") and len(self._window) - self._read < _LONGEST:
            return None
        self._held += after[len(before) :]
        self._window, self._read = self._window[self._read :], len(self._window) - self._read
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if not found:
            return None
        place, stop = min(found)
        self._held = self._held[:place]
        return stop

    def take(self, *, is_last: bool) -> str:
        """Return the text that has come since the last time, all of it where no more comes."""
        if is_last:
            whole = self._text.decode(self._window)[len(self._text.decode(self._window[: self._read])) :]
            taken, self._held = self._held + whole, ""
            self._read = len(self._window)
            return taken
        kept = len(self._held) - max((len(stop) - 1 for stop in self._stops), default=0)
        taken, self._held = self._held[: max(kept, 0)], self._held[max(kept, 0) :]
        return taken
