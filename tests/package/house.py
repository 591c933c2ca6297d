"""What the rules read of the code: each module is parsed once, and of its tree, which is large, nothing stays."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowtide.probes import originals
from tests.package.message_table import messages

ROOT = Path(__file__).parents[2]
HOUSES = ("engine", "leakcheck", "probes", "pytest_plugin", "reports")
KEPT = [name for name, value in vars(originals).items() if type(value) is originals.Kept]
"""The modules whose functions the checker keeps as they were."""


@dataclass(frozen=True)
class Code:
    """A module's code.

    Attributes:
        file: where it is.
        has_docstring: whether it begins with one.
        classes: the public classes that it has at its top.
        defined: all names that it defines or sets.
        taken: from where it imports which names.
        imported: the project's modules that it imports, and whether from inside a function, or for types alone.
        messages: what it says to people.
        replaced_messages: where it replaces the message of a finding.
        replaceable: where it looks up what a test may have replaced.
        as_modules: where it takes the originals of a module for the module.
        thread_objects: where it asks for the running thread's object, which Python makes for a thread of C.
    """

    file: Path
    has_docstring: bool
    classes: tuple[str, ...]
    defined: frozenset[str]
    taken: tuple[tuple[str, str], ...]
    imported: tuple[tuple[str, bool], ...]
    messages: tuple[str, ...]
    replaced_messages: tuple[str, ...]
    replaceable: tuple[str, ...]
    as_modules: tuple[str, ...]
    thread_objects: tuple[str, ...]

    @property
    def path(self) -> str:
        """Where it is in the repository."""
        return str(self.file.relative_to(ROOT))

    @property
    def name(self) -> str:
        """The module's whole name."""
        parts = ("lowtide", *self.file.relative_to(ROOT).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> tuple[Code, ...]:
    """Read all modules of the package."""
    found = tuple(read(file) for house in HOUSES for file in sorted((ROOT / house).rglob("*.py")))
    assert len(found) > 200
    return found


def read(file: Path) -> Code:
    """Read one module."""
    tree = ast.parse(file.read_bytes())
    nodes = list(ast.walk(tree))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {node.name for node in nodes if isinstance(node, kinds)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return Code(
        file=file,
        has_docstring=bool(ast.get_docstring(tree)),
        classes=tuple(each.name for each in tree.body if isinstance(each, ast.ClassDef) and each.name[0] != "_"),
        defined=frozenset(defined),
        taken=tuple(
            (node.module, name.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for name in node.names
        ),
        imported=tuple(imported_in(tree)),
        messages=tuple(sorted(set(messages(nodes)))),
        replaced_messages=tuple(f"{file.name}:{line}" for line in replaced_messages_in(nodes)),
        replaceable=tuple(replaceable_in(tree, nodes)),
        as_modules=tuple(as_modules_in(tree, nodes)),
        thread_objects=tuple(
            f"{node.lineno}: {node.attr}"
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr in ("current_thread", "currentThread")
        ),
    )


def imported_in(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the project's modules that are imported below a node, and whether in a function or for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module and child.module.startswith("lowtide."):
            yield child.module, inside
        elif isinstance(child, ast.Import):
            yield from ((name.name, inside) for name in child.names if name.name.startswith("lowtide."))
        elif isinstance(child, ast.stmt):
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            types_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from imported_in(child, inside or is_function or types_only)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from imported_in(child, inside)


def replaced_messages_in(nodes: list[ast.AST]) -> Iterator[int]:
    """Yield the lines in which the message of a finding is replaced."""
    for node in nodes:
        replaced = [each.arg for each in node.keywords] if isinstance(node, ast.Call) else []
        if isinstance(node, ast.Call) and "message" in replaced and ast.unparse(node.func).endswith("structs.replace"):
            yield node.lineno


def replaceable_in(tree: ast.Module, nodes: list[ast.AST]) -> Iterator[str]:
    """Yield what a module looks up where a test may have put something else."""
    plain = {
        name.asname or name.name: name.name
        for node in tree.body
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name in KEPT
    }
    for node in nodes:
        match node:
            case ast.Import(names=names) if any(name.name in ("numpy", "psutil") for name in names):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.ImportFrom(module="pathlib", names=names) if any(name.name == "Path" for name in names):
                yield f"{node.lineno}: Path"
            case ast.ImportFrom(module=str(module), names=names) if module in KEPT:
                yield from (f"{node.lineno}: {name.name}" for name in names if name.name.islower())
            case ast.Attribute(value=ast.Name(id="dataclasses")):
                yield f"{node.lineno}: dataclasses.{node.attr}"
            case ast.Call(func=ast.Name(id="open")):
                yield f"{node.lineno}: open"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()) if name in plain:
                if callable(vars(getattr(originals, plain[name])).get(attribute)):
                    yield f"{node.lineno}: {name}.{attribute}"


def as_modules_in(tree: ast.Module, nodes: list[ast.AST]) -> Iterator[str]:
    """Yield where the originals of a module stand for the module itself, which they are not."""
    kept = {
        name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "lowtide.probes.originals"
        for name in node.names
        if name.name in KEPT
    }
    looked_into = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes if kept else ():
        if isinstance(node, ast.Name) and node.id in kept and id(node) not in looked_into:
            yield f"{node.lineno}: {node.id}"
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) in kept:
            yield f"{node.lineno}: {ast.unparse(node)}"
