"""A card is used once before a test uses it, and a process that does not use one gets no context by being judged."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from lowtide.leakcheck.resources.warm_up import BlasHandles, WarmUp


class Calls:
    """Counts instead of warming up."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, use: Callable[[], None]) -> None:
        self.count += 1


def queued() -> int:
    return len(torch.cuda._queued_calls)


def test_nothing_is_done_before_torch_initialises_a_card() -> None:
    calls, before = Calls(), queued()
    warm_up = WarmUp(BlasHandles(), calls)
    warm_up.queue()
    warm_up.queue()
    assert (calls.count, queued()) == (0, before + 1)
    torch.cuda._queued_calls[-1][0]()
    assert (calls.count, warm_up.is_done) == (1, True)
    warm_up.close()
    assert queued() == before


def test_it_is_done_once() -> None:
    calls = Calls()
    warm_up = WarmUp(BlasHandles(), calls)
    warm_up.now()
    warm_up.now()
    warm_up.queue()
    assert calls.count == 1


def test_another_thread_that_initialises_a_card_leaves_it_for_later() -> None:
    calls = Calls()
    warm_up = WarmUp(BlasHandles(), calls)
    thread = threading.Thread(target=warm_up.now)
    thread.start()
    thread.join()
    assert (calls.count, warm_up.is_done) == (0, False)


def test_torch_keeps_a_queued_call_but_not_who_queued_it() -> None:
    warm_up = WarmUp(BlasHandles(), Calls())
    warm_up.queue()
    call, alive = torch.cuda._queued_calls[-1][0], weakref.ref(warm_up)
    entry = torch.cuda._queued_calls.pop()
    del warm_up
    gc.collect()
    assert alive() is None
    call()
    del entry


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_a_card_that_cannot_be_used_raises_nothing_in_the_program_and_is_said() -> None:
    warm_up = WarmUp(BlasHandles(), lambda use: use())
    warm_up.now()
    (said,) = warm_up.not_measured()
    assert said.what == "what a card's first use takes"
    assert "NVIDIA" in said.why or "CUDA" in said.why
    assert warm_up.not_measured() == ()
