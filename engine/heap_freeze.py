"""`gc.freeze()` and its pair: the long-lived objects of an engine taken out of the garbage collector's way."""

from __future__ import annotations

import gc
import weakref
from functools import partial

# There is one permanent generation for the whole process, so who else needs it must be known to all: weakly, and with
# no memory behind it. By identity, each taken out by a callable of C: in Python code that a reference calls as its
# object dies, a signal handler raises in vain.
_FROZEN_BY: dict[int, weakref.ref[HeapFreeze]] = {}

# CPython 3.12 starts with some hundred frozen objects of its own; a program that freezes its heap has thousands.
_OWN_OF_PYTHON = 2000


class HeapFreeze:
    """One engine's claim on a frozen heap.

    `gc.unfreeze()` thaws what everybody has frozen.  So while another engine still wants its objects frozen they are
    frozen again after this one's garbage was collected; and a heap that was frozen by somebody else is left alone.
    (vllm#38503: a freeze without its pair hides cycles, and the tensors in them, from the collector for ever.)
    """

    def freeze(self) -> None:
        """Collects, and freezes what is left; does nothing where the program has frozen its heap itself."""
        if not _FROZEN_BY and gc.get_freeze_count() > _OWN_OF_PYTHON:
            return
        gc.collect()
        gc.freeze()
        _FROZEN_BY[id(self)] = weakref.ref(self, partial(_FROZEN_BY.pop, id(self)))

    def thaw(self) -> None:
        """Undoes `freeze` and collects what was hidden by it; does nothing where nothing was frozen."""
        if id(self) not in _FROZEN_BY:
            return
        gc.unfreeze()
        gc.collect()
        # Not sooner: interrupted before that, another call does it again.
        _FROZEN_BY.pop(id(self), None)
        if _FROZEN_BY:
            gc.freeze()
