"""What a path says of itself: its verdict, its cause, and which of its edges are suspects."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lowtide.leakcheck.resources.names import without_numbers
from lowtide.probes.heap.paths import Path, PathStep
from lowtide.probes.heap.roots import RootKind
from lowtide.probes.objects.foreign import LRU_CACHE, type_name
from lowtide.probes.references.entries import Kind
from lowtide.reports.schema import Cause, Verdict

_CAUSE_OF_KIND: dict[Kind, Cause] = {
    "module-global": "module-global",
    "class-attribute": "class-attribute",
    "instance-attribute": "instance-attribute",
    "closure": "closure",
    # A default value lives and dies with its function, as what the function closes over does.
    "default": "closure",
    "frame-local": "frame",
    "generator-local": "frame",
    "thread": "thread",
    "context-variable": "thread",
    "lru-cache-key": "lru-cache",
    "lru-cache-value": "lru-cache",
}
# What the interpreter or torch holds for the whole process is a global of theirs.
_CAUSE_OF_ROOT: dict[RootKind, Cause] = {"thread": "thread", "interpreter": "module-global", "native": "native"}
AUTOGRAD = re.compile(r"(torch\.autograd\.(function|graph)\..*|\w+Backward\d*|AccumulateGrad)")
_CUDA_GRAPH = re.compile(r"torch\.cuda\.graphs\..*|torch\._inductor\.cudagraph_.*|(.*\.)?_?CUDAGraph\w*")
_COMPILED = re.compile(r"torch\.(_dynamo|_inductor|_functorch|fx)\..*|torch\.(_dynamo|_inductor)")
_TRANSFER = re.compile(r"(?i).*(transfer|offload)\w*(\..*)?")
_WORKSPACE = re.compile(r"(?i).*workspace.*")
# As `hash` gives it.
_NEGATIVE_KEY = re.compile(r"\[-(?=\d+\])")
# Libraries that keep buffers for their kernels in globals of their own.
_KERNEL_LIBRARIES = frozenset(
    {"cutlass", "deep_gemm", "flash_attn", "flashinfer", "torch", "transformer_engine", "triton", "xformers"}
)


def verdict_of(steps: Sequence[PathStep]) -> Verdict:
    """Whether a path passes a frozen holder or what is still under way, or is just one."""
    if any(_is_frozen_holder(step) for step in steps[:-1]):
        return "frozen-holder"
    return "in-flight" if any(step.mark == "pending" for step in steps) else "reachable"


def _is_frozen_holder(step: PathStep) -> bool:
    # Where a program freezes its heap all its functions and classes are frozen, and that is as it should be.
    return step.frozen and not step.definition


def suspect_steps(steps: Sequence[PathStep]) -> tuple[int, int]:
    """The places of the first and the last step that may be the mistake.

    From where the path leaves what is meant to live, to the first object that is known to be wrong where it is.
    """
    named = [turn for turn, step in enumerate(steps) if step.mark == "innocent"]
    first = named[-1] + 1 if named else 0
    while first < len(steps) and steps[first].definition:
        first += 1
    # The suspect itself cannot be meant to live, whatever it is.
    first = max(0, min(first, len(steps) - 1))
    wrong = (turn for turn, step in enumerate(steps) if turn >= first and step.mark == "holding")
    return first, next(wrong, len(steps) - 1)


def cause_of_edge(path: Path, place: int) -> Cause:
    """The cause that the step at `place` stands for: an entry of a container counts as the edge to the container."""
    for step in reversed(path.steps[: place + 1]):
        if step.kind in _CAUSE_OF_KIND:
            cause = _CAUSE_OF_KIND[step.kind]
            return "thread" if cause == "frame" and path.thread else cause
    return _CAUSE_OF_ROOT.get(path.root_kind, "unknown")


def telling_cause(path: Path) -> Cause | None:
    """What the path says whatever its first suspect edge is; the first rule that answers decides."""
    return next((cause for cause, crosses in _TELLING if crosses(path)), None)


def telling_type(cls: type) -> Cause | None:
    """Return what a path says that leads through an object of a type, whatever its first suspect edge is."""
    if cls is LRU_CACHE:
        return "lru-cache"
    name = type_name(cls)
    return next((cause for cause, pattern in _TELLING_TYPES if pattern.fullmatch(name)), None)


def _crosses_cache(path: Path) -> bool:
    return any(step.kind in ("lru-cache-key", "lru-cache-value") for step in path.steps)


def _crosses_type(pattern: re.Pattern[str]) -> Callable[[Path], bool]:
    """Whether the path leads from a module, or through an object of a type, of such a name; its end does not count."""

    def crosses(path: Path) -> bool:
        # Of a long path the types are few.
        names = {step.type_name for step in path.steps[:-1]}
        if path.root_kind in ("module", "class"):
            names.add(path.root_name)
        return any(pattern.fullmatch(name) for name in names)

    return crosses


def _crosses_workspace(path: Path) -> bool:
    is_kernel_library = path.root_kind == "module" and path.root_name.partition(".")[0] in _KERNEL_LIBRARIES
    return is_kernel_library and any(_WORKSPACE.fullmatch(step.edge) for step in path.steps)


_TELLING_TYPES: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("autograd", AUTOGRAD),
    ("cuda-graph", _CUDA_GRAPH),
    ("compiled-code", _COMPILED),
    ("pending-transfer", _TRANSFER),
)


_TELLING: tuple[tuple[Cause, Callable[[Path], bool]], ...] = (
    ("lru-cache", _crosses_cache),
    *((cause, _crosses_type(pattern)) for cause, pattern in _TELLING_TYPES),
    ("library-workspace", _crosses_workspace),
)


def suspects_of(path: Path, first: int, last: int) -> tuple[str, ...]:
    """The suspect edges with what they start from, and every number, address, digest and UUID in them as `*`.

    What a cache keeps by the hashes of its keys is one thing, whatever these are.
    """
    root = path.root_name
    if path.root_kind == "frame":
        root = root.rpartition(":")[0]
    edges = []
    for turn, step in enumerate(path.steps[first : last + 1], first):
        owner = path.steps[turn - 1].type_name if turn else root
        if turn == first and turn:
            # Where the suspect part starts at a definition, its name says more than that it is a function.
            owner = "".join([root, *(before.edge for before in path.steps[:turn])])
        edges.append(without_numbers(_NEGATIVE_KEY.sub("[", f"{owner} {step.edge}")))
    return tuple(edges)
