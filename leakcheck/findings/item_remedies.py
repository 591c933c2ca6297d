"""What may end the things that a finding names, and what each of these actions returns."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lowtide.leakcheck.explaining.explain import expression_to
from lowtide.leakcheck.explaining.expressions import of_cache, of_thread
from lowtide.leakcheck.findings.item_findings import UNFROZEN, ItemLeak, still_changed
from lowtide.leakcheck.findings.remedies import error_text, unraisable_texts
from lowtide.leakcheck.judging.device_memory import MEMORY_POOL
from lowtide.leakcheck.judging.filled_caches import CachedItem
from lowtide.leakcheck.judging.judge import FROZEN, Budget, untried
from lowtide.leakcheck.judging.ladder import ACTIONS, release
from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.library_caches import changes_on
from lowtide.leakcheck.resources.resource import Change
from lowtide.leakcheck.resources.rule import Rung
from lowtide.leakcheck.resources.setting_remedies import advice, is_code, put_back, undo, undoing
from lowtide.leakcheck.resources.settings import SettingChange
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.objects.thread_names import thread_ident, thread_key, thread_name
from lowtide.probes.originals import gc, threading, time
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import noted

_LONGEST_CODE = 1000
"""Characters of code that puts settings back, beyond which it is shortened."""


def actions_for(leak: ItemLeak, patience: float, *, may_unfreeze: bool, walk: SharedWalk | None = None) -> list[Change]:
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
        return [Change(name, UNFROZEN, functools.partial(release, Rung.UNFREEZE))]
    if resource == "threads":
        return _joining(leak, patience)
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
        do_undo = functools.partial(_put_back, changes)
        return [Change(short, "", do_undo, is_code=short == code and is_code(changes))] if lines else []
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


def _put_back(changes: Sequence[SettingChange]) -> None:
    put_back(still_changed(changes))


def _joining(leak: ItemLeak, patience: float) -> list[Change]:
    """What ends threads, and what waits for them; all of them together for as long as for one."""

    def threads() -> list[threading.Thread]:
        own = [thread for thread in threading.enumerate() if thread_key(thread) in leak.names]
        return [thread for thread in own if thread_ident(thread) != threading.get_ident()]

    def join() -> None:
        until = time.monotonic() + patience
        for thread in threads():
            thread.join(max(0.0, until - time.monotonic()))

    def end(ending: Change) -> None:
        ending.apply()
        join()

    actions = [replace(ending, apply=functools.partial(end, ending)) for ending in leak.endings]
    waiting = threads()
    if len(waiting) == 1:
        actions.append(Change(f"{of_thread(thread_name(waiting[0]))}.join()", "", join))
    elif waiting:
        actions.append(Change(f"join() of the {len(waiting)} threads", "", join, is_code=False))
    return actions


def _clearing(item: CachedItem, walk: SharedWalk | None) -> Change:
    cache = item.cache()
    code = None if cache is None else of_cache(cache) or expression_to(cache, walk)
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
                action.apply()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - ending a thing runs the program's code, which may raise anything
            tried.append(Remedy(action=f"{action.code} (raised {error_text(type(error), error)})", returns_bytes=0))
            continue
        still = {name: size for name, size in left().items() if name in names}
        gone = [size for name, size in names.items() if name not in still]
        returned = sum(gone) if finding.bytes else max(0, before - driver())
        tried.append(Remedy(action=action.code, returns_bytes=returned))
        changed += [action.effect] if action.effect else []
        helped += [action.code] if gone else []
        names = still
    finding = msgspec.structs.replace(finding, tried=tuple(tried), changed=tuple(changed))
    if helped:
        came = sum(item.returns_bytes for item in tried)
        remedy = Remedy(action="; ".join([*before_that, *helped]), returns_bytes=came)
        gave = format_bytes(came) if came else "it"
        if not {action.code for action in actions if not action.is_code}.isdisjoint(helped):
            # What is no code that runs is advice.
            advice = f"{remedy.action}: tried, it returns {gave}"
            return msgspec.structs.replace(finding, advice=advice)
        return noted(finding, f"; {remedy.action} returns {gave}", remedy=remedy)
    return finding


def _trimming(index: int) -> list[Change]:
    """What has the driver's default memory pool of a card give back what nobody uses; nothing without the bindings."""
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return []
    module = "cuda.bindings.runtime"
    name = f"{module}.cudaMemPoolTrimTo({module}.cudaDeviceGetDefaultMemPool({index})[1], 0)"
    return [Change(name, "", lambda: runtime.cudaMemPoolTrimTo(runtime.cudaDeviceGetDefaultMemPool(index)[1], 0))]
