"""The nightly gate: a matrix of subjects, devices and settings, each cell in processes of its own, one report.

`settings` reads the configuration, `matrix` makes cells of it, `cells` runs one cell below a `guardian`, `gate` runs
them all; `known_findings` is the committed baseline.
"""

from lowtide.leakcheck.gate.gate import Gate
from lowtide.leakcheck.gate.known_findings import KnownFindings, KnownFindingsError
from lowtide.leakcheck.gate.matrix import Cell, Shard, cells_of
from lowtide.leakcheck.gate.settings import GateError, GateSettings, load_settings

__all__ = [
    "Cell",
    "Gate",
    "GateError",
    "GateSettings",
    "KnownFindings",
    "KnownFindingsError",
    "Shard",
    "cells_of",
    "load_settings",
]
