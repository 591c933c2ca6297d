"""The collector's state as the probe tells it."""

from __future__ import annotations

import gc

from lowtide.probes.objects.gc_state import read_gc
from lowtide.probes.objects.listed import frozen_by_program


def test_it_counts_what_is_frozen() -> None:
    before = read_gc().frozen
    gc.freeze()
    try:
        assert frozen_by_program(before) == 0
        assert read_gc().frozen == gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_it_counts_what_could_not_be_collected() -> None:
    before = read_gc().uncollectable
    gc.garbage.append(object())
    try:
        assert read_gc().uncollectable == before + 1
    finally:
        gc.garbage.pop()


def test_it_tells_how_the_collector_is_set() -> None:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    try:
        gc.disable()
        gc.set_threshold(701, 11, 12)
        reading = read_gc()
        assert not reading.enabled
        assert reading.thresholds == (701, 11, 12)
    finally:
        gc.set_threshold(*thresholds)
        if enabled:
            gc.enable()
