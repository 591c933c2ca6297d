"""The books of one test: its baseline, who owns what, since which stage, and what is above what it should be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Optional

from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.resources.orphaned_files import OwnSegments
from lowtide.leakcheck.resources.settings import (
    ABSENT,
    EnvironmentSetters,
    SettingChange,
    SettingHistory,
    changes_between,
    describe_change,
)
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_files import descendants_of
from lowtide.probes.host.readings import mapped_shared_memory
from lowtide.probes.objects.thread_names import thread_key
from lowtide.probes.originals import os, threading

Subject = Optional[Owner]  # noqa: UP045 - evaluated, and Python 3.10's `|` does not know strings
"""Who is judged: an owner that has ended, or (None) the test."""


class Ownership:
    """Kept by the watch; knows counters only, and reads nothing itself but who maps a new entry of /dev/shm.

    Args:
        segments: the shared memory that this process made.
        left: which of some new entries of /dev/shm were left by a process that has ended.
        environment: who set which environment variable.
        makers: who made threads, processes and descriptors.
    """

    def __init__(
        self,
        segments: OwnSegments,
        left: Callable[[Collection[str]], set[str]] = lambda names: set(),
        environment: EnvironmentSetters | None = None,
        makers: Makers | None = None,
    ) -> None:
        self._segments = segments
        self._left_behind = left
        self._environment = environment or EnvironmentSetters()
        self._makers = makers or Makers()
        self._lines: frozenset[str] = frozenset()
        self._at_end: Counters | None = None
        self.baseline = Counters({}, {}, {})
        self.live: list[Owner] = []
        self._opened: list[Owner] = []
        self._entered: list[tuple[Owner, int]] = []
        self._since: dict[tuple[str, str], str] = {}
        self._unread = ""
        self._levels: list[tuple[str, Counters]] = []
        # Those whose scope ended with the test.
        self._ended: list[Owner] = []
        self._history = SettingHistory()
        self._were_put_back = False

    def forget_settings(self) -> None:
        """Forget that settings changed: whoever judges has put them back."""
        self._history = SettingHistory()
        self._were_put_back = True

    def begin(self, stage: str, now: Counters) -> None:
        """Begin a test: what is there now is its baseline."""
        # What is there when the first one begins has not been changed by anybody.
        unknown = self._were_put_back or not self._levels
        for subject in () if unknown else (None, *self._ended):
            for change in self._changes(now, subject, self._ended):
                self._history.note(change.name, change.before, change.now)
        self._were_put_back = False
        self._ended.clear()
        self._history.begin(now.settings)
        self.baseline = now
        self._lines = self._lines_of(now.items.get("threads", ()))
        self._makers.forget_ended_threads()
        self._at_end = None
        self._opened.clear()
        self._entered.clear()
        self._since.clear()
        self._unread = ""
        self._levels = [(stage, now)]

    def attribute(self, stage: str, now: Counters, *, settings_later: bool = False) -> None:
        """Attribute what is new since the last call to `stage`.

        Args:
            stage: the one that ends.
            now: the counters.
            settings_later: whether the settings in it are old: what has changed at the next call changed in `stage`.
        """
        before = self.last
        for key, names in now.items.items():
            known = before.items.get(key, {})
            if names is not known and names.keys() != known.keys():
                fresh = names.keys() - known.keys()
                self._since.update(dict.fromkeys(((key, name) for name in fresh), stage))
                if key == "shared-memory":
                    self._leave_to_processes(fresh)
        if now.settings is not before.settings:
            for change in changes_between(before.settings, now.settings):
                self._since[("globals", change.setting)] = self._unread or stage
        self._unread = stage if settings_later else ""
        self._levels.append((stage, now))

    @property
    def last(self) -> Counters:
        """The counters of the last `begin` or `attribute`."""
        return self._levels[-1][1]

    def enter(self, owner: Owner, now: Counters) -> None:
        """Count what appears from here to `leave` as the owner's."""
        owner.before = now
        self._entered.append((owner, len(self._opened)))

    @property
    def innermost(self) -> Owner:
        """The owner entered last."""
        return self._entered[-1][0]

    def leave(self, now: Counters) -> Owner:
        """Return the owner entered last, with what it took."""
        owner, first = self._entered.pop()
        owner.take(now, self.live, self._opened[first:])
        self._take_lines(owner)
        owner.has_settled = True
        self.live.append(owner)
        self._opened.append(owner)
        return owner

    def over(self, now: Counters) -> None:
        """Note that the test is over: what other threads make from here on is not its."""
        self._at_end = now

    def close(self, owners: Iterable[Owner]) -> list[Owner]:
        """End these owners; return those of them that were alive."""
        gone = [owner for owner in owners if any(owner is other for other in self.live)]
        if gone:
            self.live = [owner for owner in self.live if not any(owner is other for other in gone)]
        self._ended += gone
        return gone

    def new_items(self, key: str, now: Counters, subject: Subject, ended: Sequence[Owner]) -> dict[str, int]:
        """Return what is there now, by name, and should not be: the test's, or an ended owner's."""
        if key == "globals":
            return dict.fromkeys(map(describe_change, self.left(now, subject, ended)), 1)
        names = now.items.get(key, {})
        if subject is not None:
            own = subject.items.get(key, ())
            may_have_heirs = key == "threads" and bool(subject.lines)
            found = {
                name: amount
                for name, amount in names.items()
                if name in own or (may_have_heirs and self._is_heir(name, subject.lines, now))
            }
        else:
            known = self.baseline.items.get(key, {})
            fresh = names.keys() - known.keys()
            if not fresh:
                return {}
            owned = {name for owner in (*self.live, *ended) for name in owner.items.get(key, ())}
            found = {name: names[name] for name in sorted(fresh - owned) if not self._is_anothers(key, name, now)}
        stays = exempt(key, found)
        heirs = self._living_heirs(stays, subject) if key == "threads" and stays else {}
        found = {name: amount for name, amount in found.items() if name not in stays} | heirs
        return self._own_shared_memory(found) if key == "shared-memory" else found

    def _take_lines(self, owner: Owner) -> None:
        """Take the threads that its setup seems to have started, but for the heirs of what was there."""
        known = self._known_lines()
        own = {name for name in owner.items.get("threads", ()) if not self._lines_of([name]) <= known}
        if own:
            owner.items["threads"], owner.lines = own, self._lines_of(own)
        else:
            owner.items.pop("threads", None)

    def _known_lines(self) -> frozenset[str]:
        """Return the lines of the threads that were there before the test, and of the owners'."""
        return self._lines.union(*(owner.lines for owner in (*self.live, *self._ended)))

    def _lines_of(self, threads: Iterable[str]) -> frozenset[str]:
        """Return the first threads of the lines of some threads, but the main one, which makes what the tests make."""
        makers = {name: self._makers.of_item("threads", name) for name in threads}
        main = thread_key(threading.main_thread())
        return frozenset(maker.line if maker and maker.line else name for name, maker in makers.items() if name != main)

    def _is_heir(self, thread: str, lines: Collection[str], now: Counters) -> bool:
        """Return whether a thread goes on for one that started it and has ended, like a timer that arms itself."""
        maker = self._makers.of_item("threads", thread)
        return maker is not None and maker.line in lines and maker.thread not in now.items.get("threads", ())

    def _living_heirs(self, threads: Collection[str], subject: Subject) -> dict[str, int]:
        """Return the subject's threads that go on in place of some that have ended since they were read."""
        lines = self._lines_of(threads)
        lines = lines - self._known_lines() if subject is None else lines & subject.lines
        living = Counters({"threads": dict.fromkeys(map(thread_key, threading.enumerate()), 1)}, {}, {})
        return {name: 1 for name in living.items["threads"] if self._is_heir(name, lines, living)}

    def _is_anothers(self, key: str, name: str, now: Counters) -> bool:
        """Return whether a thread made something, or its heir is it, that was there before the test.

        A thread that an earlier test has left makes what it makes for itself. One of an owner that is alive may make
        it for the test, as an executor's does, but not when the test is over.
        """
        known = self._known_lines()
        maker = self._makers.of_item(key, name) if known else None
        if maker is None or maker.line not in known:
            return False
        if not any(maker.line in owner.lines for owner in (*self.live, *self._ended)):
            return True
        is_late = self._at_end is not None and name not in self._at_end.items.get(key, ())
        return is_late or (key == "threads" and maker.thread not in now.items.get("threads", ()))

    def shares(self, key: str, now: Counters, ended: Sequence[Owner]) -> dict[int, int | None]:
        """Return how far a level is too high, by the identity of the subject: an owner answers for what it took."""
        level, base = now.amounts.get(key, 0), self.baseline.amounts.get(key, 0)
        if level is None or base is None:
            return dict.fromkeys((id(subject) for subject in (None, *ended)), None)
        expected = base + sum(owner.growth.get(key, 0) for owner in self._opened)
        if ended:
            # It should fall by what they took, but not below where it was before they took it.
            floor = min(self._floor(key, owner) for owner in ended)
            expected = max(expected - sum(owner.growth.get(key, 0) for owner in ended), floor)
        excess = level - expected
        found: dict[int, int | None] = {}
        for owner in reversed(ended):
            share = min(max(excess, 0), max(owner.growth.get(key, 0), 0))
            found[id(owner)] = share
            excess -= share
        found[id(None)] = excess
        return found

    def _floor(self, key: str, owner: Owner) -> int:
        later = sum(other.growth.get(key, 0) for other in self.live if other.serial > owner.serial)
        return (owner.before.amounts.get(key, 0) or 0) + later

    def since(self, key: str, names: Iterable[str]) -> str:
        """Return the stage in which the first of these items, or else most of the level, appeared; empty if unknown."""
        if key == "globals":
            # These are reported as sentences that begin with the setting.
            names = [name for _, name in self._since if any(text.startswith(f"{name} ") for text in names)]
        stages = [self._since[(key, name)] for name in names if (key, name) in self._since]
        if stages:
            return stages[0]
        growth: list[tuple[int, str]] = []
        for (_, before), (stage, after) in itertools.pairwise(self._levels):
            then, now = before.amounts.get(key, 0), after.amounts.get(key, 0)
            if then is not None and now is not None and now > then:
                growth.append((now - then, stage))
        return max(growth)[1] if growth else ""

    def left(self, now: Counters, subject: Subject, ended: Sequence[Owner]) -> list[SettingChange]:
        """Return the settings that are not what they should be, and not as an earlier test has left them either."""
        return self._history.news(self._changes(now, subject, ended))

    def _changes(self, now: Counters, subject: Subject, ended: Sequence[Owner]) -> list[SettingChange]:
        """Return the settings that a test or an ended owner left changed."""
        if subject is not None:
            changes = changes_between(subject.before.settings, now.settings, subject.items.get("globals", ()))
            return [change for change in changes if not self._is_librarys(change)]
        if now.settings is self.baseline.settings:
            return []
        before = dict(self.baseline.settings)
        # An owner that changed one and ended put it back to what it was before that owner.
        for owner in reversed(ended):
            for name in owner.items.get("globals", ()):
                before[name] = owner.before.settings.get(name, ABSENT)
        left = {setting for owner in ended for setting in owner.settings.items()}
        # One that is alive changed it during this test: what it left is what is to be found.
        for owner in self._opened:
            if owner in self.live:
                before.update(owner.settings)
            if owner.only_adds:
                # To put back what an import has changed is no change: to what it was before it, or before the test.
                earlier = (owner.before.settings, self.baseline.settings)
                left |= {(name, settings.get(name, ABSENT)) for settings in earlier for name in owner.settings}
        # What an ended one left as it had set it, is its own.
        changes = changes_between({name: text for name, text in before.items() if text != ABSENT}, now.settings)
        return [change for change in changes if (change.name, change.now) not in left and not self._is_librarys(change)]

    def _is_librarys(self, change: SettingChange) -> bool:
        """Return whether a library has set a variable of the environment that nobody had set, or deleted one."""
        return ABSENT in (change.before, change.now) and self._environment.is_librarys(change.name)

    def _leave_to_processes(self, names: Collection[str]) -> None:
        """Take new entries of /dev/shm for those of living owners whose processes have made them, and not this one.

        torch counts in one what another process has of the tensors that it has exported, as long as it lives.
        """
        for owner in self.live:
            started = set(map(int, owner.items.get("processes", ())))
            family = {pid for start in started for pid in (start, *descendants_of(start))}
            theirs = {name for name in names if set(map(str, family)) & set(re.findall(r"\d+", name))}
            theirs |= set(names) & mapped_shared_memory(family) if family else set()
            if theirs:
                owner.items.setdefault("shared-memory", set()).update(theirs - mapped_shared_memory([os.getpid()]))

    def _own_shared_memory(self, names: Mapping[str, int]) -> dict[str, int]:
        """Return those entries of /dev/shm that this process has to answer for, with their bytes.

        It made them, or it or a child of it has or had them open, or they carry the number of one of these.
        """
        if not names:
            return {}
        family = [os.getpid(), *descendants_of(os.getpid())]
        mine = mapped_shared_memory(family) | self._segments.names | self._left_behind(names)
        found = {}
        for name in names:
            own = name in mine or bool({str(pid) for pid in family} & set(re.findall(r"\d+", name)))
            try:
                facts = os.stat(f"/dev/shm/{name}")
            except OSError:  # it is gone by now
                continue
            if own and facts.st_uid == os.geteuid():
                found[name] = max(facts.st_size, 1)
        return found
