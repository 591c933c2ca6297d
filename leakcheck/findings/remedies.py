"""Tries what would give a leak back, and measures it: one change at a time, the smallest first.

Runs on a leak only, after the verdict.  Every change to the program is listed with the finding.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lowtide.leakcheck.explaining.cut import Cut, Place
from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.explaining.expressions import of_thread
from lowtide.leakcheck.findings.item_findings import UNFROZEN
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.findings.tensor_findings import TensorLeak
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.judge import untried
from lowtide.leakcheck.judging.ladder import ACTIONS, collect, compiled_anything, release, reset_compiled
from lowtide.leakcheck.judging.rules import COLLECTED
from lowtide.leakcheck.judging.storages import Key, live_keys, tensors_over
from lowtide.leakcheck.resources.resource import Change
from lowtide.leakcheck.resources.rule import Rung
from lowtide.probes.heap.cycles import CycleEdge, cycle_behind
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.memory.tensors import keys_of_each, plain_tensors, survey_storages, torch_member
from lowtide.probes.objects.foreign import is_a
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP, Census
from lowtide.probes.objects.thread_names import thread_ident, thread_name
from lowtide.probes.originals import gc, loaded, threading
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import first_of, format_bytes
from lowtide.reports.statement import Note, StatedFinding, Statement, noted

_MOST_ROUNDS = 3
"""Holders that are cut one after the other, where each of them alone keeps something alive."""

_SHOWN = 3

_MOST_TOLD = 8
"""Cuts that are written out one by one in one action."""


class StorageWatch:
    """Tells whether storages are gone, by weak references to the storages themselves (not to tensors).

    So a storage that only C++ still holds counts as held.  Of a kind without such a reference (sparse tensors, say) the
    tensors that Python knows of decide.

    Args:
        keys: the storages.
        over: the tensors and storage objects over these and maybe others; default: they are looked for.
    """

    def __init__(self, keys: Collection[Key], over: Sequence[Any] | None = None) -> None:
        found = _references(tensors_over(keys) if over is None else over) if keys and loaded("torch") else {}
        self._references = {key: found[key] for key in keys if key in found}
        self._others = set(keys) - found.keys()
        self._gone: set[Key] = set()

    @classmethod
    def of_each(cls, keys: Sequence[Collection[Key]], walk: SharedWalk | None = None) -> list[StorageWatch]:
        """A watch for each of some groups of storages, which are looked for together.

        Args:
            keys: the storages of each group.
            walk: the walk over the heap to ask, if it is shared with others.
        """
        wanted = {key for group in keys for key in group}
        found = _references(tensors_over(wanted, walk)) if wanted and loaded("torch") else {}
        watches = [cls(()) for _ in keys]
        for watch, group in zip(watches, keys, strict=True):
            watch._references = {key: found[key] for key in group if key in found}
            watch._others = set(group) - found.keys()
        return watches

    @property
    def all_gone(self) -> bool:
        """Whether none is left; of a kind without such references that is not known, which costs nothing to say."""
        waiting = next(iter(self._references.values()), ())
        if self._others or not all(ref.expired() for ref in waiting):
            return False
        return bool(self.gone()) and not self._references

    def gone(self) -> set[Key]:
        """Those that are gone."""
        gone = [key for key, refs in self._references.items() if all(ref.expired() for ref in refs)]
        # What has gone does not come back, and is not asked about again.
        for key in gone:
            del self._references[key]
        self._gone.update(gone)
        return self._gone | (self._others - live_keys() if self._others else set())


def _references(items: Sequence[Any]) -> dict[Key, list[Any]]:
    """By storage, weak references to it, one for each of some tensors and storage objects over it."""
    torch: Any = loaded("torch")
    from torch.multiprocessing import reductions

    found: dict[Key, list[Any]] = {}
    reference: Any = reductions.StorageWeakRef
    with plain_tensors(torch):
        for item in items:
            try:
                storage = torch_member(item, "untyped_storage")() if is_a(item, torch.Tensor) else item
                key = (str(storage.device), storage.data_ptr())
            except RuntimeError:  # an opaque layout, or an empty shell: there is no storage to watch
                continue
            found.setdefault(key, []).append(reference(storage))
    return found


@dataclass
class _Attempt:
    """What is known of one leak's remedies so far."""

    leak: TensorLeak
    tried: list[Remedy] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    cuts: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    raised: dict[str, str] = field(default_factory=dict)
    was_left_out: bool = False
    explanations: list[Explanation] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def finding(self) -> Finding:
        """The finding with its remedy: the action that gave most, or all those that it took together.

        What gave it back is a remedy only if it is code that runs; else it is advice.
        """
        helped = [remedy for remedy in self.tried if remedy.returns_bytes]
        tried = tuple(msgspec.structs.replace(item, action=self._with_error(item.action)) for item in self.tried)
        finding = msgspec.structs.replace(self.leak.finding, tried=tried, changed=tuple(self.changed))
        if not helped:
            left_out = self.was_left_out and not tried
            return msgspec.structs.replace(finding, advice=untried(finding.advice)) if left_out else finding
        # A cut that gave nothing by itself was still needed where a second holder came to light.
        last = max(turn for turn, remedy in enumerate(self.tried) if remedy.returns_bytes)
        needed = [remedy for remedy in self.tried[: last + 1] if remedy.returns_bytes or remedy.action in self.cuts]
        total = sum(remedy.returns_bytes for remedy in needed)
        actions = [item.action for item in needed]
        is_compound = len(actions) > 1 and any(action.startswith("for ") for action in actions)
        if is_compound or not self.words.isdisjoint(actions):
            advice = f"{'; '.join(map(self._with_error, actions))}: tried, it returns {format_bytes(total)}"
            return msgspec.structs.replace(finding, advice=advice)
        remedy = Remedy(action="; ".join(actions), returns_bytes=total)
        return noted(finding, f"; {remedy.action} returns {format_bytes(total)}", remedy=remedy)

    def _with_error(self, action: str) -> str:
        return f"{action} (raised {self.raised[action]})" if action in self.raised else action


_Returned = dict[int, tuple[_Attempt, int]]
"""By the identity of an attempt, the attempt and the bytes that it got back."""


def prove(leaks: Sequence[TensorLeak], context: Context, *, may_unfreeze: bool = False) -> list[Finding]:
    """The findings of some leaks, each with the action that gave it back.

    Args:
        leaks: in the order in which they are tried; drop them afterwards, they hold what holds the tensors.
        context: what is known around them.
        may_unfreeze: whether the freeze of the heap is the leak's own doing, so that undoing it undoes nothing else.
    """
    watch = StorageWatch({key for leak in leaks for key in leak.sizes})
    attempts = [_Attempt(leak) for leak in leaks]
    trial = _Trial(watch, attempts, context, may_unfreeze=may_unfreeze)
    waiting = attempts
    for turn in range(_MOST_ROUNDS):
        # Who else holds what the round before did not give back, by one walk for all leaks together.
        left = {key for attempt in waiting for key in trial.left(attempt)} if turn else set()
        explanations = explain_storages(left, context).by_key if left and not context.budget.is_spent else {}
        waiting = [attempt for attempt in waiting if trial.goes_on(attempt, explanations if turn else None)]
    for attempt in waiting:
        trial.climb(attempt)
    return [attempt.finding() for attempt in attempts]


class _Trial:
    """Makes the changes that may give some leaks back, and measures each.

    Args:
        watch: reports which of the leaks' storages are freed.
        attempts: what is known of the remedies of each leak.
        context: what is known around them.
        may_unfreeze: whether the freeze of the heap is the leak's own doing.
    """

    def __init__(
        self, watch: StorageWatch, attempts: Sequence[_Attempt], context: Context, *, may_unfreeze: bool
    ) -> None:
        self._watch = watch
        self._context = context
        self._may_unfreeze = may_unfreeze
        self._gone: set[Key] = set()
        self._waited: set[int] = set()
        self._attempts_on: dict[Key, list[_Attempt]] = {}
        for attempt in attempts:
            for key in attempt.leak.sizes:
                self._attempts_on.setdefault(key, []).append(attempt)

    def left(self, attempt: _Attempt) -> set[Key]:
        """The storages of a leak that are still there."""
        return attempt.leak.sizes.keys() - self._gone

    def goes_on(self, attempt: _Attempt, explanations: Mapping[Key, Explanation] | None) -> bool:
        """Cuts what holds a leak; whether something of it is left that may have another holder.

        Args:
            attempt: the leak's.
            explanations: who holds what is left, by storage; None: the leak's own explanation.
        """
        budget = self._context.budget
        left = self.left(attempt)
        if explanations is None:
            attempt.was_left_out = budget.is_spent
            explanations = attempt.leak.explanations
            attempt.explanations = [explanation for key, explanation in explanations.items() if key not in self._gone]
        elif left and not budget.is_spent:
            attempt.explanations = [explanation for key, explanation in explanations.items() if key in left]
        if not left or budget.is_spent:
            return False
        cuts = [
            cut
            for cut in _distinct(cut for item in attempt.explanations for cut in item.cuts)
            if cut.code not in attempt.done
        ]
        if not cuts:
            self.climb(attempt)
            return False
        attempt.done |= {cut.code for cut in cuts}
        wording = named(cuts)
        with unraisable_texts() as unraisable:
            raised = _apply(cuts, attempt)
            # What runs code may let go of more than what it is made for, some of it in cycles.
            returned = self._measure(attempt, runs_code=any(cut.ends_anyway for cut in cuts))
        attempt.cuts.add(wording.text)
        if raised or not wording.is_code:
            # What raises is no code that runs.
            attempt.words.add(wording.text)
        _take_down(wording.text, returned, attempt, [*raised, *unraisable])
        return bool(self.left(attempt))

    def climb(self, attempt: _Attempt) -> None:
        """Tries what may let go of a leak that cutting did not give back."""
        patience = self._context.patience
        for change in _further(attempt.explanations, self._waited, patience, may_unfreeze=self._may_unfreeze):
            if not self.left(attempt) or self._context.budget.is_spent:
                break
            with unraisable_texts():
                change.apply()
                returned = self._measure(attempt)
            attempt.changed += [change.effect] if change.effect else []
            _take_down(change.code, returned, attempt)

    def _measure(self, current: _Attempt, *, runs_code: bool = False) -> _Returned:
        """The bytes that each leak got back by an action, for those that got any."""
        gone = self._watch.gone()
        if runs_code or not current.leak.sizes.keys() <= gone:
            collect(lambda: current.leak.sizes.keys() <= self._watch.gone())
            gone = self._watch.gone()
        new, self._gone = gone - self._gone, gone
        found: dict[int, tuple[_Attempt, int]] = {}
        for key in new:
            for attempt in self._attempts_on[key]:
                _, size = found.get(id(attempt), (attempt, 0))
                found[id(attempt)] = attempt, size + attempt.leak.sizes[key]
        return found


@dataclass(frozen=True)
class Wording:
    """What some cuts do together.

    Attributes:
        text: it.
        is_code: whether that is code that runs as it stands, and not words.
    """

    text: str
    is_code: bool = True


def named(cuts: Sequence[Cut]) -> Wording:
    """Several cuts as one action."""
    places = [cut.place for cut in cuts if cut.place is not None]
    is_one_container = len(places) == len(cuts) and len({place.container for place in places}) == 1
    if len(cuts) > 1 and is_one_container and all(cut.is_code for cut in cuts):
        return _of_one_container(sorted(places, key=lambda place: -place.position))
    # The last first, so that the others' places stay as reported.
    ordered = sorted(cuts, key=lambda cut: -cut.place.position if cut.place is not None else 0)
    if len(cuts) <= _MOST_TOLD and all(cut.is_code for cut in cuts):
        return Wording("; ".join(cut.code for cut in ordered))
    repeated = _repeated([cut.code for cut in cuts]) if all(cut.is_code for cut in cuts) else None
    if repeated is not None:
        return Wording(repeated)
    return Wording(first_of([cut.code for cut in ordered], _SHOWN), is_code=len(cuts) == 1 and cuts[0].is_code)


def _of_one_container(places: Sequence[Place]) -> Wording:
    """The deletion of some entries of a container, which come in the order last to first."""
    first = places[0]
    count = len(places)
    if first.size == count and first.clear:
        return Wording(first.clear)
    if count <= _MOST_TOLD and all(place.is_plain for place in places):
        return Wording(f"del {', '.join(f'{place.code}{place.key}' for place in places)}")
    is_run = first.position - places[-1].position == count - 1
    if is_run and first.ordered == "list" and first.is_plain:
        return Wording(f"del {first.code}[{places[-1].position}:{first.position + 1}]")
    if is_run and first.position == first.size - 1 and first.is_plain:
        take = "popitem" if first.ordered == "dict" else "pop"
        return Wording(f"[{first.code}.{take}() for _ in range({count})]")
    return Wording(f"delete {count} of the {first.size} entries of {first.code}", is_code=False)


def _repeated(actions: Sequence[str]) -> str | None:
    """Actions that differ by one number only, as a loop; None if they differ by more."""
    split = [re.split(r"(\d+)", action) for action in actions]
    if len({len(parts) for parts in split}) != 1:
        return None
    differing = [turn for turn, parts in enumerate(zip(*split, strict=True)) if len(set(parts)) > 1]
    if len(differing) != 1 or not split[0][differing[0]].isdigit():
        return None
    (turn,) = differing
    numbers = sorted((int(parts[turn]) for parts in split), reverse=True)
    run = range(numbers[-1], numbers[0] + 1)
    within = f"reversed(range({run.start}, {run.stop}))" if len(run) == len(numbers) else str(tuple(numbers))
    before, after = "".join(split[0][:turn]), "".join(split[0][turn + 1 :])
    return f"for i in {within}: {before}i{after}" if before.endswith("[") and after.startswith("]") else None


def _distinct(cuts: Iterable[Cut]) -> list[Cut]:
    """Each change once: the tensors behind one edge all name it."""
    found: dict[tuple[str, int], Cut] = {}
    for cut in cuts:
        found.setdefault((cut.code, cut.place.container if cut.place else 0), cut)
    return list(found.values())


def _apply(cuts: Sequence[Cut], attempt: _Attempt) -> list[str]:
    """Makes the changes, those of one container together; what went wrong, if anything did."""
    of_container: dict[int, list[Cut]] = {}
    for cut in cuts:
        if cut.together is not None and cut.place is not None:
            of_container.setdefault(cut.place.container, []).append(cut)
    failures = []
    for cut in cuts:
        others = of_container.get(cut.place.container, []) if cut.together is not None and cut.place is not None else []
        try:
            if len(others) < 2:
                cut.apply()
            elif cut is others[0] and cut.together is not None:
                cut.together({other.held for other in others})
        except KeyboardInterrupt:
            raise
        # Closing a generator, or hashing an element, runs the program's code; a test's own failure is no Exception.
        except BaseException as error:  # noqa: BLE001
            failures.append(error_text(type(error), error))
            if cut.ends_anyway:
                attempt.changed.append(cut.effect)
        else:
            attempt.changed.append(cut.effect)
    return failures


def _take_down(action: str, returned: _Returned, current: _Attempt, errors: Sequence[str] = ()) -> None:
    """Notes an action with the leak that it was for, and with every other that it gave something back of."""
    for attempt, size in {id(current): (current, 0), **returned}.values():
        if size or attempt is current:
            attempt.tried.append(Remedy(action=action, returns_bytes=size))
            attempt.raised.update({action: errors[0]} if errors else {})
            attempt.words.update({action} & current.words)


def _further(
    explanations: Sequence[Explanation], waited: set[int], patience: float, *, may_unfreeze: bool
) -> list[Change]:
    """Return what may let go of what no edge leads to; each thread is waited for once."""
    names = {explanation.thread for explanation in explanations} - {""}
    threads = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and thread_name(thread) in names
        and thread_ident(thread) != threading.get_ident()
        and id(thread) not in waited
    ]
    waited.update(map(id, threads))
    changes = [
        Change(f"{of_thread(thread_name(thread))}.join()", "", functools.partial(thread.join, patience))
        for thread in threads
    ]
    if may_unfreeze and gc.get_freeze_count() > FROZEN_AT_STARTUP:
        changes.append(Change(ACTIONS[Rung.UNFREEZE], UNFROZEN, functools.partial(release, Rung.UNFREEZE)))
    is_compiled = any(explanation.cause == "compiled-code" for explanation in explanations) and loaded("torch._dynamo")
    if is_compiled or (compiled_anything() and any(not explanation.path for explanation in explanations)):
        effect = "what torch.compile has compiled is dropped"
        changes.append(Change(ACTIONS[Rung.RESET_COMPILED], effect, reset_compiled))
    return changes


@contextlib.contextmanager
def unraisable_texts() -> Iterator[list[str]]:
    """What is raised where nobody can catch it (in a `__del__`) while the block lets things go, as text.

    A test runner's own hook would keep the error, and with it what should go, and blame it on the next test.
    """
    texts: list[str] = []

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        texts.append(error_text(unraisable.exc_type, unraisable.exc_value))

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield texts
    finally:
        sys.unraisablehook = before


def error_text(kind: type[BaseException], error: BaseException | None) -> str:
    """An error in one line, even if it cannot say what it is."""
    try:
        said = "" if error is None else str(error)
    except Exception:  # noqa: BLE001 - the program's own `__str__`
        said = ""
    return f"{kind.__name__}: {said}" if said else kind.__name__


_MOST_TRACED = 3
"""Storages, the largest ones, whose cycles are looked for."""

_SHOWN_EDGES = 3


@dataclass(frozen=True)
class Collected:
    """Storages as they were before a collection.

    Attributes:
        sizes: bytes of each.
        watch: reports which of them are freed.
        cycles: of the largest, the cycle that each hangs on.
        let_go: those that went in `released`.
    """

    sizes: Mapping[Key, int]
    watch: StorageWatch
    cycles: Mapping[Key, Sequence[CycleEdge]]
    let_go: set[Key] = field(default_factory=set)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """In the block something is let go: what goes there was in no cycle."""
        before = self.watch.gone()
        yield
        self.let_go.update(self.watch.gone() - before)

    @classmethod
    def before(cls, tensors: Sequence[Any], least: int = COLLECTED, ignore: Collection[int] = ()) -> Collected | None:
        """Read some tensors that are there still, before anything is collected; None where they are less than `least`.

        Args:
            tensors: they may be kept, or be garbage.
            least: bytes.
            ignore: the identities of what the caller holds them in.
        """
        survey = survey_storages(Census(list(tensors))) if tensors else None
        sizes = {} if survey is None else {(each.device, each.address): each.bytes for each in survey.storages}
        if sum(sizes.values()) < least:
            return None
        largest = set(sorted(sizes, key=lambda key: -sizes[key])[:_MOST_TRACED])
        cycles: dict[Key, Sequence[CycleEdge]] = {}
        for turn, keys in enumerate(keys_of_each(tensors)):
            for key in keys & largest:
                largest.remove(key)
                cycles[key] = cycle_behind(tensors[turn], {*ignore, id(tensors)})
        return cls(sizes, StorageWatch(sizes, tensors), cycles)

    def finding(self, stage: str, *, came: str = "") -> Finding | None:
        """Return what is said of those that are gone since; None where none is.

        Args:
            stage: since when they were there.
            came: when they came back, beside that it was when the collector ran.
        """
        gone = self.watch.gone() - self.let_go
        size = sum(self.sizes[key] for key in gone)
        if not size:
            return None
        edges = [edge for key in self.cycles if key in gone for edge in self.cycles[key]]
        named = [edge.text for edge in edges if edge.is_attribute] or [edge.text for edge in edges]
        through = first_of(list(dict.fromkeys(named)), _SHOWN_EDGES)
        device = next(iter(gone))[0]
        return StatedFinding(
            resource="tensors",
            cause="cycle",
            bytes=size,
            count=len(gone),
            device=device,
            stage=stage,
            statement=Statement(
                amount=f"{format_bytes(size)} on {device} came back only when the collector ran{came}",
                came=None,
                notes=(Note(", in a cycle through ", through),) if through else (),
            ),
            fingerprint=fingerprint(
                resource="tensors", device=device, stage=stage, suspects=("only collected", *sorted(set(named)))
            ),
            holder=through or None,
            remedy=Remedy(action="gc.collect()", returns_bytes=size),
            advice=f"break the cycle where its owner ends: set {named[0]} to None" if named else None,
        )
