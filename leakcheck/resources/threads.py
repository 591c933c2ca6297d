"""Python's threads."""

from __future__ import annotations

import re

from lowtide.leakcheck.resources.resource import Bound, Name, Resource, Rule, function_name, without_numbers
from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.foreign import attribute, type_name
from lowtide.probes.objects.thread_names import thread_key
from lowtide.probes.originals import threading

_MADE_UP = re.compile(
    r"(Thread|Dummy)-\d+( \(.*\))?|ThreadPoolExecutor-\d+_\d+|asyncio_\d+|QueueFeederThread|QueueManagerThread"
)


class Threads(Resource):
    """The living threads, by name and identifier."""

    rule = Rule(
        "threads",
        "threads",
        "process",
        "Python threads, by name",
        test=Bound(settles=True, cause="thread"),
        life=Bound(settles=True),
        unit="threads",
    )

    def identity(self, name: str) -> Name:
        """Return its class, what it runs if that is the program's own, and its name if somebody gave it one.

        Args:
            name: its name, and its identifier in brackets.
        """
        called = name.rpartition(" (")[0] or name
        given = "" if _MADE_UP.fullmatch(called) else without_numbers(called)
        thread = next((known for known in threading.enumerate() if thread_key(known) == name), None)
        if thread is None:
            return Name(given or without_numbers(called), bool(given))
        cls = type_name(type(thread))
        runs = next((text for key in ("_target", "function") if (text := function_name(attribute(thread, key)))), "")
        is_own = any(text and not is_library(text) for text in (cls, runs))
        return Name(" ".join(filter(None, [cls, runs, given])), bool(given) or is_own)
