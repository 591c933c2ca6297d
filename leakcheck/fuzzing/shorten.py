"""Makes a life that fails as short and as plain as can be, by leaving out one thing after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from lowtide.leakcheck.lives.calls import Call
from lowtide.leakcheck.targets.target import Capabilities

Life = tuple[Call, ...]
Attempt = Callable[[Life], "Life | None"]


def shorten(life: Sequence[Call], fails: Callable[[Life], Life | None], able: Capabilities) -> Life:
    """A life that still fails, of which no call can be left out and no argument made simpler.

    Settings and faults first, because some settings (captured graphs, a process group) make a life on a card take ten
    times as long; then calls, in large parts and then one by one, because every life costs as much as it has calls;
    then arguments; and again, until none gets any further. (Zeller and Hildebrandt, "Simplifying and isolating
    failure-inducing input", 2002.)

    Args:
        life: that fails.
        fails: the calls of a life up to the one that fails; None if it passes, or fails in another way, or has a call
            that is out of place.
        able: what values are the simplest.
    """
    tried: set[str] = set()

    def attempt(candidate: Life) -> Life | None:
        written = repr(candidate)
        if written in tried:
            return None
        tried.add(written)
        return fails(candidate)

    best = _without_settings(tuple(life), attempt)
    while True:
        before = best
        best = _without_parts(best, attempt)
        best = _without_pairs(best, attempt)
        best = _with_plainer_calls(best, attempt, able)
        if best == before:
            return best


def _without_settings(life: Life, attempt: Attempt) -> Life:
    """Leaves out all settings and all faults, else all faults, else one setting of all creates after the other."""
    names = dict.fromkeys(name for call in life for name in call.arguments.get("config", {}))
    plain = attempt(tuple(replace(_with_settings(call, ()), fault=None) for call in life))
    if plain is not None:
        return plain
    life = attempt(tuple(replace(call, fault=None) for call in life)) or life
    for left_out in names:
        kept = [name for name in names if name != left_out]
        plainer = attempt(tuple(_with_settings(call, kept) for call in life))
        if plainer is not None:
            life, names = plainer, dict.fromkeys(kept)
    return life


def _with_settings(call: Call, kept: Collection[str]) -> Call:
    """The call without the settings that are not kept."""
    config = call.arguments.get("config", {})
    if config.keys() <= set(kept):
        return call
    fewer = {name: value for name, value in config.items() if name in kept}
    return replace(call, arguments={"config": fewer} if fewer else {})


def _without_parts(life: Life, attempt: Attempt) -> Life:
    """Leaves out halves, quarters, and so on to single calls, from the end."""
    size = len(life) // 2
    while size:
        at = len(life) - size
        while at >= 0:
            shorter = attempt(life[:at] + life[at + size :])
            life = life if shorter is None else shorter
            at = min(at, len(life)) - size
        size //= 2
    return life


def _without_pairs(life: Life, attempt: Attempt) -> Life:
    """Leaves out two calls at a time that need each other: a sleep and its wake, a start and its steps."""
    at = len(life) - 2
    while at >= 0:
        for end in range(at + 1, len(life)):
            shorter = attempt(life[:at] + life[at + 1 : end] + life[end + 1 :])
            if shorter is not None:
                life = shorter
                break
        at = min(at - 1, len(life) - 2)
    return life


def _with_plainer_calls(life: Life, attempt: Attempt, able: Capabilities) -> Life:
    """Makes one argument after the other plainer."""
    at = 0
    while at < len(life):
        for plainer in _plainer(life[at], able):
            simpler = attempt((*life[:at], plainer, *life[at + 1 :]))
            if simpler is not None:
                life = simpler
                break
        else:
            at += 1
    return life


def _plainer(call: Call, able: Capabilities) -> Iterator[Call]:
    if call.fault is not None:
        yield replace(call, fault=None)
        if call.fault.at:
            yield replace(call, fault=replace(call.fault, at=0))
            yield replace(call, fault=replace(call.fault, at=call.fault.at - 1))
    arguments = dict(call.arguments)
    for name in arguments.get("config", {}):
        yield _with_settings(call, arguments["config"].keys() - {name})
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
