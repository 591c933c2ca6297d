"""One cause, one finding: what a kept pool, process group or loss has left in several resources is reported together.

Two leaks of one test have one cause where the same object that should be gone holds both: the path to each leads
through it.  What no path leads to stays a finding of its own, so that a second leak is not hidden by the first.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.cut import Cut, Names
from lowtide.leakcheck.explaining.endings import attributes_with, leaves_alone
from lowtide.leakcheck.explaining.explain import Holder
from lowtide.leakcheck.explaining.expressions import (
    END_OF_SHARED_MEMORY,
    all_of,
    class_named,
    ended,
    ending_of,
    ends_part,
    on,
)
from lowtide.leakcheck.explaining.library_objects import (
    FINALIZER,
    advice_for_finalizer,
    advice_for_root,
    is_installed,
    known_advice,
)
from lowtide.leakcheck.explaining.path_reading import variable_of_frame, way_text
from lowtide.leakcheck.findings.item_findings import ItemLeak, only
from lowtide.leakcheck.findings.kept_bytes import kept_by
from lowtide.leakcheck.findings.running_threads import by_work, most_work, with_work
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.tensor_findings import TensorLeak
from lowtide.leakcheck.judging.storages import Key
from lowtide.leakcheck.resources import RESOURCES, resource_of
from lowtide.probes.device.torch_allocator import any_graph_alive
from lowtide.probes.heap.holders import SharedWalk, census_of, objects_of
from lowtide.probes.heap.roots import frames_of, is_library
from lowtide.probes.heap.stand_ins import having_numbers, of_libraries, stand_ins, with_handles
from lowtide.probes.host.process_files import children_of, numbered_descriptors
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.objects.foreign import (
    attribute,
    instance_dict,
    is_a,
    module_of_class,
    thread_ident,
    thread_key,
    thread_name,
    type_name,
)
from lowtide.probes.objects.opened_in_c import files_at
from lowtide.probes.originals import gc, os, threading
from lowtide.probes.references.edges import UNNAMED
from lowtide.reports import schema
from lowtide.reports.schema import Finding, Hop
from lowtide.reports.sizes import first_of
from lowtide.reports.statement import HolderFacts, Note, noted, restated

_CAPTURE = re.compile(r"(?:^|[\\/])torch[\\/]cuda[\\/]graphs\.py$")
_BEGINS = ("capture_begin", "CUDAGraph.capture_begin")

_MODES = ("__torch_dispatch__", "__torch_function__")
"""What may stand between: the modes under which a compiler captures."""

_IN_SET = "{…}"
"""How a path has what a set holds."""

_CONTAINERS = ("dict", "list", "tuple", "set", "collections.OrderedDict", "collections.defaultdict")
"""Two things in one of these need have no more in common than that."""

BELONGING = tuple(resource.rule.key for resource in RESOURCES)
"""The resources that belong together, that which says most of the cause first."""

_LONGEST_SAID_AGAIN = 24
"""Characters of what leads to several objects that a message has once only."""

_MOST_NAMED = 3
"""Holders of the things of one finding that are named."""

Leak: TypeAlias = "TensorLeak | ItemLeak"
"""A finding of which remedies are still to be tried."""


class CommonCause(msgspec.Struct, frozen=True):
    """What several findings have in common.

    Attributes:
        key: the same for all of them.
        holder: the object that should be gone, as code; empty if there is none.
        path: the way to it.
        advice: what to do about it.
        kind: what the first suspect edge on that way is.
        ending: the call that ends the holder, as `close()`; empty where its class has none.
        part_ending: the call that ends the part of such a holder which has the thing; empty where there is none.
        part_call: the same as code that ends that part; empty where no code leads to it.
        idle: a call of an object on the way that may be taken for the end of the thing, and is not.
        is_thing: whether the holder is what the findings are about, and not an object that has it among others.
        through: the identities of the objects that the way leads through, to the findings themselves.
        by_thread: whether a running thread among the things has made others, and would make them again.
    """

    key: Hashable
    holder: str = ""
    path: tuple[Hop, ...] = ()
    advice: str = ""
    kind: schema.Cause = "unknown"
    ending: str = ""
    part_ending: str = ""
    part_call: str = ""
    idle: str = ""
    is_thing: bool = False
    through: frozenset[int] = frozenset()
    by_thread: bool = False


def by_cause(findings: Iterable[Finding], causes: Mapping[int, CommonCause | None]) -> tuple[Finding, ...]:
    """Return the findings, those with one cause as one with the others as its parts, where the first of them stood.

    Each has its cause by the finding's identity; one without stays as it is.
    """
    groups: dict[Hashable, list[Finding]] = {}
    known: dict[Hashable, CommonCause] = {}
    for finding in findings:
        cause = causes.get(id(finding))
        key = id(finding) if cause is None else cause.key
        groups.setdefault(key, []).append(finding)
        if cause is not None:
            known[key] = cause
    return tuple(_as_one(group, known.get(key)) for key, group in groups.items())


def _as_one(group: Sequence[Finding], cause: CommonCause | None) -> Finding:
    if cause is None:
        return group[0]
    first, *others = sorted(
        group, key=lambda finding: (cause.by_thread and finding.resource != "threads", _rank(finding))
    )
    parts = [*first.parts]
    for part in others:
        parts += [msgspec.structs.replace(part, parts=()), *part.parts]
    of_setting = next((part.advice for part in parts if part.resource == "globals"), None)
    advice = first.advice or cause.advice or of_setting
    is_itself = cause.by_thread and cause.path[0].type == "thread"
    if first.path or not cause.holder or is_itself:
        # One that was explained by itself knows more of its way.
        return msgspec.structs.replace(first, parts=tuple(parts), advice=advice)
    kind = first.cause if first.cause != "unknown" else cause.kind
    return noted(first, ", held by ", cause.holder, parts=tuple(parts), path=cause.path, advice=advice, cause=kind)


def _rank(finding: Finding) -> tuple[int, bool, bool, bool]:
    resource = BELONGING.index(finding.resource) if finding.resource in BELONGING else -1
    if finding.resource in ("host-memory", "globals"):
        resource = len(BELONGING)
    # A tensor has a path, and bytes; what native code holds has none.
    return resource, finding.cause != "autograd", finding.resource == "lru-cache", finding.cause == "native"


_Named = tuple[str, str]
"""A thing by its resource and its name."""


def _parts_of_graphs(found: Sequence[Leak], context: Context) -> dict[_Named | int, int]:
    """Find out what belongs to the graphs that a subject has left.

    Returns:
        By thing, or by the place of a finding about tensors, the place of the first finding about the same graphs.
    """
    pools = [turn for turn, leak in enumerate(found) if isinstance(leak, ItemLeak) and _is_of_graph(leak)]
    kept = [turn for turn, leak in enumerate(found) if isinstance(leak, TensorLeak) and _is_of_graph(leak)]
    parts: dict[_Named | int, int] = {}
    for turn in pools:
        beside = [other for other in kept if _have_one_holder(found[other], found[turn])]
        for other in beside:
            parts.setdefault(other, turn)
        if beside:
            parts |= dict.fromkeys(_members(found, turn), turn)
    main: dict[str, int] = {}
    for turn in (*pools, *kept):
        main.setdefault(found[turn].finding.device, turn)
    state = _state_of_graphs(found, main, context) if main else []
    for device, members in state if state and any_graph_alive() else ():
        group = parts.get(main[device], main[device])
        parts |= dict.fromkeys([*members, *_members(found, main[device])], group)
    return parts


def _members(found: Sequence[Leak], turn: int) -> list[_Named | int]:
    leak = found[turn]
    return [(leak.key, name) for name in leak.names] if isinstance(leak, ItemLeak) else [turn]


def _state_of_graphs(
    found: Sequence[Leak], devices: Collection[str], context: Context
) -> list[tuple[str, list[_Named | int]]]:
    """Return the state of graphs' random numbers, which lives as long as any of them does, with its device."""
    state: list[tuple[str, list[_Named | int]]] = []
    for turn, leak in enumerate(found):
        device = leak.finding.device
        if device not in devices:
            continue
        members: list[_Named | int] = []
        if isinstance(leak, ItemLeak) and leak.key == f"native {device}":
            at = {name: int(name.rpartition(" ")[2], 16) for name in leak.names}
            stacks = context.stacks(device, list(at.values()))
            members = [(leak.key, name) for name, place in at.items() if _is_of_capture(stacks.get(place, ()))]
        elif isinstance(leak, TensorLeak) and leak.finding.verdict == "native-held" and leak.sizes:
            stacks = context.stacks(device, [address for _, address in leak.sizes])
            members = [turn] if all(_is_of_capture(stacks.get(address, ())) for _, address in leak.sizes) else []
        state += [(device, members)] if members else []
    return state


def _is_of_graph(leak: Leak) -> bool:
    is_pool = leak.finding.resource == "reserved"
    return leak.finding.cause == "cuda-graph" and (is_pool or isinstance(leak, TensorLeak))


def _is_of_capture(stack: Sequence[StackFrame]) -> bool:
    """Return whether it was torch's beginning of a capture that allocated."""
    site = next((frame for frame in stack if frame.function.rpartition(".")[2] not in _MODES), None)
    return site is not None and site.function in _BEGINS and _CAPTURE.search(site.file) is not None


def _have_one_holder(one: Leak, other: Leak) -> bool:
    """Return whether the ways to both lead through one object that should be gone, and is more than a container."""
    first, second = one.finding, other.finding
    pairs = zip(first.path, second.path)  # noqa: B905 - the shorter one ends it
    common = itertools.takewhile(lambda hops: (hops[0].edge, hops[0].type) == (hops[1].edge, hops[1].type), pairs)
    return first.device == second.device and any(hop.suspect and hop.type not in _CONTAINERS for hop, _ in common)


_EXPLAINED = 0.9
"""The share of the host memory that must lie behind another finding to be a part of it."""

_MOST_HOLDERS = 8
"""Holders of the things of one resource, beyond which these are one finding without a holder."""

_MADE = {
    "process-groups": "made",
    "processes": "started",
    "file-descriptors": "made",
    "temporary-files": "bound",
    "shared-memory": "made",
}
"""The resources, besides threads, whose makers are noted, and what these do."""

_SHOWN_PLACES = 3

_MOST_REACHED = 100_000
"""Objects behind a finding that are looked at for what they keep."""

_ROOTS = (
    ("torch's default hook for saved tensors", "torch._C._autograd._top_saved_tensors_default_hooks(True)"),
    ("torch function mode ", "torch.overrides._get_current_function_mode_stack()"),
    ("torch dispatch mode ", "torch.utils._python_dispatch._get_current_dispatch_mode_stack()"),
)
"""What a setting is called, and the root of paths that is its value, where these are not the same words."""


def with_causes(found: Sequence[Leak], context: Context) -> tuple[list[Leak], list[CommonCause | None]]:
    """Return the leaks of one subject, those with several causes split, and the cause of each that shares one.

    By one walk over the heap, and none where nothing could share a cause.
    """
    leaks = [leak for leak in found if isinstance(leak, ItemLeak) and resource_of(leak.key) is not None]
    edges = _edges_of_tensors(found)
    shared: dict[_Named | int, CommonCause] = {}
    if {leak.key for leak in leaks} - {"threads"}:
        shared.update(_causes_of_things(leaks, context, edges).items())
    shared.update(_of_added_objects(found, shared).items())
    beside = {**_mapped_files(found), **_held_by_settings(found)}
    of_graphs = _parts_of_graphs(found, context)
    shared.update((named, CommonCause(("tensors", turn))) for named, turn in beside.items())
    shared.update((of, CommonCause(("cuda-graph", group))) for of, group in of_graphs.items())
    shared.update((turn, CommonCause(("tensors", turn))) for turn in beside.values())
    parts: list[_Part] = []
    for turn, leak in enumerate(found):
        own = _graph_of(leak) or shared.get(turn)
        for part, cause in _split(leak, shared) if isinstance(leak, ItemLeak) else [(leak, own)]:
            apart = _apart(part, context)
            if cause is not None and len(apart) > 1:
                # What a pool's threads do is one of its parts.
                apart = [part]
            held = cause is not None and bool(cause.holder)
            parts += [_Part(_with_places(each, context, held=held), cause) for each in apart]
    for join in (_join_losses, _join_changes, _join_edges, _join_threads):
        join(parts)
    _join_host_memory(parts, context.walk)
    return [part.leak for part in parts], [part.cause for part in parts]


def causes_of(found: Sequence[Leak], context: Context) -> dict[str, CommonCause | None]:
    """Return what each leak of several lives has in common with others, by its finding's fingerprint.

    What the lives have left stays one finding, by which it is known. Each life leaves the same: what the things have in
    common of which there are the fewest, those of the last one, all have.
    """
    items = [leak for leak in found if isinstance(leak, ItemLeak)]
    latest = {leak.key: leak for leak in sorted(items, key=lambda leak: -len(leak.names))}
    tensors = [leak for leak in found if isinstance(leak, TensorLeak)]
    of_items: dict[str, list[CommonCause | None]] = {}
    of_tensors: dict[frozenset[Key], CommonCause | None] = {}
    for leak, cause in zip(*with_causes([*tensors, *latest.values()], context), strict=True):
        if isinstance(leak, TensorLeak):
            of_tensors[leak.keys] = cause
        else:
            of_items.setdefault(leak.key, []).append(cause)
    # Where they differ in that, they have no cause as a whole.
    causes = {leak.finding.fingerprint: own[0] for leak in items if len(own := of_items.get(leak.key, [])) == 1}
    return causes | {leak.finding.fingerprint: of_tensors.get(leak.keys) for leak in tensors}


class _Part(msgspec.Struct):
    """A leak, and the cause that it shares with others, as far as that is known by now."""

    leak: Leak
    cause: CommonCause | None


def _causes_of_things(
    leaks: Sequence[ItemLeak], context: Context, edges: Collection[tuple[str, ...]]
) -> dict[_Named, CommonCause]:
    """Return the cause of each thing that has a holder in the program, or parts: a process the pipe of its end.

    Things with one holder have one cause, of whatever resource they are, and so do those that each are held by an entry
    of one container. What hangs on one of the `edges` that tensors do is a part of theirs.
    """
    names: dict[str, list[str]] = {}
    for leak in leaks:
        names.setdefault(leak.key, []).extend(leak.names)
    owners = _stand_ins(names, context)
    holders = _causes_by_name(owners, context, context.names())
    things: dict[Hashable, list[_Named]] = {}
    for key, own in names.items():
        for name in own:
            thing = id(owners[key, name]) if (key, name) in owners else _opener(key, name, names)
            things.setdefault(thing, []).append((key, name))
    held: dict[Hashable, list[_Named]] = {}
    by_main: dict[str, dict[Hashable, CommonCause]] = {}
    unheld: dict[str, list[list[_Named]]] = {}
    for members in things.values():
        holder = next((holders[named] for named in members if named in holders), None)
        if holder is None or is_library(holder.path[0].edge):
            holder = next(filter(None, (_of_its_thread(named, holders, context) for named in members)), holder)
        if holder is None:
            unheld.setdefault(_main(members), []).append(members)
        else:
            mark = _mark_of(holder)
            held.setdefault(mark, []).extend(members)
            by_main.setdefault(_main(held[mark]), {})[mark] = holder
    causes: dict[_Named, CommonCause] = {}
    for main, parts in unheld.items():
        # Of several processes one has a pipe of its own: that is no reason to report them separately.
        if any(len(members) > 1 for members in parts):
            causes.update(dict.fromkeys(itertools.chain(*parts), CommonCause((main, "with what is theirs"))))
    for main, by_holder in by_main.items():
        whole = None if main in unheld else _container_of(list(by_holder.values()))
        if len(by_holder) > _MOST_HOLDERS:
            whole = whole or CommonCause("many holders")
        elif not all(holder.is_thing for holder in by_holder.values()):
            whole = None
        for mark, holder in by_holder.items():
            # What threads work for says more of them.
            if any(of != "threads" for of, _ in held[mark]):
                cause = replace(holder, key=("held", mark)) if whole is None else replace(whole, key=("held", main))
                cause = replace(cause, by_thread=not cause.ending and _is_by_thread(held[mark], context))
                causes.update(dict.fromkeys(held[mark], cause))
        if whole is None and main == "file-descriptors":
            apart = [(each, held[mark]) for mark, each in by_holder.items() if _suspect_edge(each.path) not in edges]
            causes.update(_of_one_maker(apart, context))
    return causes


def _of_its_thread(named: _Named, holders: Mapping[_Named, CommonCause], context: Context) -> CommonCause | None:
    """Return what holds the running thread that made a thing: it may work for what the program has to end."""
    maker = context.maker_of(*named)
    return None if maker is None else holders.get(("threads", maker.thread))


def _is_by_thread(things: Sequence[_Named], context: Context) -> bool:
    """Return whether a running thread is one of some things, and has made another of them."""
    makers = (context.maker_of(*named) for named in things)
    return any(maker is not None and ("threads", maker.thread) in things for maker in makers)


def _mark_of(holder: CommonCause) -> Hashable:
    """Return what a holder shares with those that are the same: nothing tells apart what `atexit` has twice."""
    in_c = bool(holder.path) and holder.path[0].type == "interpreter"
    return tuple(hop.edge for hop in holder.path) if in_c else holder.key


def _of_one_maker(held: Sequence[tuple[CommonCause, Sequence[_Named]]], context: Context) -> dict[_Named, CommonCause]:
    """Return the cause of descriptors that one line has made for several holders, with what holds all of these.

    Where nothing does, the first holder stands for the others.
    """
    made: dict[str, list[tuple[CommonCause, Sequence[_Named]]]] = {}
    for holder, members in held:
        places = {context.made_at(of, name) for of, name in members}
        made.setdefault(places.pop() if len(places) == 1 else "", []).append((holder, members))
    causes: dict[_Named, CommonCause] = {}
    for place, some in made.items():
        if place and len(some) > 1:
            holders = [holder for holder, _ in some]
            first, more = holders[0], f" (and {len(some) - 1} more)"
            advice = f"{f'call {all_of(first.ending)} of' if first.ending else 'end'} each in teardown"
            alone = replace(first, holder=first.holder + more, path=(), advice=advice)
            cause = replace(_container_of(holders) or alone, key=("made", place))
            causes.update(dict.fromkeys(itertools.chain(*(members for _, members in some)), cause))
    return causes


def with_holders(leak: ItemLeak, context: Context, *, with_cause: bool = False) -> Finding:
    """Return a finding about things that several lives have left, with who holds them: they stay one finding.

    Args:
        leak: the finding and the things.
        context: what is known when it is explained.
        with_cause: whether the kind of what holds them is its cause, where that is unknown; else it is known as it was.
    """
    if leak.key == "threads":
        return with_work(leak, context).finding
    causes = _causes_by_name(_stand_ins({leak.key: [*leak.names]}, context), context)
    finding = _with_places(leak, context, held=bool(causes)).finding
    facts = _facts_of(causes, len(leak.names))
    if facts is None:
        return finding
    note, advice = facts.note, finding.advice or facts.advice
    cause = facts.cause if with_cause and finding.cause == "unknown" else finding.cause
    return noted(finding, f";{note.text}", note.holder, note.rest, cause=cause, path=facts.path, advice=advice)


def holder_of_new(key: str, known: Collection[int]) -> HolderFacts | None:
    """Return who holds the threads, descriptors or children of this process that are new, where the program does.

    The kernel's numbers of those that are not are `known`. Of threads it is said what most of them run.
    """
    if key != "threads":
        own = os.getpid()
        new = (
            [str(number) for number in children_of(own) if number not in known]
            if key == "processes"
            # Without the folder that is open to list them.
            else [
                f"{number} -> {target}"
                for number, target in numbered_descriptors(own).items()
                if number not in known and target != f"/proc/{own}/fd"
            ]
        )
        owners = _stand_ins({key: new}, Context())
        # Who holds a few is not who leaves them all.
        if 2 * len(owners) <= len(new):
            return None
        # One may have several descriptors, as a `SharedMemory` has with its map.
        in_one = _container_of_most([*{id(item): item for item in owners.values()}.values()])
        return in_one or _facts_of(_causes_by_name(owners, Context(living=True)), len(owners))
    threads = [each for each in threading.enumerate() if each.native_id not in known]
    if not threads:
        return None
    causes = _causes_by_name({(key, thread_key(each)): each for each in threads}, Context(living=True))
    # That it runs keeps each of them: who else does may end it.
    kept = {named: cause for named, cause in causes.items() if len(cause.path) > 1}
    facts = _facts_of(kept, len(threads)) or HolderFacts(
        note=Note(""), cause="thread", verdict=None, path=(), advice=""
    )
    text = f" {most_work(threads)}{',' if facts.note.text else ''}{facts.note.text}"
    return msgspec.structs.replace(facts, note=msgspec.structs.replace(facts.note, text=text))


def _container_of_most(items: Sequence[Any]) -> HolderFacts | None:
    """Return the container that has most of some objects, each in an entry of its own; None where none has.

    In a program that runs on, what leads to it is in use: the container is what grows.
    """
    explanations = Context(living=True).explain(items) if len(items) > 1 else []
    entries: dict[tuple[Hop, ...], set[str]] = {}
    for each in explanations:
        for depth, hop in enumerate(each.path):
            if depth and hop.edge.startswith("["):
                entries.setdefault(each.path[:depth], set()).add(hop.edge)
    path, found = max(entries.items(), key=lambda item: len(item[1]), default=((), set()))
    if 2 * len(found) <= len(items):
        return None
    first = next(each for each in explanations if each.path[: len(path)] == path)
    some = "" if len(found) == len(items) else f" {len(found)} of them"
    # A thread's or a variable's is named behind what it has.
    entry = way_text(first.path[len(path) :])
    if entry in first.holder:
        holder = first.holder.replace(entry, "", 1).removeprefix(" of ")
    elif path[0].type == "thread":
        holder = f"{path[-2].type.rpartition('.')[2]}{path[-1].edge} of thread {path[0].edge!r}"
    elif path[0].type == "frame" and len(path) == 2:
        holder = variable_of_frame(path[0].edge, path[1].edge)
    else:
        holder = way_text(path)
    return HolderFacts(note=Note(f"{some} held by ", holder), cause=first.cause, verdict=None, path=path, advice="")


def _facts_of(causes: Mapping[_Named, CommonCause], count: int) -> HolderFacts | None:
    """Return who holds some of `count` things of one resource, by what is known of each; None where nobody does."""
    by_holder = {cause.holder: cause for cause in causes.values()}
    ways = [by_holder[holder] for holder, _ in Counter(cause.holder for cause in causes.values()).most_common()]
    if not ways:
        return None
    path = _path_to_entries(ways) if len(ways) > 1 else ways[0].path
    holder, others, advice = ways[0].holder, "", ways[0].advice
    if len(ways) > 1 and path is None:
        others = first_of([way.holder for way in ways], _MOST_NAMED).removeprefix(holder)
        if all(way.ending for way in ways):
            calls = [on(way.holder, way.ending) for way in ways]
            advice = f"end each in teardown: {first_of(calls, _MOST_NAMED)}"
        else:
            advice = "; ".join(list(dict.fromkeys(way.advice for way in ways if way.advice))[:_MOST_NAMED])
    elif len(ways) > 1 and path is not None:
        holder = way_text(path)
        advice = _end_each([way.ending or way.part_ending for way in ways], holder)
        idle = {way.idle for way in ways}
        if len(idle) == 1 and ways[0].idle:
            advice += f": {ways[0].idle} does not end it"
    some = "" if len(causes) == count else f" {len(causes)} of them"
    return HolderFacts(
        note=Note(f"{some} held by ", holder, others),
        cause=ways[0].kind,
        verdict=None,
        path=ways[0].path if path is None else path,
        advice=advice,
    )


def _path_to_entries(ways: Sequence[CommonCause]) -> tuple[Hop, ...] | None:
    """Return the way to the container in whose entries all of several holders are; None where there is none."""
    paths = [way.path for way in ways]
    common = len(os.path.commonprefix([[hop.edge for hop in path] for path in paths]))
    is_in_entries = common > 0 and all(path[common:] and path[common].edge.startswith("[") for path in paths)
    return paths[0][:common] if is_in_entries else None


def _main(members: Sequence[_Named]) -> str:
    """Return the resource that says most of a cause."""
    return min((key for key, _ in members), key=lambda key: BELONGING.index(key.partition(" ")[0]))


def _opener(key: str, name: str, names: Mapping[str, list[str]]) -> Hashable:
    """Return what has opened a descriptor that no object stands for, where its resource shows; else the thing."""
    for resource in RESOURCES:
        own = resource.rule.key
        if own not in names or resource.opens is None:
            continue
        if key == own or (key == "file-descriptors" and resource.opens.fullmatch(name)):
            return own
    return key, name


def _stand_ins(names: Mapping[str, list[str]], context: Context) -> dict[_Named, Any]:
    """Return the object that stands for each thing, by resource and name, of those that have one."""
    if not names:
        return {}
    owners = stand_ins(census_of(context.walk), {**names})
    for key, own in names.items():
        resource = resource_of(key)
        if resource is not None:
            owners.update(((key, name), item) for name, item in resource.objects(own).items())
    opened = [("file-descriptors", name) for name in names.get("file-descriptors", ())]
    unowned = [named for named in opened if named not in owners]
    # What a process group has opened, which shows, no other object has.
    natively = [named for named in unowned if not context.made_at(*named) and _opener(*named, names) == named]
    owner = of_library(context) if natively else None
    owners.update({} if owner is None else dict.fromkeys(natively, owner))
    owners.update(_with_numbers([named for named in unowned if named not in owners], context))
    return owners


def _with_numbers(opened: Sequence[_Named], context: Context) -> dict[_Named, Any]:
    """Return the object that has the number of each descriptor as an attribute, and whose method has opened it."""
    makers = {named: context.maker_of(*named) for named in opened}
    functions = {named: maker.functions for named, maker in makers.items() if maker is not None and maker.functions}
    if not functions or context.born is None:
        return {}
    by_number = {int(name.partition(" ")[0]): (key, name) for key, name in functions}
    opened_by = {number: functions[named] for number, named in by_number.items()}
    found = having_numbers(census_of(context.walk).among(context.born), opened_by)
    return {by_number[number]: item for number, item in found.items()}


def of_library(context: Context) -> Any:
    """Return the object of a library's C code that came with the leak, and that the program has and can end.

    What a library has for itself as it is imported is new, too. Of several, that on which another one is built; None
    where there is none.
    """
    if context.born is None:
        return None
    census, born = census_of(context.walk), context.born

    def is_wanted(kind: type) -> bool:
        return bool(ending_of(kind))

    new = of_libraries(census, born, is_wanted, of_any_age=False) + with_handles(census, born, is_wanted)
    found = _first_held(new, context)
    # What may be older than the leak comes only where nothing of it is new. (By then the walk may be another one.)
    if found is None:
        found = _first_held(of_libraries(census_of(context.walk), born, is_wanted), context)
    return found


def _first_held(found: Sequence[Any], context: Context) -> Any:
    """Return the first of some objects that the program has, or of those that others of them are built on."""
    holders = context.first_holders(found) if found else []
    held = [
        item
        for item, holder in zip(found, holders, strict=True)
        if holder is not None and not is_installed(holder.path[0].edge)
    ]
    needed = set(map(id, gc.get_referents(*held, *filter(None, map(instance_dict, held)))))
    return next((item for item in held if id(item) in needed), held[0] if held else None)


def _apart(leak: Leak, context: Context) -> list[Leak]:
    """Part threads by what they do, and what caches keep by the cache; leave anything else as it is."""
    if isinstance(leak, ItemLeak) and leak.key == "threads":
        return [*by_work(leak, context)]
    if isinstance(leak, ItemLeak) and len(caches := _caches_of(leak)) > 1:
        kept = [
            {name: size for name, size in leak.names.items() if id(leak.cached[name].cache()) == cache}
            for cache in caches
        ]
        return [only(leak, names) for names in kept]
    return [leak]


_END_NATIVE = (
    "no Python code was seen to open it: end in teardown what has been made of a library in C, by its close(), "
    "destroy() or term()"
)
"""What to do about a pipe, a socket or the like of which neither a holder nor the code is known that made it."""


def _with_places(leak: Leak, context: Context, *, held: bool) -> Leak:
    """Return a finding about things that the program's code was seen to make with where it did.

    What a resource advises is for things that nobody is seen to hold.
    """
    if not isinstance(leak, ItemLeak) or leak.key not in _MADE:
        return leak
    resource = resource_of(leak.key)
    if held and resource is not None and leak.finding.advice == resource.advice([*leak.names]):
        leak = replace(leak, finding=restated(leak.finding, {"advice": None}))
    made = [context.made_at(leak.key, name) for name in sorted(leak.names)]
    places = list(dict.fromkeys(filter(None, made)))
    if not places:
        # What has a path may have been opened by code that nobody looks at.
        is_native = leak.key == "file-descriptors" and not any(
            " -> /" in name or context.maker_of(leak.key, name) for name in leak.names
        )
        if is_native and not (held or leak.finding.advice or leak.finding.remedy):
            leak = replace(leak, finding=restated(leak.finding, {"advice": _END_NATIVE}))
        return leak
    finding = noted(leak.finding, f"; {_MADE[leak.key]} in {first_of(places, _SHOWN_PLACES)}")
    if leak.key == "file-descriptors" and all(made) and not (held or finding.advice or finding.remedy):
        # No object closes it as it goes: the code that made it has a number alone, or has lost it.
        finding = restated(
            finding, {"advice": f"call os.close() with {'the' if len(made) == 1 else 'each'} descriptor in teardown"}
        )
    return replace(leak, finding=finding)


def _caches_of(leak: ItemLeak) -> set[int]:
    """Return the identities of the caches that keep what a finding is about."""
    return {id(leak.cached[name].cache()) for name in leak.names if name in leak.cached}


def _changes_for(leak: Leak) -> set[Hashable]:
    """Return the caches that have to be emptied for a finding, and the entries that have to be deleted."""
    if isinstance(leak, ItemLeak):
        cut = None if leak.explanation is None else leak.explanation.cut
        # A pool may hold more than what it is kept with, so that it is not reported as a part of that.
        pools = {("pools", _change(cut, leak.finding.device))} if cut is not None else set()
        return {*_caches_of(leak), *pools}
    cuts = (cut for explanation in leak.explanations.values() for cut in explanation.cuts)
    return {_change(cut, leak.finding.device) for cut in cuts}


def _change(cut: Cut, device: str) -> Hashable:
    if cut.place is not None:
        return cut.place.container, cut.place.position, device
    return cut.emptied


def _join_changes(parts: Sequence[_Part]) -> None:
    """Join all that one change gives back: what one cache keeps, modules and tables alike; an entry's key and value."""
    found = [_changes_for(part.leak) if part.cause is None else set() for part in parts]
    every = [next(iter(changes)) if len(changes) == 1 else 0 for changes in found]
    for part, change in zip(parts, every, strict=True):
        if change and every.count(change) > 1:
            part.cause = CommonCause(("change", change))


def _container_of(holders: Sequence[CommonCause]) -> CommonCause | None:
    """Return what holds several things that each are held by an entry of it."""
    ways = {tuple(hop.edge for hop in holder.path[:-1]) for holder in holders}
    if len(holders) < 2 or len(ways) != 1 or not next(iter(ways)):
        return None
    path = holders[0].path[:-1]
    name = way_text(path)
    endings = [holder.ending for holder in holders]
    return replace(holders[0], holder=name, path=path, advice=_end_each(endings, name))


def _end_each(endings: Sequence[str], name: str) -> str:
    """Return the advice to end several objects, each by its own call, that are all in what has a name."""
    end = f"call {all_of(endings[0])} of" if endings[0] and len({*endings}) == 1 else "end"
    return f"{end} each that {name} holds in teardown"


def _causes_by_name(
    owners: Mapping[_Named, Any], context: Context, names: Names | None = None
) -> dict[_Named, CommonCause]:
    """Return what holds the things that an object stands for; `names` is what is known of before the leak."""
    objects = list({id(item): item for item in owners.values()}.values())
    # A thread that runs on has what its object has, which the program can end.
    threads = set(map(id, threading.enumerate()))
    holders = context.first_holders(objects, ignore={id(owners)}, not_roots=threads, names=names)
    # Where nothing is known from before, age does not tell an owner that is new from one that is meant to stay.
    with_owner = names is None
    wanted = {of for each in holders if each for of in (each.identity, *each.through)}
    found = {id(item): item for item in (*objects_of(wanted, context.walk), *objects)}
    of_object: dict[int, list[_Named]] = {}
    for named, item in owners.items():
        of_object.setdefault(id(item), []).append(named)
    by_object = {
        id(item): _cause(holder, _Thing.of(item, of_object[id(item)]), found, with_owner=with_owner)
        for item, holder in zip(objects, holders, strict=True)
    }
    of_holder: dict[Hashable, list[CommonCause]] = {}
    for cause in by_object.values():
        if cause is not None:
            of_holder.setdefault(cause.key, []).append(cause)
    return {
        named: _with_all_ended(cause, of_holder[cause.key])
        for named, item in owners.items()
        if (cause := by_object[id(item)]) is not None
    }


def _with_all_ended(cause: CommonCause, others: Sequence[CommonCause]) -> CommonCause:
    """Return a cause with the advice to end all parts of its holder that things of the others are in."""
    if len({other.advice for other in others}) == 1:
        return cause
    calls = list(dict.fromkeys(other.part_call for other in others if other.part_call))
    if calls and cause.idle and len({other.idle for other in others}) == 1:
        return replace(cause, advice=f"{_said_once(calls)} in teardown: {cause.idle} ends none of these")
    return replace(cause, advice=_end_each([other.part_ending for other in others], cause.holder))


def _said_once(calls: Sequence[str]) -> str:
    """Return the advice to make some calls, with what leads to all they are of in front of them."""
    of = os.path.commonprefix([call.removeprefix("os.close(") for call in calls]).rpartition(".")[0]
    said = first_of(calls, _MOST_NAMED)
    return f"with it = {of}, call {said.replace(of, 'it')}" if len(of) > _LONGEST_SAID_AGAIN else f"call {said}"


def _cause(
    holder: Holder | None, thing: _Thing, found: Mapping[int, object], *, with_owner: bool
) -> CommonCause | None:
    """Return the first object on the way that should be gone; None where nothing of the program's leads to it.

    Args:
        holder: that object.
        thing: what it holds.
        found: objects by their identities, the holder and those on the way among them.
        with_owner: whether a library's object that has the item to itself is named in its stead.
    """
    if holder is None:
        return None
    path = _of_thread(holder.path)
    is_thing, itself = holder.identity == id(thing.item), found.get(holder.identity)
    on_way = [found[each] for each in holder.through | {id(thing.item)} if each in found]
    if with_owner and is_thing and (owner := _owner_in(path)) < len(path):
        path = path[:owner]
        itself = next((each for each in on_way if type_name(type(each)) == path[-1].type), None)
    name, (root, *_, last) = way_text(path), (path[0], *path)
    ending = ending_of(type(itself), itself) if itself is not None else ending_of(class_named(last.type))
    if itself is not None and _is_over(itself):
        # What is left is a part of it, as the pipe from a process that has ended.
        ending = ""
    idle, part, part_ending = "", "", ""
    if itself is not None and thing.is_left_by(itself, ending):
        idle, ending = f"{last.type}.{ending}", ""
    if not ending:
        part, part_ending, inner_idle = _end_within(path, holder, on_way, thing)
        idle = idle or inner_idle
    ending, part_ending = thing.fitting(ending), thing.fitting(part_ending)
    but = f": {idle} does not end it" if idle else ""
    part_call = on(part, part_ending) if part_ending else ""
    if idle and not part and thing.numbers:
        owner_name = way_text(_way_of(path, holder))
        part_call = ", ".join(f"os.close({owner_name}.{each})" for each in attributes_with(thing.item, thing.numbers))
    # To let go of who holds them ends none of these.
    outlives = bool(thing.resources & {"processes", "shared-memory", "threads"})
    exception = _exception_on(_way_of(path, holder))
    at_exit = next((each for each in on_way if type(each) is MethodType and each.__self__ is itself), None)
    if exception:
        # What the functions had in hand when it was raised is no part of it, and ends where they do.
        advice = f"set {exception}.__traceback__ to None: it keeps the local variables of its functions"
    elif idle and at_exit and root.edge.startswith("atexit.") and not thing.is_left_by(itself, at_exit.__name__):
        advice = f"call {at_exit.__name__}() of the {last.type} in teardown, and give it to atexit.unregister(){but}"
    elif is_thing and (closing := _call_that_closes(thing, name, path)):
        advice = closing
    elif len(path) == 1 and root.type == "interpreter":
        advice = advice_for_root(root.edge)
    elif not ending and not (part_call and outlives) and (known := known_advice(name)):
        advice = known
    elif root.type in ("interpreter", "thread") or not _is_code(path, outlives) or _is_inside_library(path):
        # No code leads to what only C holds, or a thread that runs, or what is in a set; what a library has noted for
        # itself is the program's to end where it was made.
        of, call = (last.type, ending) if ending or not part else (type_name(type(thing.item)), part_ending)
        advice = f"{f'call {all_of(call)} of' if call else 'end'} the {of} in teardown{but}"
        advice += "".join(f"; {hint}" for hint in [advice_for_root(root.edge)] if hint)
    elif type(itself) is FINALIZER:
        advice = advice_for_finalizer(name, [itself])
    elif part_call and not part:
        advice = f"call {part_call} in teardown{but}"
    elif not ending:
        lets_go = is_library(last.type) and not part
        advice = f"let go of {name} in teardown" if lets_go else f"{ended(part or name, part_ending)}{but}"
    else:
        advice = ended(name, ending)
    return CommonCause(
        holder.identity,
        name,
        path,
        advice,
        holder.cause,
        ending,
        part_ending,
        part_call,
        idle,
        is_thing,
        holder.through,
    )


def _call_that_closes(thing: _Thing, name: str, path: Sequence[Hop]) -> str:
    """Return what to do about what would hand a descriptor to `os.close`: once nobody has it, nothing closes that.

    Empty where it is no such thing, or where no code leads to it.
    """
    kind = type(thing.item) if thing.resources == {"file-descriptors"} else None
    if kind is FINALIZER:
        return f"keep what {name} returned, and call it in teardown: after detach() nothing closes the descriptor"
    if kind is tuple:
        return "call os.close() with the descriptor in teardown, and give os.close to atexit.unregister()"
    is_code = path[0].type == "module" and not _is_inside_library(path) and not known_advice(name)
    return f"call {name}() in teardown" if kind in (functools.partial, FunctionType) and is_code else ""


class _Thing(msgspec.Struct, frozen=True):
    """An object that stands for things which did not come back, and should be ended.

    Attributes:
        item: the object.
        resources: what it stands for.
        numbers: the descriptors whose numbers it has, where it is an object of the program's own.
    """

    item: object
    resources: frozenset[str]
    numbers: Sequence[int]

    @classmethod
    def of(cls, item: object, named: Sequence[_Named]) -> _Thing:
        is_own = not is_installed(module_of_class(type(item)))
        numbers = [int(name.partition(" ")[0]) for key, name in named if is_own and key == "file-descriptors"]
        return cls(item, frozenset(key for key, _ in named), numbers)

    def is_left_by(self, owner: object, call: str) -> bool:
        """Return whether a call of an object on the way to it surely does not end it."""
        if not call or (owner is self.item and not self.numbers):
            return False
        needs = "unlink" if "unlink" in self.fitting(ending_of(type(self.item))) else ""
        return leaves_alone(owner, call, self.numbers or [self.item], needs)

    def fitting(self, ending: str) -> str:
        """Return what ends shared memory, by what is left of that: its name, its descriptors, or both."""
        if ending != "unlink()" or "file-descriptors" not in self.resources:
            return ending
        return END_OF_SHARED_MEMORY if "shared-memory" in self.resources else "close()"


def _is_over(item: object) -> bool:
    """Return whether an object stands for a process that has ended and was waited for: nothing ends it once more."""
    return is_a(item, subprocess.Popen) and attribute(item, "returncode") is not None


def _owner_in(path: Sequence[Hop]) -> int:
    """Return after how many hops of a path to a thing stands what has it to itself: a file its descriptor.

    That is the outermost object of a library which can be ended and leads on by names that only its own code uses, or
    that its end names, as that of a handler of `logging` does its stream.
    """
    owner = turn = len(path)
    while turn > 1:
        holder, edge = path[turn - 2], path[turn - 1].edge
        if holder.type not in _CONTAINERS:
            is_inside = edge.startswith("._") or edge == UNNAMED or holder.type.startswith("_io.")
            is_part = is_inside or ends_part(class_named(holder.type), edge.removeprefix("."))
            if not (is_part and is_installed(holder.type)):
                break
            owner = turn - 1 if ending_of(class_named(holder.type)) else owner
        turn -= 1
    return owner


def _way_of(path: tuple[Hop, ...], holder: Holder) -> tuple[Hop, ...]:
    """Return the whole way to what is held, of which a path is the beginning."""
    return holder.way if holder.way[: len(path)] == path else path


def _exception_on(way: Sequence[Hop]) -> str:
    """Return the first exception of which a way goes on through the traceback, as code; empty where there is none."""
    traceback = next((turn for turn, hop in enumerate(way) if hop.edge == ".__traceback__"), 0)
    return way_text(way[:traceback])


def _end_within(path: tuple[Hop, ...], holder: Holder, on_way: Sequence[object], thing: _Thing) -> tuple[str, str, str]:
    """Return the first part of a holder that can be ended and holds the rest, how, and whose call does not."""
    way, idle = _way_of(path, holder), ""
    for turn in range(len(path), len(way)):
        if way[turn].edge.startswith("._") and is_library(way[turn - 1].type):
            break
        of_its_type = [each for each in on_way if type_name(type(each)) == way[turn].type]
        is_known = len(of_its_type) == 1
        ending = ending_of(class_named(way[turn].type), of_its_type[0] if is_known else None)
        if ending and is_known and thing.is_left_by(of_its_type[0], ending):
            idle = f"{way[turn].type}.{ending}"
        elif ending:
            return way_text(way[: turn + 1]), ending, idle
    return "", "", idle


def _is_code(path: Sequence[Hop], outlives: bool) -> bool:
    """Return whether code leads along a path; where a thing `outlives` its holder, not through a closure either."""
    edges = [hop.edge for hop in path[1:]]
    return _IN_SET not in edges and not (outlives and any(edge.startswith("cell ") for edge in edges))


def _is_inside_library(path: Sequence[Hop]) -> bool:
    """Return whether a path begins at a private name of a module of Python's or torch's."""
    return path[0].type == "module" and is_library(path[0].edge) and path[1:2] != () and path[1].edge.startswith("._")


def _of_thread(path: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """Return the path from the thread that runs, where it begins at Python's own table of those."""
    if [hop.edge for hop in path[:2]] != ["threading", "._active"] or len(path) < 3:
        return path
    running = (each for each in threading.enumerate() if path[2].edge == f"[{thread_ident(each)}]")
    thread = next(running, None)
    if thread is None:
        return path
    return (Hop(type="thread", edge=f"thread {thread_name(thread)!r}", suspect=path[2].suspect), *path[3:])


def _mapped_files(found: Sequence[Leak]) -> dict[_Named, int]:
    """Return the descriptors of files in which kept tensors lie, with the place of their finding."""
    names: dict[str, list[_Named]] = {}
    for leak in found:
        if isinstance(leak, ItemLeak) and leak.key == "file-descriptors":
            for name in leak.names:
                path = name.partition(" -> ")[2].removesuffix(" (deleted)")
                names.setdefault(path, []).append((leak.key, name))
    places: dict[_Named, int] = {}
    for turn, leak in enumerate(found if any(path.startswith("/") for path in names) else ()):
        if isinstance(leak, TensorLeak):
            paths = files_at([address for device, address in leak.keys if device == "cpu"])
            places.update((name, turn) for path in paths for name in names.get(path, ()))
    # Where the graph of a loss is what is kept, that has a cause of its own.
    return {name: turn for name, turn in places.items() if _graph_of(found[turn]) is None}


def _held_by_settings(found: Sequence[Leak]) -> dict[_Named, int]:
    """Return a process-wide setting that is left and whose value holds tensors, with the place of the tensors' finding.

    The message on several settings states what each was and how it is put back: these stay together.
    """
    held: dict[_Named, int] = {}
    for left in found:
        if not isinstance(left, ItemLeak) or left.key != "globals" or len(left.changes) != 1:
            continue
        (change,) = left.changes
        root = next((edge for known, edge in _ROOTS if change.setting.startswith(known)), change.setting)
        for turn, leak in enumerate(found):
            path = leak.finding.path if isinstance(leak, TensorLeak) else ()
            if path and path[0].type == "interpreter" and (path[0].edge or "").startswith(root):
                held.update(((left.key, name), turn) for name in left.names)
                break
    return held


def _of_added_objects(
    found: Sequence[Leak], shared: Mapping[_Named | int, CommonCause]
) -> dict[_Named | int, CommonCause]:
    """Return the setting to which an object was added, with the cause of things that the object holds: a log's file."""
    single = {leak.changes[0].added: leak for leak in found if isinstance(leak, ItemLeak) and len(leak.changes) == 1}
    causes = list(shared.values())
    return {
        (leak.key, name): cause
        for identity, leak in single.items()
        for cause in causes
        if identity in cause.through
        for name in leak.names
    }


def _split(leak: ItemLeak, shared: Mapping[_Named | int, CommonCause]) -> list[tuple[Leak, CommonCause | None]]:
    """Return a leak as one for each cause of its things, and one for those whose cause is not known."""
    parts: dict[Hashable, tuple[CommonCause | None, dict[str, int]]] = {}
    for name, size in leak.names.items():
        cause = shared.get((leak.key, name))
        parts.setdefault(None if cause is None else cause.key, (cause, {}))[1][name] = size
    if len(parts) < 2:
        return [(leak, next(iter(parts.values()))[0] if parts else None)]
    return [(only(leak, names), cause) for cause, names in parts.values()]


def _graph_of(leak: Leak) -> CommonCause | None:
    """Return the loss behind whose graph something is kept."""
    if not isinstance(leak, TensorLeak) or leak.finding.cause != "autograd":
        return None
    way = _way_to_loss(leak.finding.path)
    if not way:
        return None
    loss = "".join(way)
    advice = f"detach it before it is kept: {loss} = {loss}.detach(), or .item() for a figure"
    return CommonCause(way, loss, leak.finding.path[: len(way)], advice)


def _way_to_loss(path: Sequence[Hop]) -> tuple[str, ...]:
    """Return the edges that lead to the tensor whose graph a path goes through; none if it goes through no graph."""
    end = next((turn for turn, hop in enumerate(path) if hop.edge == ".grad_fn"), 0)
    return tuple(hop.edge for hop in path[:end])


def _join_losses(parts: Sequence[_Part]) -> None:
    """Join losses with their graphs, held by the same edges, where nothing else is in their finding."""
    of_tensors = [(part, part.leak.explanations) for part in parts if isinstance(part.leak, TensorLeak)]
    graphs = {
        _way_to_loss(explanation.path): part.cause
        for part, explanations in of_tensors
        if part.cause is not None and part.leak.finding.cause == "autograd"
        for explanation in explanations.values()
    }
    for part, explanations in of_tensors:
        ways = {tuple(hop.edge for hop in explanation.path) for explanation in explanations.values()}
        if part.cause is None and ways and ways <= graphs.keys():
            part.cause = graphs[min(ways)]


def _join_edges(parts: Sequence[_Part]) -> None:
    """Join what has no bytes and hangs on the same edge as tensors or each other: an engine's thread and its sockets.

    One change lets go of all of them.
    """
    edges = _edges_of_tensors([part.leak for part in parts])
    for turn, part in enumerate(parts):
        if not isinstance(part.leak, ItemLeak) or part.leak.finding.bytes:
            continue
        edge = _suspect_edge(part.leak.finding.path or (() if part.cause is None else part.cause.path))
        of = edges.setdefault(edge, turn) if edge else turn
        if of != turn:
            part.cause = parts[of].cause = parts[of].cause or part.cause or CommonCause(("edge", of))


def _edges_of_tensors(leaks: Sequence[Leak]) -> dict[tuple[str, ...], int]:
    """Return the edges that tensors hang on, as those of `_suspect_edge`, with the places of their findings."""
    return {
        edge: turn
        for turn, leak in reversed([*enumerate(leaks)])
        if isinstance(leak, TensorLeak)
        for explanation in leak.explanations.values()
        if (edge := _suspect_edge(explanation.path))
    }


def _suspect_edge(path: Sequence[Hop]) -> tuple[str, ...]:
    """Return the edges of a path up to that which should be gone; none where no edge of it is known to be."""
    first = next((turn for turn, hop in enumerate(path) if hop.suspect), None)
    return () if first is None else tuple(hop.edge for hop in path[: first + 1])


def _join_threads(parts: Sequence[_Part]) -> None:
    """Join the running threads that hold what is kept with that: they end together."""
    roots = [
        (part, {explanation.path[0] for explanation in part.leak.explanations.values() if explanation.path})
        for part in parts
        if isinstance(part.leak, TensorLeak)
    ]
    for part in parts:
        leak = part.leak
        if not isinstance(leak, ItemLeak) or leak.key != "threads":
            continue
        running = [thread for thread in threading.enumerate() if thread_key(thread) in leak.names]
        frames = {frame for thread in running for frame in frames_of(thread_ident(thread))}
        for of, own in roots:
            of_threads = tuple(f"{root.edge} (" for root in own if root.type == "thread")
            is_its_own = bool(leak.names) and all(key.startswith(of_threads) for key in leak.names)
            if is_its_own or (of.cause is None and any(root.edge in frames for root in own)):
                _join(parts, part, of)


def _join(parts: Sequence[_Part], one: _Part, other: _Part) -> None:
    """Give two parts, and all that have a cause with one of them, one cause."""
    causes = [cause for cause in (other.cause, one.cause) if cause is not None]
    advice = one.leak.finding.advice or ""
    joined = causes[0] if causes else CommonCause(("joined", id(one)), advice=advice)
    keys = {cause.key for cause in causes}
    for part in parts:
        if part is one or part is other or (part.cause is not None and part.cause.key in keys):
            part.cause = joined


def _join_host_memory(parts: Sequence[_Part], walk: SharedWalk | None) -> None:
    """Join host memory that lies behind what another finding is about with that."""
    of_host = [part for part in parts if isinstance(part.leak, ItemLeak) and part.leak.key == "host-memory"]
    if not of_host:
        return
    behind = [kept_by([tuple(_objects_of(part.leak, walk))], most=_MOST_REACHED).bytes for part in parts]
    largest = max(range(len(parts)), key=behind.__getitem__)
    # Less than all of it leaves room for another leak, which nothing may hide.
    if behind[largest] >= _EXPLAINED * sum(part.leak.finding.bytes for part in of_host):
        cause = parts[largest].cause or CommonCause(("host-memory", largest))
        for part in (*of_host, parts[largest]):
            part.cause = cause


def _objects_of(leak: Leak, walk: SharedWalk | None) -> list[Any]:
    """Return the objects that stand for a finding: new ones on the way to tensors, threads, entries of caches."""
    if isinstance(leak, TensorLeak):
        new = frozenset().union(*(explanation.new for explanation in leak.explanations.values()))
        return objects_of(new, walk) if new else []
    if leak.key == "threads":
        return [thread for thread in threading.enumerate() if thread_key(thread) in leak.names]
    return [entry for item in leak.cached.values() for entry in item.entries]
