"""One cause, one finding: what a kept pool, process group or loss has left in several resources is reported together.

Two leaks of one test have one cause where the same object that should be gone holds both: the path to each leads
through it.  What no path leads to stays a finding of its own, so that a second leak is not hidden by the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import msgspec

from lowtide.leakcheck.explaining.cut import Cut, Names
from lowtide.leakcheck.explaining.explain import Holder
from lowtide.leakcheck.explaining.expressions import class_named, ending_of, on
from lowtide.leakcheck.explaining.library_objects import advice_for_root
from lowtide.leakcheck.explaining.path_reading import way_text
from lowtide.leakcheck.findings.item_findings import ItemLeak, only
from lowtide.leakcheck.findings.running_threads import with_work, works
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.tensor_findings import TensorLeak
from lowtide.leakcheck.resources import RESOURCES, resource_of
from lowtide.probes.device.graphs import any_graph_alive
from lowtide.probes.heap.holders import SharedWalk, census_of, objects_of
from lowtide.probes.heap.reach import reach
from lowtide.probes.heap.stand_ins import stand_ins
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.objects.foreign import is_a
from lowtide.probes.objects.opened_in_c import files_at
from lowtide.probes.objects.thread_names import thread_ident, thread_key, thread_name
from lowtide.probes.originals import gc, loaded, threading
from lowtide.reports import schema
from lowtide.reports.schema import Finding, Hop
from lowtide.reports.sizes import first_of
from lowtide.reports.statement import noted, restated

_CAPTURE = re.compile(r"(?:^|[\\/])torch[\\/]cuda[\\/]graphs\.py$")
_BEGINS = ("capture_begin", "CUDAGraph.capture_begin")

_MODES = ("__torch_dispatch__", "__torch_function__")
"""What may stand between: the modes under which a compiler captures."""

_CONTAINERS = ("dict", "list", "tuple", "set", "collections.OrderedDict", "collections.defaultdict")
"""Two things in one of these need have no more in common than that."""

BELONGING = tuple(resource.rule.key for resource in RESOURCES)
"""The resources that belong together, that which says most of the cause first."""


Leak: TypeAlias = "TensorLeak | ItemLeak"
"""A finding of which remedies are still to be tried."""


@dataclass(frozen=True)
class CommonCause:
    """What several findings have in common.

    Attributes:
        key: the same for all of them.
        holder: the object that should be gone, as code; empty if there is none.
        path: the way to it.
        advice: what to do about it.
        kind: what the first suspect edge on that way is.
        ending: the call that ends the holder, as `close()`; empty where its class has none.
        is_thing: whether the holder is what the findings are about, and not an object that has it among others.
    """

    key: Hashable
    holder: str = ""
    path: tuple[Hop, ...] = ()
    advice: str = ""
    kind: schema.Cause = "unknown"
    ending: str = ""
    is_thing: bool = False


def by_cause(findings: Iterable[Finding], causes: Mapping[int, CommonCause | None]) -> tuple[Finding, ...]:
    """The findings, those with one cause as one with the others as its parts, where the first of them stood.

    Args:
        findings: those of one subject.
        causes: the cause of each, by the finding's identity; a finding without one stays as it is.
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
    first, *parts = sorted(group, key=_rank)
    of_setting = next((part.advice for part in parts if part.resource == "globals"), None)
    advice = first.advice or cause.advice or of_setting
    if not cause.holder:
        return msgspec.structs.replace(first, parts=tuple(parts), advice=advice)
    if first.path:
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


@dataclass
class GraphParts:
    """Which findings of one subject are about the same graphs, each group by the place of its first finding.

    Attributes:
        names: things by their metric's key and their name.
        places: findings about tensors, by their places.
    """

    names: dict[tuple[str, str], int] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)


def graph_parts(found: Sequence[Leak], context: Context) -> GraphParts:
    """Finds out what belongs to the graphs that a subject has left.

    Args:
        found: its findings.
        context: what is known around them.
    """
    pools = [turn for turn, draft in enumerate(found) if isinstance(draft, ItemLeak) and _is_of_graph(draft)]
    kept = [turn for turn, draft in enumerate(found) if isinstance(draft, TensorLeak) and _is_of_graph(draft)]
    parts = GraphParts()
    for turn in pools:
        beside = [other for other in kept if _have_one_holder(found[other], found[turn])]
        for other in beside:
            parts.places.setdefault(other, turn)
        if beside:
            _add(parts, found[turn], turn)
    main: dict[str, int] = {}
    for turn in (*pools, *kept):
        main.setdefault(found[turn].finding.device, turn)
    if main:
        _with_state(parts, found, main, context)
    return parts


def _with_state(parts: GraphParts, found: Sequence[Leak], main: dict[str, int], context: Context) -> None:
    """And the state of the graphs' random numbers, which lives as long as any of them does."""
    state: list[tuple[int, list[str]]] = []
    for turn, draft in enumerate(found):
        device = draft.finding.device
        if device not in main:
            continue
        if isinstance(draft, ItemLeak) and draft.key == f"native {device}":
            at = {name: int(name.rpartition(" ")[2], 16) for name in draft.names}
            stacks = context.stacks(device, list(at.values()))
            state.append((turn, [name for name, address in at.items() if _is_of_capture(stacks.get(address, ()))]))
        elif isinstance(draft, TensorLeak) and draft.finding.verdict == "native-held":
            stacks = context.stacks(device, [address for _, address in draft.sizes])
            if draft.sizes and all(_is_of_capture(stacks.get(address, ())) for _, address in draft.sizes):
                state.append((turn, []))
    state = [(turn, names) for turn, names in state if names or isinstance(found[turn], TensorLeak)]
    if not state or not any_graph_alive():
        return
    for turn, names in state:
        device = found[turn].finding.device
        group = parts.places.get(main[device], main[device])
        if names:
            parts.names.update(((f"native {device}", name), group) for name in names)
        else:
            parts.places[turn] = group
        if isinstance(found[main[device]], ItemLeak):
            _add(parts, found[main[device]], group)
        else:
            parts.places[main[device]] = group


def _add(parts: GraphParts, draft: Leak, group: int) -> None:
    if isinstance(draft, ItemLeak):
        parts.names.update(((draft.key, name), group) for name in draft.names)


def _is_of_graph(draft: TensorLeak | ItemLeak) -> bool:
    is_pool = isinstance(draft, ItemLeak) and draft.finding.resource == "reserved"
    return draft.finding.cause == "cuda-graph" and (is_pool or isinstance(draft, TensorLeak))


def _is_of_capture(stack: Sequence[StackFrame]) -> bool:
    """Whether it was torch's beginning of a capture that allocated."""
    site = next((frame for frame in stack if frame.function.rpartition(".")[2] not in _MODES), None)
    return site is not None and site.function in _BEGINS and _CAPTURE.search(site.file) is not None


def _have_one_holder(one: Leak, other: Leak) -> bool:
    """Whether the ways to both lead through the same object that should be gone, and that is more than a container."""
    first, second = one.finding, other.finding
    return first.device == second.device and any(
        hop.suspect and hop.type not in _CONTAINERS for hop in _common(first.path, second.path)
    )


def _common(one: Sequence[Hop], other: Sequence[Hop]) -> list[Hop]:
    found = []
    for hop, twin in zip(one, other):  # noqa: B905 - the shorter one ends it
        if (hop.edge, hop.type) != (twin.edge, twin.type):
            break
        found.append(hop)
    return found


_EXPLAINED = 0.9
"""The share of the host memory that must lie behind another finding to be a part of it."""

_MOST_HOLDERS = 8
"""Holders of the things of one resource, beyond which these are one finding without a holder."""

_MADE = {"processes": "started", "file-descriptors": "made", "temporary-files": "bound", "shared-memory": "made"}
"""The resources, besides threads, whose makers are noted, and what these do."""

_SHOWN_PLACES = 3

_MOST_REACHED = 100_000
"""Objects that are looked at for arrays behind a finding."""


_ROOTS = (
    ("torch's default hook for saved tensors", "torch._C._autograd._top_saved_tensors_default_hooks(True)"),
    ("torch function mode ", "torch.overrides._get_current_function_mode_stack()"),
    ("torch dispatch mode ", "torch.utils._python_dispatch._get_current_dispatch_mode_stack()"),
)
"""What a setting is called, and the root of paths that is its value, where these are not the same words."""


def with_causes(found: Sequence[Leak], context: Context) -> tuple[list[Leak], list[CommonCause | None]]:
    """The drafts of one subject, those with several causes split, and the cause of each that shares one.

    By one walk over the heap, and none where nothing could share a cause.
    """
    leaks = [draft for draft in found if isinstance(draft, ItemLeak) and draft.key in BELONGING]
    edges = _edges_of_tensors(found)
    shared = _causes_of_things(leaks, context, edges) if {leak.key for leak in leaks} - {"threads"} else {}
    mapped = _mapped_files(found)
    shared.update((("file-descriptors", name), CommonCause(("tensors", turn))) for name, turn in mapped.items())
    by_setting = _held_by_settings(found)
    shared.update((("globals", name), CommonCause(("tensors", turn))) for name, turn in by_setting.items())
    around = {*mapped.values(), *by_setting.values()}
    of_graphs = graph_parts(found, context)
    shared.update((named, CommonCause(("cuda-graph", group))) for named, group in of_graphs.names.items())
    drafts: list[Leak] = []
    causes: list[CommonCause | None] = []
    for turn, draft in enumerate(found):
        own = _graph_of(draft) or (CommonCause(("tensors", turn)) if turn in around else None)
        if own is None and turn in of_graphs.places:
            own = CommonCause(("cuda-graph", of_graphs.places[turn]))
        for part, cause in _split(draft, shared) if isinstance(draft, ItemLeak) else [(draft, own)]:
            apart = _apart(part, context)
            if cause is not None and len(apart) > 1:
                # What a pool's threads do is one of its parts.
                apart = [part]
            held = cause is not None and bool(cause.holder)
            drafts += [_with_places(each, context, held=held) if isinstance(each, ItemLeak) else each for each in apart]
            causes += [cause] * len(apart)
    causes = _with_edges(drafts, _with_changes(drafts, _with_losses(drafts, causes)))
    return drafts, _with_host_memory(drafts, _with_threads(drafts, causes), context.walk)


_Named = tuple[str, str]
"""A thing by its resource and its name."""


def _causes_of_things(
    leaks: Sequence[ItemLeak], context: Context, edges: Collection[tuple[str, ...]]
) -> dict[_Named, CommonCause]:
    """Return the cause of each thing that has a holder in the program, or parts: a process the pipe of its end.

    Things with one holder have one cause, of whatever resource they are, and so do those that each are held by an entry
    of one container.

    Args:
        leaks: the things.
        context: what is known around them.
        edges: those that tensors hang on: what else does is a part of theirs.
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
        if holder is None:
            unheld.setdefault(_main(members), []).append(members)
        else:
            held.setdefault(holder.key, []).extend(members)
            by_main.setdefault(_main(held[holder.key]), {})[holder.key] = holder
    causes: dict[_Named, CommonCause] = {}
    for main, parts in unheld.items():
        # Of several processes one has a pipe of its own: that is no reason to report them separately.
        if any(len(members) > 1 for members in parts):
            causes.update(dict.fromkeys(chain(*parts), CommonCause((main, "with what is theirs"))))
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
                causes.update(dict.fromkeys(held[mark], cause))
        if whole is None and main == "file-descriptors":
            apart = [(each, held[mark]) for mark, each in by_holder.items() if _suspect_edge(each.path) not in edges]
            causes.update(_of_one_maker(apart, context))
    return causes


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
            each = f": {first.ending}" if first.ending else ""
            advice = f"end each where its owner ends{each}"
            alone = replace(first, holder=first.holder + more, path=(), advice=advice)
            cause = replace(_container_of(holders) or alone, key=("made", place))
            causes.update(dict.fromkeys(chain(*(members for _, members in some)), cause))
    return causes


def with_holders(leak: ItemLeak, context: Context) -> Finding:
    """A finding about things that several lives have left, with who holds them: they stay one finding.

    Args:
        leak: the things.
        context: what is known around them.
    """
    if leak.key == "threads":
        told = [with_work(leak, work).finding for work in works(leak.names, context)]
        return told[0] if len(told) == 1 else leak.finding
    causes = _causes_by_name(_stand_ins({leak.key: [*leak.names]}, context), context)
    finding = _with_places(leak, context, held=bool(causes)).finding
    ways = {cause.holder: cause for cause in causes.values()}
    if not ways:
        return finding
    first, others = next(iter(ways.values())), f" (and {len(ways) - 1} more)" if len(ways) > 1 else ""
    some = "" if len(causes) == len(leak.names) else f"{len(causes)} of them "
    advice = finding.advice or first.advice
    return noted(finding, f"; {some}held by ", first.holder, others, path=first.path, advice=advice)


def _main(members: Sequence[_Named]) -> str:
    """Return the resource that says most of a cause."""
    return min((key for key, _ in members), key=BELONGING.index)


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
    owners = stand_ins(census_of(context.walk), {**names})
    for key, own in names.items():
        resource = resource_of(key)
        if resource is not None:
            owners.update(((key, name), item) for name, item in resource.objects(own).items())
    return owners


def _apart(draft: Leak, context: Context) -> list[Leak]:
    """Threads by what they do, and what caches keep by the cache; anything else as it is."""
    if isinstance(draft, ItemLeak) and draft.key == "threads":
        return [*_by_work(draft, context)]
    if isinstance(draft, ItemLeak) and len(caches := _caches_of(draft)) > 1:
        kept = [
            {name: size for name, size in draft.names.items() if id(draft.cached[name].cache()) == cache}
            for cache in caches
        ]
        return [only(draft, names) for names in kept]
    return [draft]


def _with_places(draft: ItemLeak, context: Context, *, held: bool = False) -> ItemLeak:
    """Return a finding about things that the program's code was seen to make with where it did.

    What a resource advises is for things that nobody is seen to hold.
    """
    if draft.key not in _MADE:
        return draft
    resource = resource_of(draft.key)
    if held and resource is not None and draft.finding.advice == resource.advice([*draft.names]):
        draft = replace(draft, finding=restated(draft.finding, {"advice": None}))
    places = dict.fromkeys(filter(None, (context.made_at(draft.key, name) for name in sorted(draft.names))))
    if not places:
        return draft
    said = f"; {_MADE[draft.key]} in {first_of(list(places), _SHOWN_PLACES)}"
    return replace(draft, finding=noted(draft.finding, said))


def _caches_of(draft: ItemLeak) -> set[int]:
    """The identities of the caches that keep what a finding is about."""
    return {id(draft.cached[name].cache()) for name in draft.names if name in draft.cached}


def _changes_for(draft: Leak) -> set[Hashable]:
    """The caches that have to be emptied for a finding, and the entries of containers that have to be deleted."""
    if isinstance(draft, ItemLeak):
        cut = None if draft.explanation is None else draft.explanation.cut
        # A pool may hold more than what it is kept with, so that it is not reported as a part of that.
        pools = {("pools", _change(cut, draft.finding.device))} if cut is not None else set()
        return {*_caches_of(draft), *pools}
    cuts = (cut for explanation in draft.explanations.values() for cut in explanation.cuts)
    return {_change(cut, draft.finding.device) for cut in cuts}


def _change(cut: Cut, device: str) -> Hashable:
    if cut.place is not None:
        return cut.place.container, cut.place.position, device
    return cut.emptied


def _with_changes(drafts: Sequence[Leak], causes: Sequence[CommonCause | None]) -> list[CommonCause | None]:
    """And all that one change gives back: what one cache keeps, modules and tables alike; an entry's key and value."""
    found = [_changes_for(draft) if cause is None else set() for draft, cause in zip(drafts, causes, strict=True)]
    every = [next(iter(changes)) if len(changes) == 1 else 0 for changes in found]
    return [
        CommonCause(("change", change)) if change and every.count(change) > 1 else cause
        for change, cause in zip(every, causes, strict=True)
    ]


def _by_work(draft: ItemLeak, context: Context) -> list[ItemLeak]:
    """Threads by what they do."""
    found = works(draft.names, context)
    rest = {name: size for name, size in draft.names.items() if not any(name in work.names for work in found)}
    parts = [(only(draft, {name: draft.names[name] for name in work.names}), work) for work in found]
    if len(found) + bool(rest) == 1:
        parts = [(draft, work) for work in found]
    leaks = [with_work(part, work) for part, work in parts]
    return [*leaks, *([only(draft, rest) if leaks else draft] if rest else [])]


def _container_of(holders: Sequence[CommonCause]) -> CommonCause | None:
    """What holds several things that each are held by an entry of it."""
    ways = {tuple(hop.edge for hop in holder.path[:-1]) for holder in holders}
    if len(holders) < 2 or len(ways) != 1 or not next(iter(ways)):
        return None
    path = holders[0].path[:-1]
    name = way_text(path)
    endings = {holder.ending for holder in holders}
    each = f": call {endings.pop()} of each" if len(endings) == 1 and "" not in endings else ""
    return replace(holders[0], holder=name, path=path, advice=f"end what {name} holds where its owner ends{each}")


def _causes_by_name(
    owners: Mapping[_Named, Any], context: Context, names: Names | None = None
) -> dict[_Named, CommonCause]:
    """What the things that an object stands for are held by.

    Args:
        owners: these objects.
        context: what is known around them.
        names: what is known of the program before the leak.
    """
    objects = list({id(item): item for item in owners.values()}.values())
    # A thread that runs on has what its object has, which the program can end.
    threads = set(map(id, threading.enumerate()))
    holders = context.first_holders(objects, ignore={id(owners)}, not_roots=threads, names=names)
    by_object = {id(item): _cause(holder, item) for item, holder in zip(objects, holders, strict=True)}
    return {named: cause for named, item in owners.items() if (cause := by_object[id(item)]) is not None}


def _cause(holder: Holder | None, item: object) -> CommonCause | None:
    """The first object on the way that should be gone; None where nothing of the program's leads to it."""
    if holder is None:
        return None
    path = _of_thread(holder.path)
    name, (root, *_, last) = way_text(path), (path[0], *path)
    ending = ending_of(type(item) if holder.identity == id(item) else class_named(last.type))
    advice = f"end {name} where its owner ends" + (f": {on(name, ending)}" if ending else "")
    if root.type in ("interpreter", "thread"):
        # No code leads to what only C holds, or a thread that runs.
        advice = f"end the {last.type} where its owner ends" + (f": {ending}" if ending else "")
        advice += "".join(f"; {hint}" for hint in [advice_for_root(root.edge)] if hint)
    return CommonCause(holder.identity, name, path, advice, holder.cause, ending, holder.identity == id(item))


def _of_thread(path: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """The path from the thread that runs, where it begins at Python's own table of those."""
    if [hop.edge for hop in path[:2]] != ["threading", "._active"] or len(path) < 3:
        return path
    running = (each for each in threading.enumerate() if path[2].edge == f"[{thread_ident(each)}]")
    thread = next(running, None)
    if thread is None:
        return path
    return (Hop(type="thread", edge=f"thread {thread_name(thread)!r}", suspect=path[2].suspect), *path[3:])


def _mapped_files(found: Sequence[Leak]) -> dict[str, int]:
    """The descriptors of files in which tensors that are kept lie, by name, with the place of the tensors' finding."""
    names: dict[str, list[str]] = {}
    for draft in found:
        if isinstance(draft, ItemLeak) and draft.key == "file-descriptors":
            for name in draft.names:
                names.setdefault(name.partition(" -> ")[2].removesuffix(" (deleted)"), []).append(name)
    places: dict[str, int] = {}
    for turn, draft in enumerate(found if any(path.startswith("/") for path in names) else ()):
        if isinstance(draft, TensorLeak):
            paths = files_at([address for device, address in draft.keys if device == "cpu"])
            places.update((name, turn) for path in paths for name in names.get(path, ()))
    # Where the graph of a loss is what is kept, that has a cause of its own.
    return {name: turn for name, turn in places.items() if _graph_of(found[turn]) is None}


def _held_by_settings(found: Sequence[Leak]) -> dict[str, int]:
    """A process-wide setting that is left and whose value holds tensors, with the place of the tensors' finding.

    The message on several settings states what each was and how it is put back: these stay together.
    """
    held: dict[str, int] = {}
    for left in found:
        if not isinstance(left, ItemLeak) or left.key != "globals" or len(left.changes) != 1:
            continue
        (change,) = left.changes
        root = next((edge for known, edge in _ROOTS if change.setting.startswith(known)), change.setting)
        for turn, draft in enumerate(found):
            path = draft.finding.path if isinstance(draft, TensorLeak) else ()
            if path and path[0].type == "interpreter" and (path[0].edge or "").startswith(root):
                held.update(dict.fromkeys(left.names, turn))
                break
    return held


def _split(leak: ItemLeak, shared: Mapping[tuple[str, str], CommonCause]) -> list[tuple[Leak, CommonCause | None]]:
    """A leak as one for each cause of its things, and one for those whose cause is not known."""
    parts: dict[Hashable, tuple[CommonCause | None, dict[str, int]]] = {}
    for name, size in leak.names.items():
        cause = shared.get((leak.key, name))
        parts.setdefault(None if cause is None else cause.key, (cause, {}))[1][name] = size
    if len(parts) < 2:
        return [(leak, next(iter(parts.values()))[0] if parts else None)]
    return [(only(leak, names), cause) for cause, names in parts.values()]


def _graph_of(draft: Leak) -> CommonCause | None:
    """The loss behind whose graph something is kept."""
    if not isinstance(draft, TensorLeak) or draft.finding.cause != "autograd":
        return None
    way = _way_to_loss(draft.finding.path)
    if not way:
        return None
    loss = "".join(way)
    advice = f"detach it before it is kept: {loss} = {loss}.detach(), or .item() for a figure"
    return CommonCause(way, loss, draft.finding.path[: len(way)], advice)


def _way_to_loss(path: Sequence[Hop]) -> tuple[str, ...]:
    """The edges that lead to the tensor whose graph a path goes through; none if it goes through no graph."""
    end = next((turn for turn, hop in enumerate(path) if hop.edge == ".grad_fn"), 0)
    return tuple(hop.edge for hop in path[:end])


def _with_losses(drafts: Sequence[Leak], causes: Sequence[CommonCause | None]) -> list[CommonCause | None]:
    """And the losses themselves, held by the same edges as their graphs; where nothing else is in their finding."""
    graphs = {
        _way_to_loss(explanation.path): cause
        for draft, cause in zip(drafts, causes, strict=True)
        if isinstance(draft, TensorLeak) and cause is not None and draft.finding.cause == "autograd"
        for explanation in draft.explanations.values()
    }
    found = []
    for draft, cause in zip(drafts, causes, strict=True):
        if cause is None and isinstance(draft, TensorLeak) and draft.explanations:
            ways = {tuple(hop.edge for hop in explanation.path) for explanation in draft.explanations.values()}
            cause = graphs.get(min(ways)) if ways <= graphs.keys() else None
        found.append(cause)
    return found


def _with_edges(drafts: Sequence[Leak], causes: Sequence[CommonCause | None]) -> list[CommonCause | None]:
    """And what has no bytes and hangs on the same edge as tensors or each other: an engine's thread and its sockets.

    One change lets go of all of them.
    """
    found = list(causes)
    edges = _edges_of_tensors(drafts)
    for turn, (draft, cause) in enumerate(zip(drafts, causes, strict=True)):
        if not isinstance(draft, ItemLeak) or draft.finding.bytes:
            continue
        edge = _suspect_edge(draft.finding.path or (() if cause is None else cause.path))
        of = edges.setdefault(edge, turn) if edge else turn
        if of != turn:
            found[turn] = found[of] = found[of] or found[turn] or CommonCause(("edge", of))
    return found


def _edges_of_tensors(drafts: Sequence[Leak]) -> dict[tuple[str, ...], int]:
    """Return the edges that tensors hang on, as those of `_suspect_edge`, with the places of their findings."""
    return {
        edge: turn
        for turn, draft in reversed([*enumerate(drafts)])
        if isinstance(draft, TensorLeak)
        for explanation in draft.explanations.values()
        if (edge := _suspect_edge(explanation.path))
    }


def _suspect_edge(path: Sequence[Hop]) -> tuple[str, ...]:
    """Return the edges of a path up to that which should be gone; none where no edge of it is known to be."""
    first = next((turn for turn, hop in enumerate(path) if hop.suspect), None)
    return () if first is None else tuple(hop.edge for hop in path[: first + 1])


def _with_threads(drafts: Sequence[Leak], causes: Sequence[CommonCause | None]) -> list[CommonCause | None]:
    """And the running threads that hold what is kept: they end together."""
    found = list(causes)
    holding = {
        f"{draft.finding.path[0].edge} (": turn
        for turn, draft in enumerate(drafts)
        if isinstance(draft, TensorLeak) and draft.finding.path and draft.finding.path[0].type == "thread"
    }
    for turn, draft in enumerate(drafts):
        if (
            not isinstance(draft, ItemLeak)
            or draft.key != "threads"
            or len(draft.names) != 1
            or found[turn] is not None
        ):
            continue
        of = next((of for name, of in holding.items() if next(iter(draft.names)).startswith(name)), None)
        if of is not None:
            advice = draft.finding.advice or ""
            found[of] = found[turn] = found[of] or CommonCause(("thread", *draft.names), advice=advice)
    return found


def _with_host_memory(
    drafts: Sequence[Leak], causes: Sequence[CommonCause | None], walk: SharedWalk | None
) -> list[CommonCause | None]:
    """And host memory that lies in arrays behind what another finding is about."""
    found = list(causes)
    of_host = [turn for turn, draft in enumerate(drafts) if isinstance(draft, ItemLeak) and draft.key == "host-memory"]
    if not of_host:
        return found
    behind = [_objects_of(draft, walk) for draft in drafts]
    largest = max(range(len(drafts)), key=lambda turn: _bytes_behind(behind[turn]))
    left = sum(draft.finding.bytes for draft in drafts if isinstance(draft, ItemLeak) and draft.key == "host-memory")
    # Less than all of it leaves room for another leak, which nothing may hide.
    if _bytes_behind(behind[largest]) >= _EXPLAINED * left:
        cause = found[largest] or CommonCause(("host-memory", largest))
        for turn in (*of_host, largest):
            found[turn] = cause
    return found


def _objects_of(draft: Leak, walk: SharedWalk | None) -> list[Any]:
    """What a finding is about, as far as objects stand for it: new objects on the way to tensors, threads, entries."""
    if isinstance(draft, TensorLeak):
        new = frozenset().union(*(explanation.new for explanation in draft.explanations.values()))
        return objects_of(new, walk) if new else []
    if draft.key == "threads":
        return [thread for thread in threading.enumerate() if thread_key(thread) in draft.names]
    return [entry for item in draft.cached.values() for entry in item.entries]


def _bytes_behind(objects: Sequence[Any]) -> int:
    """Bytes of the arrays of numpy and of the plain bytes that some objects keep; tensors are counted elsewhere."""
    if not objects:
        return 0
    reached, _ = reach(objects, max_objects=_MOST_REACHED)
    known = {id(item): item for item in reached}
    # The collector does not track an array, nor for long what holds nothing but arrays.
    held = [item for item in gc.get_referents(*reached) if not gc.is_tracked(item)]
    while held:
        known.update((id(item), item) for item in held)
        held = [item for item in gc.get_referents(*held) if not gc.is_tracked(item) and id(item) not in known]
    array: Any = getattr(loaded("numpy"), "ndarray", None)
    size = sum(len(item) for item in known.values() if type(item) is bytes or type(item) is bytearray)
    if array is None:
        return size
    own = [item for item in known.values() if is_a(item, array) and array.base.__get__(item) is None]
    return size + sum(int(array.nbytes.__get__(item)) for item in own)
