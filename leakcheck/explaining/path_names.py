"""What a path is called: as code where there is code for it, else in words that say where to look.

And what it says of itself: its verdict, its cause, and which of its edges are suspects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lowtide.leakcheck.resources.resource import without_numbers
from lowtide.probes.heap.landmarks import module_expression
from lowtide.probes.heap.paths import Path, PathStep
from lowtide.probes.heap.roots import RootKind, is_library
from lowtide.probes.objects.foreign import LRU_CACHE, type_name
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP
from lowtide.probes.originals import gc
from lowtide.probes.references.entries import Kind
from lowtide.reports.schema import Cause, Hop, Verdict

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
_WORKSPACE = re.compile(r"(?i).*workspace.*")
# As `hash` gives it.
_NEGATIVE_KEY = re.compile(r"\[-(?=\d+\])")
# Libraries that keep buffers for their kernels in globals of their own.
_KERNEL_LIBRARIES = frozenset(
    {"cutlass", "deep_gemm", "flash_attn", "flashinfer", "torch", "transformer_engine", "triton", "xformers"}
)


_TELLING_TYPES: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("autograd", AUTOGRAD),
    ("cuda-graph", _CUDA_GRAPH),
    ("compiled-code", _COMPILED),
)


_CACHE = type_name(LRU_CACHE)

_LONGEST_HOLDER = 120

_LONGEST_CODE = 2000
"""Characters of a path as code; Python itself does not compile an expression of some thousand parts."""

_REMEMBERED = 4
"""Steps that may be asked for again when the one behind them was."""

_OF_MOCKS = re.compile(r"\._mock_(return_value|call_args_list|call_args|side_effect|mock_calls|wraps)")


@dataclass(frozen=True, slots=True)
class Shown:
    """A path as it is shown: from the last object on it that the program knows by a name of its own.

    Attributes:
        whole: from the root of the process on.
        path: what is shown.
        skipped: how many steps of the whole path lead to the root of what is shown.
        is_code: whether that root is an expression.
    """

    whole: Path
    path: Path
    skipped: int
    is_code: bool


def shown_from_landmark(path: Path) -> Shown:
    """The path from its last landmark on; the whole path if there is none, or if a module's global name is shorter."""
    for turn in reversed(range(len(path.steps))):
        name = path.steps[turn].landmark
        if name and (turn or path.root_kind != "module" or is_library(path.root_name)):
            rest = path.steps[turn + 1 :]
            # What is leaked itself may be the value of a fixture.
            steps = rest or (replace(path.steps[turn], edge=""),)
            skipped = turn + 1 if rest else turn
            cut = replace(path, root_kind="object", root_name=name, steps=steps)
            return Shown(path, cut, skipped, name.startswith(("logging.", "asyncio.")))
    return Shown(path, path, 0, path.root_kind not in ("interpreter", "native"))


def holder_name(path: Path, first: int) -> str:
    """The path as code from its root, up to where something holds on to all that follows and has no code for it.

    Args:
        path: the path.
        first: its first suspect step.
    """
    if path.root_kind == "frame" and path.steps:
        function, _, place = path.root_name.partition(" in ")
        variable = path.steps[0].edge.removeprefix("f_locals[").removeprefix("f_globals[").removesuffix("]")
        sort = "local" if path.steps[0].kind == "frame-local" else "global"
        frame = f"{sort} {variable} of {function}() in {place}"
        return f"thread '{path.thread}', {frame}" if path.thread else frame
    if path.root_kind in ("thread", "context"):
        return path.root
    if path.root_kind == "native":
        hidden = ", or by what is frozen" if gc.get_freeze_count() > FROZEN_AT_STARTUP else ""
        return f"{_shortened(path.root_name)}, held from C or C++{hidden}"
    for turn, step in enumerate(path.steps):
        if step.kind in ("lru-cache-key", "lru-cache-value", "opaque"):
            edge = step.edge.strip(".<>") if step.kind == "opaque" else step.edge
            return f"{_shortened(code_of(path, turn))} ({edge})"
        if step.kind == "closure" and turn >= first:
            return f"{_shortened(code_of(path, turn))}, closure {step.edge}"
    return _shortened(code_of(path, len(path.steps)))


def way_text(path: Sequence[Hop]) -> str:
    """A finding's path from its root on, as code."""
    return "".join(
        hop.edge if hop.edge.startswith((".", "[")) or not turn else f" {hop.edge}" for turn, hop in enumerate(path)
    )


def code_of(path: Path, end: int) -> str:
    """The path as code from its root up to a step."""
    return CodeOfPath(path)(end)


class CodeOfPath:
    """Writes a path as code, from its root up to one step after the other.

    What is longer than anybody reads keeps its beginning and its end: else the texts for all steps of a long path would
    be as long, together, as the square of its length.

    Args:
        path: the path.
    """

    def __init__(self, path: Path) -> None:
        self._steps = path.steps
        code = module_expression(path.root_name) if path.root_kind == "module" else path.root_name
        if path.root_kind == "frame":
            code = path.root_name.partition(" in ")[0]
        # Up to the steps that were asked for last, as it is in front of a further one.
        self._root = code
        self._codes = {0: code}

    def __call__(self, end: int) -> str:
        """Return the code up to a step."""
        end = max(0, min(end, len(self._steps)))
        if not end:
            return self._root
        if end - 1 not in self._codes and end - 1 < max(self._codes):
            self._codes = {0: self._root}
        for turn in range(max(self._codes), end - 1):
            self._codes[turn + 1] = self._with_step(turn, is_last=False)
            self._codes.pop(turn - _REMEMBERED, None)
        return self._with_step(end - 1, is_last=True)

    def _with_step(self, turn: int, *, is_last: bool) -> str:
        text = _public(self._steps, turn, is_last=is_last)
        code = self._codes[turn]
        code += text if text.startswith((".", "[", "<", "{")) or not text else f" {text}"
        half = _LONGEST_CODE // 2
        return code if len(code) <= _LONGEST_CODE else f"{code[:half]}…{code[1 - half :]}"


def _public(steps: Sequence[PathStep], turn: int, *, is_last: bool) -> str:
    """A step's edge; for a mock, what the mock offers in its place."""
    edge = steps[turn].edge
    if turn and edge.startswith("['") and steps[turn - 1].edge == "._mock_children":
        return f".{edge[2:-2]}"
    if edge == "._mock_children" and not is_last:
        return ""
    return _OF_MOCKS.sub(r".\1", edge) if turn and _is_mock(steps[turn - 1]) else edge


def _is_mock(step: PathStep) -> bool:
    return step.type_name.startswith("unittest.mock.")


def _shortened(code: str) -> str:
    if len(code) <= _LONGEST_HOLDER:
        return code
    half = _LONGEST_HOLDER // 2
    return f"{code[:half]}…{code[1 - half :]}"


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


def first_registered(steps: Sequence[PathStep], first: int) -> int:
    """The first of the functions and classes right before a step that are not meant to live: somebody registered them.

    Where there are none, the step itself. A cache is no such thing: it is emptied, wherever it is.

    Args:
        steps: those of a path, of which it is known what was there before the leak.
        first: the first suspect step.
    """
    while first and steps[first - 1].definition and steps[first - 1].mark != "innocent":
        if steps[first - 1].type_name == _CACHE:
            break
        first -= 1
    return first


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


_TELLING: tuple[tuple[Cause, Callable[[Path], bool]], ...] = (
    ("lru-cache", _crosses_cache),
    *((cause, _crosses_type(pattern)) for cause, pattern in _TELLING_TYPES),
    ("library-workspace", _crosses_workspace),
)
