"""Makes a life that fails as short and as plain as can be, by leaving out one thing after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lowtide.leakcheck.checked_life import Call
from lowtide.leakcheck.target import Capabilities

Life = tuple[Call, ...]


def shorten(life: Sequence[Call], fails: Callable[[Life], Life | None], able: Capabilities) -> Life:
    """A life that still fails, of which no call can be left out and no argument made simpler.

    (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002, with one call at a time: lives
    are short.)

    Args:
        life: that fails.
        fails: the calls of a life up to the one that fails; None if it passes, or fails in another way, or has a call
            that is out of place.
        able: what values are the simplest.
    """
    best = tuple(life)
    tried: set[str] = set()
    while True:
        for candidate in _simpler(best, able):
            written = repr(candidate)
            if written in tried:
                continue
            tried.add(written)
            failed = fails(candidate)
            if failed is not None:
                best = failed
                break
        else:
            return best


def _simpler(life: Life, able: Capabilities) -> Iterator[Life]:
    """Lives that are one step simpler, those with fewer calls first."""
    for at in reversed(range(len(life))):
        yield life[:at] + life[at + 1 :]
    # A sleep and its wake, a start and its steps.
    for at in reversed(range(len(life) - 1)):
        for end in range(at + 1, len(life)):
            yield life[:at] + life[at + 1 : end] + life[end + 1 :]
    for at, call in enumerate(life):
        for plainer in _plainer(call, able):
            yield (*life[:at], plainer, *life[at + 1 :])


def _plainer(call: Call, able: Capabilities) -> Iterator[Call]:
    if call.fault is not None:
        yield replace(call, fault=None)
        if call.fault.at:
            yield replace(call, fault=replace(call.fault, at=0))
            yield replace(call, fault=replace(call.fault, at=call.fault.at - 1))
    arguments = dict(call.arguments)
    for name in arguments.get("config", {}):
        fewer = {key: value for key, value in arguments["config"].items() if key != name}
        yield replace(call, arguments={"config": fewer} if fewer else {})
    if "prompt_lengths" in arguments:
        lengths = arguments["prompt_lengths"]
        for index, length in enumerate(lengths):
            if len(lengths) > 1:
                yield replace(call, arguments={**arguments, "prompt_lengths": lengths[:index] + lengths[index + 1 :]})
            for shorter in able.prompt_lengths:
                if shorter < length:
                    changed = [*lengths[:index], shorter, *lengths[index + 1 :]]
                    yield replace(call, arguments={**arguments, "prompt_lengths": changed})
    for fewer_tokens in dict.fromkeys((1, arguments.get("max_tokens", 1) - 1)):
        if 1 <= fewer_tokens < arguments.get("max_tokens", 1):
            yield replace(call, arguments={**arguments, "max_tokens": fewer_tokens})
    for name, simplest in (("level", able.sleep_levels[:1]), ("mode", able.sleep_modes[:1])):
        if name in arguments and simplest and arguments[name] != simplest[0]:
            yield replace(call, arguments={**arguments, name: simplest[0]})
    if "tags" in arguments:
        yield replace(call, arguments={})
    if arguments.get("count", 1) > 1:
        yield replace(call, arguments={"count": 1})
