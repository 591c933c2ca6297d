"""What grows test after test under an owner that lives: reported when the owner ends, or when it passes a limit.

A test that leaves something under a fixture of a wider scope leaks nothing, since the fixture may need it: an engine
builds its pool at its first request, a cache fills. What the fixture holds is therefore read after every such test, and
only a growth that goes on is reported, with the path by which the fixture holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.causes import with_holders
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.storage_holders import UNEXPLAINED, Context, Stacks, explain_storages
from lowtide.leakcheck.findings.tensor_findings import frames
from lowtide.leakcheck.growth.series import FEWEST_STEPS, LevelKey
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.judge import listed
from lowtide.leakcheck.judging.owners import Claims, Count, Key, Owner
from lowtide.probes.heap.caches import read_caches
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Maker
from lowtide.probes.memory.stack_frames import allocating_function
from lowtide.reports.schema import Finding, ResourceName
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.statement import Note, StatedFinding, Statement, noted

COUNTED: tuple[ResourceName, ...] = ("threads", "processes", "file-descriptors", "shared-memory")
"""What is counted by name and may grow under an owner, besides the bytes of tensors."""

_MOST_EXPLAINED = 8
"""Storages of each turn whose holder is looked for, the largest first."""

_LONGEST_LINK = 3
"""Edges from one link of a chain to the next."""

ADVICE = "let each test, or the clean-up that it calls, give back what it adds; or bound what is kept"


def note_growth(
    owners: Iterable[Owner],
    claims: Claims,
    fresh: Collection[Key],
    now: Counters,
    before: Counters,
) -> None:
    """Write down what lies under some owners at the end of a turn.

    Args:
        owners: those that used the turn, or got something in it.
        claims: what all owners that are alive hold.
        fresh: the storages that are known to have appeared in this turn.
        now: the counters.
        before: those at the beginning of the turn.
    """
    wanted = list(owners)
    under = claims.storages({id(owner): owner.ledger.sizes for owner in wanted}, fresh) if wanted else {}
    for owner in wanted:
        counts: dict[ResourceName, Count] = {}
        for key in COUNTED:
            there = owner.items.get(key, set()) & now.items.get(key, {}).keys()
            if there:
                counts[key] = Count(len(there), len(there - before.items.get(key, {}).keys()))
        storages = under.get(id(owner), {})
        # What its setup made is as young as what its first test did.
        owner.ledger.note(storages, (storages.keys() & fresh) - owner.storages.keys(), counts)


def growth_of(
    owner: Owner, stacks: Stacks, now: Counters, maker_of: Callable[[str, str], Maker | None] = lambda key, name: None
) -> list[Finding]:
    """Return what grows test after test under an owner that lives: one finding for each kind of thing."""
    growing = owner.ledger.growing()
    tensors = [_of_tensors(owner, key, stacks) for key in growing if key.resource == "tensors"]
    context = Context(roots=tuple(owner.named()), living=True, stacks=stacks, maker_of=maker_of)
    items = [_of_items(owner, resource, now, context) for resource in COUNTED if LevelKey(resource) in growing]
    return [*(finding for finding in tensors if finding is not None), *items]


def limit_passed(owner: Owner, limit: int, stacks: Stacks) -> list[Finding]:
    """Return what has grown under an owner by more than a limit since it was set up, or since that was last reported.

    The limit is in bytes of tensors.
    """
    ledger = owner.ledger
    total = ledger.repeated_bytes()
    if total - ledger.limit_passed <= limit:
        return []
    ledger.limit_passed = total
    keys = [LevelKey("tensors", device) for device in sorted({device for device, _ in ledger.storages})]
    found = [_of_tensors(owner, key, stacks, past=limit) for key in keys if len(ledger.steps(key).turns) > 1]
    return [finding for finding in found if finding is not None]


def merged(finding: Finding, grown: Sequence[Finding]) -> Finding:
    """Return a finding of an owner's end, with the growth that did not end with the owner: the two are one thing."""
    growth = next((growth for growth in grown if _is_of(growth, finding)), None)
    if growth is None:
        return finding
    said = growth.statement.amount if isinstance(growth, StatedFinding) else growth.message
    return noted(finding, f"; it grew by {said}", trend="growth")


def rest_of(grown: Sequence[Finding], findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the growth that ended with its owner."""
    return tuple(growth for growth in grown if not any(_is_of(growth, finding) for finding in findings))


def _is_of(growth: Finding, finding: Finding) -> bool:
    """Return whether most of what grew is what a finding is about."""
    where = (growth.resource, growth.device)
    return (
        where == (finding.resource, finding.device)
        and finding.bytes * 2 >= growth.bytes
        and finding.count * 2 >= growth.count
    )


def _of_tensors(owner: Owner, key: LevelKey, stacks: Stacks, past: int | None = None) -> Finding | None:
    ledger, device = owner.ledger, key.device
    place = _place_of_growth(owner, key)
    if place is None:
        return None
    held, explanations = place
    largest = max(held, key=lambda storage: ledger.storages[storage].bytes)
    explanation = explanations.get(largest, UNEXPLAINED)
    steps = ledger.steps(key)
    total = sum(steps.added)
    stack = tuple(stacks(device, [largest[1]]).get(largest[1], ()))
    notes = [Note(f", {format_bytes(total)} on {device} in all")]
    notes += [] if past is None else [Note(f", past the limit of {format_bytes(past)}")]
    notes += [Note(", held by ", explanation.holder)] if explanation.holder else []
    said = f"{steps.said(format_bytes)} under {owner.name}"
    suspects = explanation.suspects[:1]
    return finding_of(
        "tensors",
        cause=explanation.cause,
        bytes=total,
        count=len(held),
        device=device,
        stage=f"tests with {owner.name}",
        statement=Statement(amount=said, came=None, notes=tuple(notes)),
        suspects=("growth", *suspects),
        known_by={"allocated_in": allocating_function(stack), "module": "" if suspects else owner.where},
        verdict=explanation.verdict,
        holder=explanation.holder or None,
        path=explanation.path,
        allocated_at=frames(stack),
        advice=ADVICE,
        trend="growth",
    )


def _place_of_growth(owner: Owner, key: LevelKey) -> tuple[list[Key], Mapping[Key, Explanation]] | None:
    """Return the storages that grew in one place, and how all that were looked at are held; None where no place grows.

    Three attributes, each filled once by another test, are three places, and none of them grows. Where what a turn made
    replaced that of the turns before, the last turn's is the one to show.
    """
    lying = owner.ledger.storages
    by_turn: dict[int, list[Key]] = {}
    for storage, facts in lying.items():
        if storage[0] == key.device and facts.turn:
            by_turn.setdefault(facts.turn, []).append(storage)
    keys = {
        storage
        for storages in by_turn.values()
        for storage in sorted(storages, key=lambda item: -lying[item].bytes)[:_MOST_EXPLAINED]
    }
    context = Context(roots=tuple(owner.named()), living=True)
    explanations = explain_storages(keys, context).by_key
    keys -= _in_full_caches(explanations)
    places: dict[str, list[Key]] = {}
    for storage in sorted(keys):
        path = explanations.get(storage, UNEXPLAINED).path
        places.setdefault(place_of(hop.edge for hop in path), []).append(storage)
    turns = {place: {lying[storage].turn for storage in storages} for place, storages in places.items()}
    growing = [place for place, found in turns.items() if len(found) >= FEWEST_STEPS]
    replaced = set(owner.ledger.steps(key).turns) - by_turn.keys()
    if not growing and len(replaced) >= FEWEST_STEPS - 1:
        growing = [place for place, found in turns.items() if max(by_turn) in found]
    if not growing:
        return None
    best = max(growing, key=lambda place: sum(lying[storage].bytes for storage in places[place]))
    return places[best], explanations


def _in_full_caches(explanations: Mapping[Key, Explanation]) -> set[Key]:
    """Return the storages in bounded `lru_cache`s that are full: what these take from here on, they make room for."""
    cached = {
        key
        for key, explanation in explanations.items()
        if any(hop.edge.startswith("lru_cache ") for hop in explanation.path)
    }
    if not cached:
        return set()
    full = [cache for cache in read_caches() if cache.maxsize is not None and cache.entries >= cache.maxsize]
    return cached & {
        (device, address) for cache in full for device, ranges in cache.held.items() for address, _ in ranges
    }


def place_of(edges: Iterable[str]) -> str:
    """Return the edges of a path without what differs between things that are held in the same place.

    Numbers and keys are left out, and what repeats itself (the links of a chain, the nodes of a graph) counts once.
    """
    place: list[str] = []
    for edge in edges:
        place.append("[*]" if edge.startswith("[") else re.sub(r"\d+", "*", edge))
        for period in range(1, _LONGEST_LINK + 1):
            if place[-period:] == place[-2 * period : -period]:
                del place[-period:]
                break
    return "".join(place)


def _of_items(owner: Owner, resource: ResourceName, now: Counters, context: Context) -> Finding:
    steps = owner.ledger.steps(LevelKey(resource))
    total = sum(steps.added)
    names = sorted(owner.items.get(resource, set()) & now.items.get(resource, {}).keys())
    amount: Callable[[int], str] = lambda count: format_amount(count, resource.replace("-", " "))  # noqa: E731
    holder = listed(resource, names)
    said = f"{steps.said(amount)} under {owner.name}"
    notes = (Note(f", {amount(total)} in all"), *([Note(": ", holder)] if holder else []))
    finding = finding_of(
        resource,
        cause="thread" if resource == "threads" else "unknown",
        count=total,
        device="",
        stage=f"tests with {owner.name}",
        statement=Statement(amount=said, came=None, notes=notes),
        suspects=("growth",),
        known_by={"module": owner.where},
        items=names,
        holder=holder,
        advice=ADVICE,
        trend="growth",
    )
    return with_holders(ItemLeak(finding, resource, dict.fromkeys(names, 1), 0), context)
