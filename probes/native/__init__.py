"""What is written in C, where it could be built: each has its equal in Python, which does the same without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from lowtide.probes.native import heap
except ImportError:
    # No compiler, or a Python without the stable interface.
    heap = None  # type: ignore[assignment]

Walk: Any = None if heap is None else heap.Walk
referents: Callable[..., list[Any]] | None = getattr(heap, "referents", None)
followers_among: Callable[[object, bytes, int], list[Any]] | None = None if heap is None else heap.followers_among
old_among: Callable[[bytes], list[Any]] | None = getattr(heap, "old_among", None)
marks_of: Callable[[tuple[dict[str, Any], ...]], bytes] | None = getattr(heap, "marks_of", None)
lengths_of_all: Callable[..., Any] | None = getattr(heap, "lengths_of_all", None)
values_of_all: Callable[..., Any] | None = getattr(heap, "values_of_all", None)
owned_by_all: Callable[[tuple[type, ...], int], list[Any]] | None = getattr(heap, "owned_by_all", None)
all_instances: Callable[[tuple[type, ...], bool], list[Any]] | None = getattr(heap, "all_instances", None)
frozen: Callable[[int], tuple[int, int, int]] | None = getattr(heap, "frozen", None)
of_generations: Callable[[int, tuple[type, ...]], tuple[bytes, bytes, list[Any]]] | None = getattr(
    heap, "of_generations", None
)
young_with_types: Callable[[object], bytes] | None = getattr(heap, "young_with_types", None)
namespace_sizes: Callable[[list[Any]], tuple[bytes, bytes]] | None = getattr(heap, "namespace_sizes", None)
files_open: Callable[[bytes], bytes] | None = getattr(heap, "files_open", None)
numbers_in: Callable[[list[Any], int], bytes] | None = getattr(heap, "numbers_in", None)
