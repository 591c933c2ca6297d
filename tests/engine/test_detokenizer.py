"""Text of tokens while they come: spelled out, or by a tokenizer whose characters may take several tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from lowtide.engine.server import Detokenizer, TokenText

SPELLED = TokenText(None)


def of_bytes() -> TokenText:
    """A tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenText(tokenizer)


def pieces(text: TokenText, tokens: Sequence[int], prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> list[str]:
    """What is told after each token, up to the one that ends the answer."""
    detokenizer, told = Detokenizer(text, prompt, stops), []
    for token in tokens:
        stop = detokenizer.add(token)
        told.append(detokenizer.take(is_last=stop is not None))
        if stop is not None:
            return told
    return [*told, detokenizer.take(is_last=True)]


def test_spelled_text_has_the_tokens_again() -> None:
    tokens = random.Random(0).choices(range(1024), k=2000)
    assert SPELLED.encode(SPELLED.decode(tokens)) == tokens
    assert SPELLED.decode([104, 105, 10, 60, 200, 845]) == "hi\n<60><200><845>"


@pytest.mark.parametrize("text", ["hello", "a < b > c <> <-1> <x1>", "tide: \N{WATER WAVE}", "\ud800", ""])
def test_bytes_are_the_tokens_of_spelled_text(text: str) -> None:
    assert bytes(SPELLED.encode(text)) == text.encode(errors="replace")


def test_a_character_is_told_once_it_is_whole() -> None:
    text, said = of_bytes(), "tide \N{WATER WAVE} é"
    told = pieces(text, text.encode(said))
    assert "".join(told) == said
    assert "\N{WATER WAVE}" in told
    assert not any("\ufffd" in piece for piece in told)


def test_what_is_no_text_is_not_held_back_for_ever() -> None:
    text = of_bytes()
    (continuation,) = text.encode("é")[1:]
    detokenizer = Detokenizer(text, (), ())
    told = 0
    for _ in range(100):
        detokenizer.add(continuation)
        told += len(detokenizer.take(is_last=False))
        assert len(detokenizer._window) <= 8
    assert 90 <= told <= 100
    assert told + len(detokenizer.take(is_last=True)) == 100


def test_an_answer_goes_on_where_its_prompt_ends() -> None:
    """A decoder that leaves out the space before the first word of a text does not do so in the middle of one."""
    tokenizer = Tokenizer(WordLevel({"▁ebb": 0, "▁flow": 1}, unk_token="▁ebb"))
    tokenizer.decoder = decoders.Metaspace()
    text = TokenText(tokenizer)
    assert text.decode([0, 1]) == "ebb flow"
    assert pieces(text, [1, 0], prompt=[0]) == [" flow", " ebb", ""]


@pytest.mark.parametrize(
    ("tokens", "stops", "told"),
    [
        ("abcdef", ["cd"], ["", "a", "b", ""]),
        ("abcdef", ["f"], ["a", "b", "c", "d", "e", ""]),
        ("abcdef", ["xyz", "e"], ["", "", "a", "b", "cd"]),
        ("abcabd", ["abd"], ["", "", "a", "b", "c", ""]),
        ("abc", ["cd"], ["", "a", "b", "c"]),
        # The first of those that are there at once.
        ("ab<300>", ["0", "30"], ["", "a", "b<"]),
    ],
)
def test_what_may_begin_a_stop_text_is_held_back(tokens: str, stops: list[str], told: list[str]) -> None:
    assert pieces(SPELLED, SPELLED.encode(tokens), stops=stops) == told
