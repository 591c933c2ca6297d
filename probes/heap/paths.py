"""A path from a root to an object: its steps, as text that keeps nothing alive, and single links that can be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowtide.probes.heap.roots import RootKind
from lowtide.probes.references.entries import Kind

Mark = Literal["innocent", "holding", "pending"]
Inspector = Callable[[RootKind, Sequence[object]], "Sequence[Mark | None]"]
"""Says of each object that a path leads to, from a root of that kind, whether it is meant to live (`innocent`), should
be gone (`holding`), or is work that has not ended (`pending`); None if that is unknown. It runs no foreign code."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One edge of a path and the object it leads to.

    Attributes:
        type_name: the object's type, module and qualified name (`dict`, `torch.Tensor`, `helper.Engine`).
        edge: the edge, as code: `.model`, `['kv']`, `[3]`, `cell 'scale'`, `lru_cache key`.
        kind: what sort of edge it is.
        frozen: whether the object lies in the collector's permanent generation, hidden by `gc.freeze()`.
        definition: whether the object is a module, class, function or cache: part of the program, made to stay.
        mark: what the caller's inspector says of the object.
        landmark: the name by which the program knows the object wherever it is met, as that of a fixture; empty
            where it has none.
    """

    type_name: str
    edge: str
    kind: Kind
    frozen: bool = False
    definition: bool = False
    mark: Mark | None = None
    landmark: str = ""


@dataclass(frozen=True, slots=True)
class Path:
    """How a root of the process holds an object; strings only, so that it keeps nothing alive.

    Attributes:
        root_kind: what sort of root.
        root_name: dotted name of the module or class, `function in file.py:line` of a frame, name of a thread, of a
            context variable, or of an object that the caller gave as a root.
        steps: the edges from the root to the object; none if it is itself a root.
        references: references followed, those that one step folds together counted one by one.
        thread: for a frame, the name of its thread if that is not the calling one, else empty.
    """

    root_kind: RootKind
    root_name: str
    steps: tuple[PathStep, ...]
    references: int
    thread: str = ""

    @property
    def root(self) -> str:
        """The root in words: `module 'helper'`, `frame of f in test_x.py:12`, `thread 'worker'`."""
        if self.root_kind == "frame":
            return f"frame of {self.root_name}"
        if self.root_kind == "context":
            return f"context variable '{self.root_name}'"
        return self.root_name if self.root_kind == "object" else f"{self.root_kind} '{self.root_name}'"

    def __str__(self) -> str:
        return " ".join([self.root, *(step.edge for step in self.steps)])


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One edge with the live objects that it starts from, so that it can be cut; drop it soon.

    Attributes:
        edge: its name, as code.
        kind: what sort of edge it is.
        owner: the object that has the attribute, the entry, the cell.
        carrier: the object in which the reference lies: the owner, or a part of it, such as the dict of its attributes.
        held: the identity of what it leads to.
    """

    edge: str
    kind: Kind
    owner: Any
    carrier: Any
    held: int
