"""What may end the things that a finding names, and what each of these actions returns."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lowtide.leakcheck.baseline.device_memory import MEMORY_POOL
from lowtide.leakcheck.baseline.filled_caches import CachedItem
from lowtide.leakcheck.explaining.explain import expression_to
from lowtide.leakcheck.explaining.expressions import of_cache, of_thread
from lowtide.leakcheck.explaining.raised_errors import error_text, unraisable_texts
from lowtide.leakcheck.findings.item_findings import UNFROZEN, Ending, ItemLeak, still_changed
from lowtide.leakcheck.judging.budget import Budget, untried
from lowtide.leakcheck.judging.items import FROZEN
from lowtide.leakcheck.judging.ladder import ACTIONS, Rung, release
from lowtide.leakcheck.settings.changed_settings import SettingChange
from lowtide.leakcheck.settings.setting_remedies import advice, run, undoing
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.objects.thread_names import thread_ident, thread_key, thread_name
from lowtide.probes.originals import gc, loaded, threading, time, weakref
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import format_bytes

DESTROY_LIMIT = 10.0
"""Seconds to wait for a process group to be destroyed: a peer that is gone may never answer."""

_LONGEST_CODE = 1000
"""Characters of code that puts settings back, beyond which it is shortened."""


@dataclass(frozen=True)
class Action:
    """Something that may end what a finding is about.

    Attributes:
        name: as code, or in words.
        changed: what is different afterwards; empty if nothing of the program's is.
        do: does it.
        is_code: whether the name is code that runs as it stands.
    """

    name: str
    changed: str
    do: Callable[[], object]
    is_code: bool = True


def actions_for(leak: ItemLeak, patience: float, *, may_unfreeze: bool, walk: SharedWalk | None = None) -> list[Action]:
    """What is worth trying, the smallest first.

    Args:
        leak: what is to be ended.
        patience: seconds to wait for a thread to end.
        may_unfreeze: whether undoing a freeze undoes nothing that is somebody else's.
        walk: the walk over the heap to ask, if it is shared with others.
    """
    resource = leak.finding.resource
    if resource == FROZEN and may_unfreeze:
        name = ACTIONS[Rung.UNFREEZE]
        return [Action(name, UNFROZEN, functools.partial(release, Rung.UNFREEZE))]
    if resource == "threads":
        return _joining(leak, patience)
    if resource == "lru-cache":
        by_cache = {item.cache: item for name, item in leak.cached.items() if name in leak.names}
        return [_clearing(item, walk) for item in by_cache.values()]
    if leak.key.startswith(MEMORY_POOL):
        return _trimming(int(leak.finding.device.partition(":")[2]))
    if resource == "globals":
        lines = undoing(leak.changes)
        # Some may be back by now, such as the folder, to which pytest returns when it ends.
        code = "; ".join(lines)
        short = code if len(code) <= _LONGEST_CODE else advice(leak.changes)
        undo = functools.partial(_put_back, leak.changes)
        return [Action(short, "", undo, is_code=short == code)] if lines else []
    if resource == "process-groups":
        return [_destroying(name, group) for name, group in _groups(leak.names)]
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
            return [Action(f"{cut.action}; {after}", cut.changed, do)]
        return [Action(f"{cut.action}, then {after}", cut.changed, do, is_code=False)]
    return []


def _put_back(changes: Sequence[SettingChange]) -> None:
    run(undoing(still_changed(changes)))


def _joining(leak: ItemLeak, patience: float) -> list[Action]:
    """What ends threads, and what waits for them; all of them together for as long as for one."""

    def threads() -> list[threading.Thread]:
        own = [thread for thread in threading.enumerate() if thread_key(thread) in leak.names]
        return [thread for thread in own if thread_ident(thread) != threading.get_ident()]

    def join() -> None:
        until = time.monotonic() + patience
        for thread in threads():
            thread.join(max(0.0, until - time.monotonic()))

    def end(ending: Ending) -> None:
        owner = ending.owner()
        if owner is not None:
            ending.do(owner)
        join()

    actions = [Action(ending.code, ending.changed, functools.partial(end, ending)) for ending in leak.endings]
    waiting = threads()
    if len(waiting) == 1:
        actions.append(Action(f"{of_thread(thread_name(waiting[0]))}.join()", "", join))
    elif waiting:
        actions.append(Action(f"join() of the {len(waiting)} threads", "", join, is_code=False))
    return actions


def _clearing(item: CachedItem, walk: SharedWalk | None) -> Action:
    cache = item.cache()
    code = None if cache is None else of_cache(cache) or expression_to(cache, walk)
    if code is None:
        return Action(f"clear the cache {item.code}", f"{item.code} is empty", item.clear, is_code=False)
    return Action(f"{code}.cache_clear()", f"{code} is empty", item.clear)


def try_actions(
    leak: ItemLeak,
    actions: Sequence[Action],
    left: Callable[[], Mapping[str, int]],
    driver: Callable[[], int],
    budget: Budget | None = None,
) -> Finding:
    """The finding, with what each action gave back.

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
    tried = list(finding.tried)
    changed: list[str] = []
    names = dict(leak.names)
    # What was meant for something else, and has ended a part of this.
    before_that = [finding.remedy.action] if finding.remedy is not None and finding.tried else []
    helped: list[str] = []
    for action in actions:
        if not names or (budget is not None and budget.is_spent):
            break
        before = driver()
        try:
            with unraisable_texts():
                action.do()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - ending a thing runs the program's code, which may raise anything
            tried.append(Remedy(action=f"{action.name} (raised {error_text(type(error), error)})", returns_bytes=0))
            continue
        still = {name: size for name, size in left().items() if name in names}
        gone = [size for name, size in names.items() if name not in still]
        returned = sum(gone) if finding.bytes else max(0, before - driver())
        tried.append(Remedy(action=action.name, returns_bytes=returned))
        changed += [action.changed] if action.changed else []
        helped += [action.name] if gone else []
        names = still
    remedy, message = finding.remedy, finding.message
    if helped:
        came = sum(item.returns_bytes for item in tried)
        remedy = Remedy(action="; ".join([*before_that, *helped]), returns_bytes=came)
        gave = format_bytes(came) if came else "it"
        if not {action.name for action in actions if not action.is_code}.isdisjoint(helped):
            # What is no code that runs is advice.
            advice = f"{remedy.action}: tried, it returns {gave}"
            return msgspec.structs.replace(finding, advice=advice, tried=tuple(tried), changed=tuple(changed))
        message = f"{message}; {remedy.action} returns {gave}"
    return msgspec.structs.replace(finding, message=message, remedy=remedy, tried=tuple(tried), changed=tuple(changed))


def _trimming(index: int) -> list[Action]:
    """What has the driver's default memory pool of a card give back what nobody uses; nothing without the bindings."""
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return []
    module = "cuda.bindings.runtime"
    name = f"{module}.cudaMemPoolTrimTo({module}.cudaDeviceGetDefaultMemPool({index})[1], 0)"
    return [Action(name, "", lambda: runtime.cudaMemPoolTrimTo(runtime.cudaDeviceGetDefaultMemPool(index)[1], 0))]


def _groups(names: Iterable[str]) -> list[tuple[str, Any]]:
    distributed: Any = loaded("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    known = {} if world is None else {name: group for group, name in world.pg_names.items()}
    found = [(str(name), group) for name, group in known.items() if str(name) in set(names)]
    default = getattr(world, "default_pg", None)
    # Destroying the default group destroys all of them.
    return [entry for entry in found if entry[1] is default] or found


def _destroying(name: str, group: Any) -> Action:
    distributed: Any = loaded("torch.distributed")
    is_default = group is getattr(loaded("torch.distributed.distributed_c10d")._world, "default_pg", None)
    own = f"torch.distributed.destroy_process_group(group) with group {name}, which new_group() returned"
    # Not held for longer than it is destroyed: the end of a group waits for its threads, and whoever lets go of it last
    # may wait for ever.  That is to be the thread with a limit, not the one that judges.
    living = weakref.ref(group)

    def destroy() -> None:
        left = living()
        if left is not None:
            distributed.destroy_process_group(left)

    return Action(
        "torch.distributed.destroy_process_group()" if is_default else own,
        "all process groups are destroyed" if is_default else f"process group {name} is destroyed",
        lambda: _within(DESTROY_LIMIT, destroy),
        is_code=is_default,
    )


def _within(limit: float, function: Callable[[], object]) -> None:
    """Run it in a thread of its own, so that one that waits for a peer that is gone does not wait for ever.

    Raises:
        TimeoutError: it did not end in time, and goes on.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - handed on to who waits
            failures.append(error)

    thread = threading.Thread(target=run, name="lowtide-remedy", daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        raise TimeoutError(f"still running after {limit:.0f} s")
    if failures:
        raise failures[0]
