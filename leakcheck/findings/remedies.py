"""Tries what would give a leak back, and measures it: one change at a time, the smallest first.

Every change to the program is listed with the finding.  What gives a leak back changes the program: the next test may
need the very thing, and a flag beside it may say that it is there.  So it is tried when nothing of the program runs any
more, and until then nothing is kept of a leak but identities, addresses and weak references.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
from _thread import start_new_thread
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.cut import Cut, Place
from lowtide.leakcheck.explaining.explain import Explanation, expressions_to
from lowtide.leakcheck.explaining.expressions import of_cache, of_thread
from lowtide.leakcheck.findings.empty_pools import pool_holder
from lowtide.leakcheck.findings.host_memory import held_again
from lowtide.leakcheck.findings.item_findings import UNFROZEN, HeldMemory, ItemLeak, still_changed, with_followers
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.findings.storage_watch import StorageWatch
from lowtide.leakcheck.findings.tensor_findings import TensorLeak
from lowtide.leakcheck.judging.device_memory import MEMORY_POOL
from lowtide.leakcheck.judging.filled_caches import CachedItem
from lowtide.leakcheck.judging.judge import FROZEN, Budget, untried
from lowtide.leakcheck.judging.ladder import ACTIONS, collect, compiled_anything, release, reset_compiled, trim_heap
from lowtide.leakcheck.judging.storages import Key
from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.library_caches import changes_on
from lowtide.leakcheck.resources.resource import Change, Rung
from lowtide.leakcheck.resources.settings import advice, is_code, put_back, undo, undoing
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.host.memory_parts import held_bytes
from lowtide.probes.objects.foreign import thread_ident, thread_key, thread_name
from lowtide.probes.objects.listed import any_frozen
from lowtide.probes.originals import gc, loaded, signal, threading, time
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import first_of, format_amount, format_bytes
from lowtide.reports.statement import noted, restated

_MOST_ROUNDS = 3
"""Holders that are cut one after the other, where each of them alone keeps something alive."""

_SHOWN = 3

_MOST_TOLD = 8
"""Cuts that are written out one by one in one action."""

_LEAST_LOOPED = 4
"""Attributes of one object that are written as a loop over their names."""

_EMPTIES = re.compile(r"(?P<owner>[^;:]+)\.(?P<name>\w+) = None")
"""What sets one attribute to None."""

_LONGEST_S = 30.0
"""Seconds that a change may take: it runs the program's code, which may wait for what never comes."""

_BREAKING_OFF = (signal.SIGURG, signal.SIGWINCH)
"""Signals that do nothing where nobody handles them: one that comes late does no harm."""

_UNFREEZING = Change(ACTIONS[Rung.UNFREEZE], UNFROZEN, functools.partial(release, Rung.UNFREEZE))


class UnendingChangeError(BaseException):
    """A change has not ended in time. No `Exception`: the program's code would catch it, and wait on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Break off what waits in the block, by a signal, as that breaks off any waiting of Python's in the main thread.

    In another thread, or where the program has no such signal left, the block may take any time.

    Raises: UnendingChangeError: it has taken longer than so many seconds.
    """
    main = threading.get_ident()
    # None: C's handler, which Python could not put back.
    free = [each for each in _BREAKING_OFF if signal.getsignal(each) is not None]
    if not free or main != thread_ident(threading.main_thread()):
        yield
        return
    until = time.monotonic() + seconds
    # Locks, and no thread that `threading` knows: the program may have put something in the place of its methods.
    goes_on, watches = threading.Lock(), threading.Lock()

    def watch() -> None:
        pause = seconds
        while not goes_on.acquire(timeout=pause):
            signal.pthread_kill(main, free[0])
            pause = 1.0
        watches.release()

    def break_off(number: int, frame: Any) -> None:
        # Raised on the way out of the block, it would leave this handler behind; it is sent again.
        is_inside = frame is None or frame.f_code not in _LEAVING
        if is_inside and goes_on.locked() and time.monotonic() >= until:
            raise UnendingChangeError(f"it did not end in {seconds:g} s")
        if callable(before):
            before(number, frame)

    before = signal.signal(free[0], break_off)
    goes_on.acquire()
    watches.acquire()
    start_new_thread(watch, ())
    try:
        yield
    finally:
        goes_on.release()
        watches.acquire()
        signal.signal(free[0], before)


_LEAVING = (inspect.unwrap(time_limit).__code__, contextlib._GeneratorContextManager.__exit__.__code__)
"""The code that runs when such a block is left."""


class _Step(msgspec.Struct, frozen=True):
    """An action that was tried for a leak.

    Attributes:
        action: it, as code or in words.
        returned: the bytes that came back.
        is_code: whether it is code that runs as it stands.
        error: what it has raised; empty for nothing.
        is_cut: whether it has cut a holder: then it was needed where a second one came to light, whatever it gave back.
    """

    action: str
    returned: int = 0
    is_code: bool = True
    error: str = ""
    is_cut: bool = False

    @property
    def said(self) -> str:
        """Return it with what it has raised."""
        return f"{self.action} (raised {self.error})" if self.error else self.action

    @property
    def remedy(self) -> Remedy:
        """Return it as a report has it."""
        return Remedy(action=self.said, returns_bytes=self.returned)


class _Attempt(msgspec.Struct, eq=False):
    """What is known of one leak's remedies so far."""

    leak: TensorLeak
    steps: list[_Step] = msgspec.field(default_factory=list)
    changed: list[str] = msgspec.field(default_factory=list)
    was_left_out: bool = False
    explanations: list[Explanation] = msgspec.field(default_factory=list)
    done: set[str] = msgspec.field(default_factory=set)

    def finding(self) -> Finding:
        """Return the finding with its remedy: the action that gave most, or all those that it took together."""
        if self.was_left_out and not self.steps:
            return msgspec.structs.replace(self.leak.finding, advice=untried(self.leak.finding.advice))
        last = max((turn for turn, step in enumerate(self.steps) if step.returned), default=-1)
        needed = [step for step in self.steps[: last + 1] if step.returned or step.is_cut]
        is_compound = len(needed) > 1 and any(step.action.startswith("for ") for step in needed)
        returned = sum(step.returned for step in needed)
        return _concluded(self.leak.finding, self.steps, self.changed, needed, returned, as_code=not is_compound)


def _concluded(
    finding: Finding,
    steps: Sequence[_Step],
    changed: Sequence[str],
    helped: Sequence[_Step],
    returned: int,
    *,
    as_code: bool = True,
) -> Finding:
    """Return a finding with what was tried, and what of that gave it back: a remedy if it is code, else advice.

    The steps that it took are `helped`, none where it did not come back; though each is code, they may be none
    together.
    """
    tried = tuple(step.remedy for step in steps)
    finding = msgspec.structs.replace(finding, tried=tried, changed=tuple(changed))
    if not helped:
        return finding
    gave = format_bytes(returned) if returned else "it"
    if not as_code or not all(step.is_code for step in helped):
        # What is only counted came back by all of them together, and none is to be shown as tried in vain.
        measured = tuple(step.remedy for step in steps if finding.bytes or step not in helped)
        action = "; ".join(step.said for step in helped)
        return msgspec.structs.replace(finding, tried=measured, advice=f"{action}: tried, it returns {gave}")
    remedy = Remedy(action="; ".join(step.action for step in helped), returns_bytes=returned)
    return noted(finding, f"; {remedy.action} returns {gave}", remedy=remedy)


def prove(leaks: Sequence[TensorLeak], context: Context, *, may_unfreeze: bool = False) -> list[Finding]:
    """Return the findings of some leaks, each with the action that gave it back; they are tried in their order.

    Drop them afterwards: they hold what holds the tensors. It `may_unfreeze` where the freeze of the heap is the leak's
    own doing, so that undoing it undoes nothing else.
    """
    attempts = [_Attempt(leak) for leak in leaks]
    trial = _Trial(attempts, context, may_unfreeze=may_unfreeze)
    waiting, budget = attempts, context.budget
    explanations: Mapping[Key, Explanation]
    explanations = {key: found for leak in leaks for key, found in leak.explanations.items()}
    for turn in range(_MOST_ROUNDS):
        if turn:
            # Who else holds what the round before did not give back, by one walk for all leaks together.
            left = {key for attempt in waiting for key in trial.left(attempt)}
            explanations = {} if budget.is_spent else explain_storages(left, context).by_key
        waiting = [attempt for attempt in waiting if trial.goes_on(attempt, explanations)]
    for attempt in waiting:
        trial.climb(attempt)
    return [attempt.finding() for attempt in attempts]


class _Trial:
    """Makes the changes that may give some leaks back, and measures each."""

    def __init__(self, attempts: Sequence[_Attempt], context: Context, *, may_unfreeze: bool) -> None:
        self._attempts = attempts
        self._watch = StorageWatch({key for attempt in attempts for key in attempt.leak.sizes})
        self._context = context
        self._may_unfreeze = may_unfreeze
        self._gone: set[Key] = set()
        self._waited: set[str] = set()

    def left(self, attempt: _Attempt) -> set[Key]:
        """Return the storages of a leak that are still there."""
        return attempt.leak.sizes.keys() - self._gone

    def goes_on(self, attempt: _Attempt, explanations: Mapping[Key, Explanation]) -> bool:
        """Cut what holds a leak, by storage; return whether something of it is left that may have another holder."""
        left = self.left(attempt)
        attempt.was_left_out = self._context.budget.is_spent
        if not left or attempt.was_left_out:
            return False
        attempt.explanations = [found for key, found in explanations.items() if key in left]
        distinct = _distinct(cut for item in attempt.explanations for cut in item.cuts)
        cuts = [cut for cut in distinct if cut.code not in attempt.done]
        if not cuts:
            self.climb(attempt)
            return False
        attempt.done |= {cut.code for cut in cuts}
        wording = named(cuts)
        with unraisable_texts() as unraisable:
            raised = _apply(cuts, attempt.changed)
            # What runs code may let go of more than what it is made for, some of it in cycles.
            returned = self._measure(attempt, runs_code=any(cut.ends_anyway for cut in cuts))
        error = next(iter([*raised, *unraisable]), "")
        # What raises is no code that runs.
        is_code = wording.is_code and not raised
        _take_down(_Step(wording.text, is_code=is_code, error=error, is_cut=True), returned, attempt)
        return bool(self.left(attempt))

    def climb(self, attempt: _Attempt) -> None:
        """Try what may let go of a leak that cutting did not give back."""
        patience = self._context.patience
        for change in _further(attempt.explanations, self._waited, patience, may_unfreeze=self._may_unfreeze):
            if not self.left(attempt) or self._context.budget.is_spent:
                break
            with unraisable_texts():
                change.apply()
                returned = self._measure(attempt)
            attempt.changed += [change.effect] if change.effect else []
            _take_down(_Step(change.code, is_code=change.is_code), returned, attempt)

    def _measure(self, current: _Attempt, *, runs_code: bool = False) -> Mapping[_Attempt, int]:
        """Return the bytes that each leak got back by an action."""
        gone = self._watch.gone()
        if runs_code or not current.leak.sizes.keys() <= gone:
            # What goes may wait in its `__del__`.
            with contextlib.suppress(UnendingChangeError), time_limit(_LONGEST_S):
                collect(lambda: current.leak.sizes.keys() <= self._watch.gone())
            gone = self._watch.gone()
        new, self._gone = gone - self._gone, gone
        return {each: sum(each.leak.sizes[key] for key in new & each.leak.sizes.keys()) for each in self._attempts}


class Wording(msgspec.Struct, frozen=True):
    """What some cuts do together; whether that is code that runs as it stands, and not words."""

    text: str
    is_code: bool = True


def named(cuts: Sequence[Cut]) -> Wording:
    """Return several cuts as one action."""
    places = [cut.place for cut in cuts if cut.place is not None]
    is_one_container = len(places) == len(cuts) and len({place.container for place in places}) == 1
    if len(cuts) > 1 and is_one_container and all(cut.is_code for cut in cuts):
        return _of_one_container(sorted(places, key=lambda place: -place.position))
    # The last first, so that the others' places stay as reported.
    ordered = sorted(cuts, key=lambda cut: -cut.place.position if cut.place is not None else 0)
    if len(cuts) <= _MOST_TOLD and all(cut.is_code for cut in cuts):
        codes = [cut.code for cut in ordered]
        return Wording(_of_one_object(codes) or "; ".join(codes))
    repeated = _repeated([cut.code for cut in cuts]) if all(cut.is_code for cut in cuts) else None
    if repeated is not None:
        return Wording(repeated)
    return Wording(first_of([cut.code for cut in ordered], _SHOWN), is_code=len(cuts) == 1 and cuts[0].is_code)


def _of_one_container(places: Sequence[Place]) -> Wording:
    """Return the deletion of some entries of a container, which come in the order last to first."""
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


def _of_one_object(actions: Sequence[str]) -> str | None:
    """Return many attributes of one object that are set to None as a loop over their names; None if they are not."""
    found = [match for match in map(_EMPTIES.fullmatch, actions) if match]
    owners = {match["owner"] for match in found}
    if len(actions) < _LEAST_LOOPED or len(found) < len(actions) or len(owners) > 1:
        return None
    names = tuple(match["name"] for match in found)
    return f"for name in {names!r}: setattr({owners.pop()}, name, None)"


def _repeated(actions: Sequence[str]) -> str | None:
    """Return actions that differ by one number only as a loop; None if they differ by more."""
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
    """Return each change once: the tensors behind one edge all name it."""
    found: dict[tuple[str, int], Cut] = {}
    for cut in cuts:
        found.setdefault((cut.code, cut.place.container if cut.place else 0), cut)
    return list(found.values())


def _apply(cuts: Sequence[Cut], changed: list[str]) -> list[str]:
    """Make the changes, those of one container together, and note what is different; return what went wrong."""
    groups: dict[Hashable, list[Cut]] = {}
    for cut in cuts:
        place = None if cut.together is None else cut.place
        groups.setdefault((id(cut),) if place is None else place.container, []).append(cut)
    errors = []
    for first, *others in groups.values():
        together, held = first.together, {cut.held for cut in (first, *others)}
        error = _raised_by(functools.partial(together, held) if others and together is not None else first.apply)
        errors += [error] if error else []
        changed += [cut.effect for cut in (first, *others) if not error or cut.ends_anyway]
    return errors


def _raised_by(make: Callable[[], object]) -> str:
    """Make a change in the time that it may take; return what it has raised, as text."""
    try:
        with time_limit(_LONGEST_S):
            make()
    except KeyboardInterrupt:
        raise
    # To close a generator, or to hash an element, runs the program's code; a test's own failure is no Exception.
    except BaseException as error:  # noqa: BLE001
        return error_text(type(error), error)
    return ""


def _take_down(step: _Step, returned: Mapping[_Attempt, int], current: _Attempt) -> None:
    """Note an action with the leak that it was for, and with every other that it gave something back of."""
    for attempt, size in returned.items():
        if size or attempt is current:
            attempt.steps.append(replace(step, returned=size))


def _further(
    explanations: Sequence[Explanation], waited: set[str], patience: float, *, may_unfreeze: bool
) -> list[Change]:
    """Return what may let go of what no edge leads to; each thread is waited for once."""
    names = {explanation.thread for explanation in explanations} - {""}
    keys = {
        thread_key(thread)
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and thread_name(thread) in names and thread_key(thread) not in waited
    }
    waited |= keys
    changes = _joining(keys, patience)
    if may_unfreeze and any_frozen():
        changes.append(_UNFREEZING)
    is_compiled = any(explanation.cause == "compiled-code" for explanation in explanations) and loaded("torch._dynamo")
    if is_compiled or (compiled_anything() and any(not explanation.path for explanation in explanations)):
        effect = "what torch.compile has compiled is dropped"
        changes.append(Change(ACTIONS[Rung.RESET_COMPILED], effect, reset_compiled))
    return changes


@contextlib.contextmanager
def unraisable_texts() -> Iterator[list[str]]:
    """Note what is raised where nobody can catch it (in a `__del__`) while the block lets things go, as text.

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
    """Return an error in one line, even if it cannot say what it is."""
    try:
        said = "" if error is None else str(error)
    except Exception:  # noqa: BLE001 - the program's own `__str__`
        said = ""
    return f"{kind.__name__}: {said}" if said else kind.__name__


_LONGEST_CODE = 1000
"""Characters of code that puts settings back, beyond which it is shortened."""


def actions_for(leak: ItemLeak, patience: float, *, may_unfreeze: bool, walk: SharedWalk | None = None) -> list[Change]:
    """Return what is worth trying, the smallest first.

    Args:
        leak: what is to be ended.
        patience: seconds to wait for a thread to end.
        may_unfreeze: whether undoing a freeze undoes nothing that is somebody else's.
        walk: the walk over the heap to ask, if it is shared with others.
    """
    resource = leak.finding.resource
    if resource == FROZEN and may_unfreeze:
        return [_UNFREEZING]
    if resource == "threads":
        return _joining(leak.names, patience, leak.endings)
    if resource == "lru-cache":
        by_cache = {item.cache: item for name, item in leak.cached.items() if name in leak.names}
        return [_clearing(item, walk) for item in by_cache.values()]
    if leak.key.startswith("allocations "):
        return changes_on(int(leak.finding.device.partition(":")[2]))
    if leak.key.startswith(MEMORY_POOL):
        return _trimming(int(leak.finding.device.partition(":")[2]))
    if resource == "globals":
        # Some may be back by now, such as the folder, to which pytest returns when it ends, and some have gone.
        left = still_changed(leak.changes)
        changes = [change for change in leak.changes if change in left or undo(change) is not None]
        lines = undoing(changes)
        code = "; ".join(lines)
        short = code if len(code) <= _LONGEST_CODE else advice(changes)
        as_code = short == code and is_code(changes)
        return [Change(short, "", lambda: put_back(still_changed(changes)), is_code=as_code)] if lines else []
    if resource == "reserved" and leak.explanation is not None and leak.explanation.cut is not None:
        cut = leak.explanation.cut

        def do() -> None:
            cut.apply()
            # What reading has left in cycles is young, and no reason to collect twice.
            gc.collect(1)
            release(Rung.COLLECT)
            release(Rung.EMPTY_CACHE)

        after = "gc.collect(); torch.cuda.empty_cache()"
        if cut.is_code:
            return [Change(f"{cut.code}; {after}", cut.effect, do)]
        return [Change(f"{cut.code}, then {after}", cut.effect, do, is_code=False)]
    kind = resource_of(leak.key)
    return [] if kind is None else kind.changes(leak.names)


def _joining(keys: Collection[str], patience: float, endings: Sequence[Change] = ()) -> list[Change]:
    """Return what ends threads, of some keys, and what waits for them; all of them together for as long as for one."""

    def threads() -> list[threading.Thread]:
        own = [thread for thread in threading.enumerate() if thread_key(thread) in keys]
        return [thread for thread in own if thread_ident(thread) != threading.get_ident()]

    def join() -> None:
        until = time.monotonic() + patience
        for thread in threads():
            thread.join(max(0.0, until - time.monotonic()))

    def end(ending: Change) -> None:
        ending.apply()
        join()

    actions = [replace(ending, apply=functools.partial(end, ending)) for ending in endings]
    names = [thread_name(thread) for thread in threads()]
    if len(names) == 1:
        actions.append(Change(f"{of_thread(names[0])}.join()", "", join))
    elif names:
        actions.append(Change(f"join() of the {len(names)} threads", "", join, is_code=False))
    return actions


def _clearing(item: CachedItem, walk: SharedWalk | None) -> Change:
    cache = item.cache()
    code = None if cache is None else of_cache(cache) or expressions_to([cache], walk)[0]
    if code is None:
        return Change(f"clear the cache {item.code}", f"{item.code} is empty", item.clear, is_code=False)
    return Change(f"{code}.cache_clear()", f"{code} is empty", item.clear)


def try_actions(
    leak: ItemLeak,
    actions: Sequence[Change],
    left: Callable[[], Mapping[str, int]],
    driver: Callable[[], int],
    budget: Budget | None = None,
) -> Finding:
    """Return the finding, with what each action gave back.

    Args:
        leak: what the actions are for.
        actions: tried in this order, until nothing is left.
        left: reads which of the names are still there.
        driver: reads the driver's bytes of this process, on all cards, for what holds memory and is only counted.
        budget: how long may be spent; no action is begun after that.
    """
    finding = leak.finding
    if actions and leak.names and budget is not None and budget.is_spent:
        return msgspec.structs.replace(finding, advice=untried(finding.advice))
    # What was meant for something else, and has ended a part of this.
    before = [_Step(each.action, each.returns_bytes) for each in finding.tried]
    steps, helped = list(before), list[_Step]()
    changed: list[str] = []
    names = dict(leak.names)
    for action in actions:
        if not names or (budget is not None and budget.is_spent):
            break
        used = driver()
        with unraisable_texts():
            error = _raised_by(action.apply)
        if error:
            steps.append(_Step(action.code, error=error))
            continue
        still = {name: size for name, size in left().items() if name in names}
        gone = [size for name, size in names.items() if name not in still]
        returned = sum(gone) if finding.bytes else max(0, used - driver())
        steps.append(_Step(action.code, returned, is_code=action.is_code))
        changed += [action.effect] if action.effect else []
        helped += steps[-1:] if gone else []
        names = still
    # What is tried once more has not helped before, as the join of a timer that nobody had cancelled.
    again = {action.code for action in actions}
    took = [*(step for step in before if step.action not in again), *helped] if helped else []
    return _concluded(finding, steps, changed, took, sum(step.returned for step in steps))


_NOTHING_SHARE = 0.1
"""Of host memory, the part that anything may give back by chance."""


def try_holders(leaks: Sequence[tuple[ItemLeak, HeldMemory]], context: Context) -> list[Finding]:
    """Return findings about host memory, with what the process gave back when the holders of each were cut.

    Nothing else tells how much C code has for an object. If next to nothing came back, it was not that object's.
    """
    findings = [leak.finding for leak, _ in leaks]
    with sharing_walk() as walk:
        asking = replace(context, born=None, walk=walk)
        cuts = [[] if context.budget.is_spent else _distinct(held_again(memory, asking)) for _, memory in leaks]
    before, touched = _trimmed_bytes() if any(cuts) else 0, set[int]()
    # The last first, so that the places in lists of what earlier ones have left stay as they were told.
    for place in reversed(range(len(leaks))):
        (leak, memory), own = leaks[place], cuts.pop()
        if context.budget.is_spent:
            findings[place] = msgspec.structs.replace(leak.finding, advice=untried(leak.finding.advice))
        elif own:
            wording, changed = named(own), list[str]()
            with unraisable_texts():
                raised = _apply(own, changed)
                own.clear()
                before, returned = (now := _trimmed_bytes()), max(0, before - now)
            step = _Step(wording.text, returned, is_code=wording.is_code and not raised, error=next(iter(raised), ""))
            # What was emptied for another one may have had this, too.
            otherwise = None if touched & memory.items.keys() else memory.otherwise
            touched |= memory.items.keys()
            findings[place] = _with_step(leak.finding, otherwise, step, changed)
    return findings


def _with_step(finding: Finding, otherwise: Finding | None, step: _Step, changed: Sequence[str]) -> Finding:
    if otherwise is not None and step.returned < _NOTHING_SHARE * finding.bytes:
        finding = otherwise
    helped = [step] if step.returned * 2 >= finding.bytes else []
    return _concluded(finding, [step], changed, helped, step.returned)


def _trimmed_bytes() -> int:
    """Return what the process has of its own when what is free has gone back."""
    collect()
    trim_heap()
    return held_bytes()


def _trimming(index: int) -> list[Change]:
    """Return what has a card's own memory pools give back what nobody uses; nothing without the bindings."""
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return []
    module = "cuda.bindings.runtime"
    default = f"{module}.cudaMemPoolTrimTo({module}.cudaDeviceGetDefaultMemPool({index})[1], 0)"
    return [
        Change(default, "", lambda: runtime.cudaMemPoolTrimTo(runtime.cudaDeviceGetDefaultMemPool(index)[1], 0)),
        Change(f"{module}.cudaDeviceGraphMemTrim({index})", "", lambda: runtime.cudaDeviceGraphMemTrim(index)),
    ]


_NO_HOLDERS = ("threads", "globals")
"""The resources whose remedies change nothing by which a pool is held."""

Left = Callable[[str], "Mapping[str, int] | None"]
"""What there is now, by a metric's key: names, with bytes or 1 each; None where that cannot be read any more."""


class UnprovenLeak(msgspec.Struct, eq=False):
    """A leak of tensors.

    Attributes:
        finding: as far as it is known without trying anything.
        sizes: bytes of the storages, by storage.
        new: the identities of what the leak added to the program: they are on the suspect part of its path.
        watch: reports which of the storages are freed.
        change: code that lets go of it, as the program says; empty where there is none.
        came_back: when all of it was given back, by no trial; empty where it was not.
        replaced: in how many later tests something else of its kind, and no more of it, took its place.
    """

    finding: Finding
    sizes: Mapping[Key, int]
    new: frozenset[int]
    watch: StorageWatch
    change: str = ""
    came_back: str = ""
    replaced: int = 0

    def supersede(self, later: UnprovenLeak) -> None:
        """Stand from now on for what has taken its place, of which nothing is said."""
        self.sizes, self.new, self.watch, self.change = later.sizes, later.new, later.watch, later.change
        self.came_back = ""
        self.replaced += 1

    def note(self, when: str) -> None:
        """Note that the program itself has given it back by now, if it has: `when` is since this was asked last."""
        if not self.came_back and self.watch.all_gone:
            self.came_back = when

    def left(self) -> dict[Key, int]:
        """Return the storages that are still there; another one at the address of one that went is not meant."""
        gone = self.watch.gone()
        return {key: size for key, size in self.sizes.items() if key not in gone}


class DeferredRemedies(msgspec.Struct, frozen=True):
    """What one subject left."""

    tensors: tuple[UnprovenLeak, ...] = ()
    items: tuple[ItemLeak, ...] = ()
    new: frozenset[int] = frozenset()

    def only(self, fingerprints: frozenset[str]) -> DeferredRemedies:
        """Return the part that these findings are about.

        And blocks of a workspace's size, though they pass for known: they are something else if they go with a tensor.
        """
        tensors = tuple(leak for leak in self.tensors if leak.finding.fingerprint in fingerprints)
        items = [
            item
            for item in self.items
            if item.finding.fingerprint in fingerprints or (tensors and item.finding.cause == "library-workspace")
        ]
        return DeferredRemedies(tensors, tuple(items), self.new)

    def __add__(self, other: DeferredRemedies) -> DeferredRemedies:
        return DeferredRemedies((*self.tensors, *other.tensors), (*self.items, *other.items), self.new | other.new)


def defer(leaks: Sequence[TensorLeak | ItemLeak], watches: Mapping[int, StorageWatch]) -> DeferredRemedies:
    """Return what is to be remembered of some leaks of one subject.

    By the identity of a tensor leak's sizes, `watches` report which of its storages are freed.
    """
    tensors = tuple(
        UnprovenLeak(
            leak.finding, leak.sizes, _new_in(leak.explanations.values()), watches[id(leak.sizes)], _change_of(leak)
        )
        for leak in leaks
        if isinstance(leak, TensorLeak)
    )
    items = [leak for leak in leaks if isinstance(leak, ItemLeak)]
    new = _new_in(item.explanation for item in items if item.explanation is not None)
    # Of two with one fingerprint, as a pool's pipes and another pipe, it would be unclear what is proven of which.
    counted = Counter(item.finding.fingerprint for item in items)
    distinguished = [item for item in items if counted[item.finding.fingerprint] == 1]
    return DeferredRemedies(tensors, tuple(replace(item, explanation=None) for item in distinguished), new)


def try_deferred(
    each: Sequence[DeferredRemedies],
    left: Left,
    driver: Callable[[], int],
    patience: float,
    budget: Budget | None = None,
) -> list[dict[str, Finding]]:
    """Return the findings of some subjects, with what gave each back; changes the program as it likes.

    By the fingerprints that they had before: what goes with a tensor is no library's workspace any more. What there is
    now is read by `left`, and the driver's bytes of this process, on all cards, by `driver`; what the budget leaves out
    says so.
    """
    budget = budget or Budget()
    # Until something is changed.
    readings = functools.cache(left)
    every = [leak for subject in each for leak in subject.tensors]
    # What went before anything was tried, nothing that is tried gives back.
    there = {
        id(item): item.left(readings)
        for subject in each
        for item in subject.items
        if every or item.cached or item.endings or item.key == FROZEN
    }
    for leak in every:
        leak.note("by the end of the session")
    sizes = {id(leak): leak.left() for leak in every}
    new = frozenset().union(*(subject.new for subject in each), *(leak.new for leak in every))
    context = Context(born=new, is_over=True, patience=patience, budget=budget)
    explained = explain_storages({key for keys in sizes.values() for key in keys}, context).by_key
    # All together: what gives back the leak of one may give back another's too.
    done = iter(prove([_as_leak(leak, sizes[id(leak)], explained) for leak in every], context))
    readings.cache_clear()
    found = [{leak.finding.fingerprint: _with_return(next(done), leak) for leak in subject.tensors} for subject in each]
    held = [(item, item.held) for subject in each for item in subject.items if item.held is not None]
    of_memory = {id(item.held): finding for (item, _), finding in zip(held, try_holders(held, context), strict=True)}
    # Again, since what was tried for the tensors may have changed by which way a pool is held.
    holders = _PoolHolders([item for subject in each for item in subject.items], context)
    for subject, findings in zip(each, found, strict=True):
        cuts = dict.fromkeys(each.remedy.action for each in findings.values() if each.remedy is not None and each.tried)
        for item in map(with_followers, subject.items):
            if id(item.held) in of_memory:
                findings[item.finding.fingerprint] = of_memory[id(item.held)]
                continue
            with sharing_walk() as walk:
                draft = item.among(there.get(id(item), item.names))
                # Its cache may have been emptied for another subject's tensors already.
                emptied = [
                    action.code
                    for action in (actions_for(draft, patience, may_unfreeze=True, walk=walk) if draft.cached else ())
                ]
                if cuts or emptied:
                    draft = draft.without(draft.left(readings), "; ".join(cuts or emptied))
                if not budget.is_spent and item.finding.resource == "reserved":
                    draft = replace(draft.among(draft.left(readings)), explanation=holders.of(item))
                actions = actions_for(draft, patience, may_unfreeze=True, walk=walk)
            finding = try_actions(draft, actions, functools.partial(item.left, left), driver, budget)
            if actions and draft.names:
                readings.cache_clear()
                holders.forget(draft)
            findings[item.finding.fingerprint] = finding
    return found


class _PoolHolders:
    """Who holds the private pools that some findings are about, found out for all of them by one walk."""

    def __init__(self, items: Sequence[ItemLeak], context: Context) -> None:
        self._waiting = [item for item in items if item.finding.resource == "reserved"]
        self._context = context
        self._known: dict[int, Explanation | None] = {}

    def of(self, item: ItemLeak) -> Explanation | None:
        """Return who holds the pools of one of them, each asked for once and in their order."""
        if id(item) not in self._known:
            with sharing_walk() as walk:
                context = replace(self._context, walk=walk)
                self._known = {id(each): pool_holder(each, context) for each in self._waiting}
        self._waiting = [each for each in self._waiting if each is not item]
        return self._known.pop(id(item))

    def forget(self, given_back: ItemLeak) -> None:
        """Note what was given back: what was cut for it may be on the way to others, or have been in front of it."""
        if given_back.finding.resource in _NO_HOLDERS:
            return
        cut = None if given_back.explanation is None else given_back.explanation.cut
        if cut is not None and not cut.ends_anyway:
            ways = [explanation.through for explanation in self._known.values() if explanation is not None]
            if cut.place is None or not any(cut.place.container in way for way in ways):
                return
        self._known.clear()


def _as_leak(leak: UnprovenLeak, sizes: Mapping[Key, int], explained: Mapping[Key, Explanation]) -> TensorLeak:
    return TensorLeak(leak.finding, sizes, {key: explained[key] for key in sizes if key in explained})


def _with_return(finding: Finding, leak: UnprovenLeak) -> Finding:
    """Return a finding, with what took its place, and when the program itself gave that back."""
    if leak.replaced:
        tests = format_amount(leak.replaced, "later tests")
        finding = noted(finding, f"; replaced in {tests}", trend="bounded")
    if not leak.came_back:
        return finding
    change = f"in the test itself: {leak.change}" if leak.change else None
    return noted(finding, f"; came back {leak.came_back}", advice=finding.advice or change)


def with_change(leak: TensorLeak | ItemLeak) -> Finding:
    """Return a finding of which nothing is tried, with the change that would be."""
    change = _change_of(leak) if isinstance(leak, TensorLeak) and not leak.finding.advice else ""
    return restated(leak.finding, {"advice": f"{change} (not tried)"}) if change else leak.finding


def _change_of(leak: TensorLeak) -> str:
    cuts = [each.cut for each in leak.explanations.values()]
    # What nothing holds, or only words can let go of, is given back by no code.
    known = [cut for cut in cuts if cut is not None]
    wording = named(_distinct(known)) if known and len(known) == len(cuts) else None
    return wording.text if wording is not None and wording.is_code else ""


def _new_in(explanations: Iterable[Explanation]) -> frozenset[int]:
    return frozenset().union(*(explanation.new for explanation in explanations))
