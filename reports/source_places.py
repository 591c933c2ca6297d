"""Where in the source a finding's holder is: a file and a line, for tools that mark a place in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lowtide.reports.schema import Finding, Subject

_LOCAL = re.compile(r"local '[^']*' of .+\(\) in (?P<file>.+):(?P<line>[0-9]{1,9})$")
_NAMES = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_SOURCE_FOLDERS = ("", "src")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_LARGEST = 4 << 20
"""Bytes of a module that is parsed; a larger one is generated, and would take seconds."""


class SourcePlace(NamedTuple):
    """A line of a file.

    Attributes:
        file: relative to the root of the sources with `/` between its parts, or absolute where it is not below it.
        line: from 1.
    """

    file: str
    line: int


class SourcePlaces:
    """Finds the place of a finding: where its holder is defined, else where it was allocated, else its test's file.

    Files are looked for below one folder, and each is parsed once. Without a folder only what the report itself has
    is used: a local variable's place, and the allocation stack.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root and root.resolve()
        self._lines: dict[Path, dict[str, int]] = {}

    def find(self, subject: Subject, finding: Finding) -> SourcePlace | None:
        """Return the place to mark; None if the report names no file."""
        return self._holder(finding.holder or "") or self._allocated(finding) or self._test(subject)

    def _holder(self, holder: str) -> SourcePlace | None:
        local = _LOCAL.search(holder)
        if local is not None:
            return self._place(local["file"], int(local["line"]))
        named = _NAMES.match(holder)
        if named is None or self.root is None:
            return None
        names = named[0].split(".")
        # The longest module first: `a.b.C` is `C` of `a/b.py` before it is `b.C` of `a.py`.
        for count in range(len(names) - 1, 0, -1):
            for file in self._modules(names[:count]):
                lines = self._definitions(file)
                # A class's attribute that is set from elsewhere has no line, but its class has.
                inner = names[count:]
                for depth in range(len(inner), 0, -1):
                    line = lines.get(".".join(inner[:depth]))
                    if line is not None:
                        return self._place(str(file), line)
                return self._place(str(file), 1)
        return None

    def _modules(self, names: list[str]) -> Iterator[Path]:
        assert self.root is not None
        for folder in _SOURCE_FOLDERS:
            path = self.root.joinpath(folder, *names)
            for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
                if _is_file(file):
                    yield file

    def _definitions(self, file: Path) -> dict[str, int]:
        if file not in self._lines:
            self._lines[file] = _definitions(file)
        return self._lines[file]

    def _allocated(self, finding: Finding) -> SourcePlace | None:
        places = [self._place(frame.file, frame.line) for frame in finding.allocated_at]
        ours = (place for place in places if place is not None and not Path(place.file).is_absolute())
        return next(ours, None) or next((place for place in places if place is not None), None)

    def _test(self, subject: Subject) -> SourcePlace | None:
        head = subject.id.partition("[")[0].partition("::")[0]
        # A cell of the gate puts its own name before the test's.
        for name in (head, head.partition("/")[2]):
            if name.endswith(".py") and (self.root is None or _is_file(self.root / name)):
                return self._place(name, 1)
        return None

    def _place(self, file: str, line: int) -> SourcePlace | None:
        if not file or "\0" in file or file.startswith("<"):
            return None
        path = Path(file)
        if self.root is not None:
            # Through links, which a viewer of the repository does not follow.
            try:
                real = (self.root / path).resolve()
            except (OSError, RuntimeError):
                return None
            if not path.is_absolute() and not _is_file(real):
                # A bare name of a file that is elsewhere would mark a file that does not exist.
                return None
            if real.is_relative_to(self.root) and not _INSTALLED & set(real.parts):
                path = real.relative_to(self.root)
        return SourcePlace(path.as_posix(), max(line, 1))


def _is_file(path: Path) -> bool:
    """Return whether a path that a report has names a file here; what the system takes for no path names none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _definitions(file: Path) -> dict[str, int]:
    """Return the line at which each name of a module, and each attribute of its classes, is bound; the first counts."""
    try:
        if file.stat().st_size > _LARGEST:
            return {}
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}
    lines: dict[str, int] = {}
    for name, line in _bound(tree.body, ""):
        lines.setdefault(name, line)
    return lines


def _bound(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield f"{prefix}{node.name}", node.lineno
            if isinstance(node, ast.ClassDef):
                yield from _bound(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (each for outer in targets for each in ast.walk(outer)):
                if isinstance(target, ast.Name):
                    yield f"{prefix}{target.id}", node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield f"{prefix}{alias.asname or alias.name.partition('.')[0]}", node.lineno
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _bound(node.body, prefix)
            yield from _bound(getattr(node, "orelse", []), prefix)
