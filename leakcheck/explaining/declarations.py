"""What a program's own source says of a name: whether it is bound before anything runs, and whether to None.

This distinguishes a name that a leak replaced from one that it added: None is put back where None was.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import SOURCE_SUFFIXES
from types import ModuleType
from typing import Literal

from lowtide.probes.objects.foreign import attribute, is_a, module_of_class, mro_of, type_name
from lowtide.probes.originals import contents

Binding = Literal["none", "other", "absent", "unknown"]
"""To None, to something else, not at all, or in source that cannot be read."""

Keys = Mapping[tuple[type, object], Binding]
"""By type and value, the constant keys that a source binds in a dict."""

_DYNAMIC = ("exec", "eval", "globals", "setattr", "vars")

_NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def of_global(module: ModuleType, name: str) -> Binding:
    """Return how a module's code binds a global at last, outside its functions and classes."""
    tree = _tree(module)
    if tree is None:
        return "unknown"
    bound = _last(tree.body, name)
    return "unknown" if bound == "absent" and _may_bind(tree, name) else bound


def of_class_attribute(cls: type, name: str) -> Binding:
    """Return how the body of a class, or of one that it inherits from, binds an attribute."""
    for definition in _definitions(cls):
        if definition is None:
            return "unknown"
        bound = _last(definition.body, name)
        if bound != "absent":
            return bound
        # A decorator, a metaclass or a method may have given it to the class.
        if definition.decorator_list or definition.keywords or _stores(definition, name):
            return "unknown"
    return "absent"


def of_instance_attribute(cls: type, name: str) -> Binding:
    """Return how methods of a class, or the class itself, bind an attribute: to None if any of them does."""
    found: Binding = of_class_attribute(cls, name)
    for definition in _definitions(cls):
        if found == "absent" and (definition is None or _sets_by_name(definition)):
            found = "unknown"
        for method in [] if definition is None else definition.body:
            if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(method):
                for target, value in _bindings(node):
                    if isinstance(target, ast.Attribute) and target.attr == name and _is_self(target.value):
                        if _is_none(value):
                            return "none"
                        found = "other"
    return found


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Return whether a module may bind a global in a way that its source does not spell out where it does so."""
    for node in _outside(tree.body):
        if isinstance(node, ast.ImportFrom) and any(item.name == "*" for item in node.names):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _DYNAMIC:
            return True
    return any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(tree))


def _stores(definition: ast.ClassDef, name: str) -> bool:
    """Return whether code in a class gives an attribute of that name to anything but an instance."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == name
        and not _is_self(node.value)
        for node in ast.walk(definition)
    )


def _sets_by_name(definition: ast.ClassDef) -> bool:
    """Return whether a class gives its instances attributes whose names do not appear in its source."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "vars"):
            return True
    return False


def of_attribute(module: ModuleType, name: str) -> Binding:
    """Return how a module's code, outside its functions and classes, binds an attribute of that name of anything."""
    tree = _tree(module)
    if tree is None:
        return "unknown"
    found: Binding = "absent"
    for node in _outside(tree.body):
        for target, value in _bindings(node):
            if isinstance(target, ast.Attribute) and target.attr == name:
                found = "none" if _is_none(value) else "other"
        if isinstance(node, ast.Call) and _name_of(node.func) == "setattr" and len(node.args) == 3:
            key = node.args[1]
            if isinstance(key, ast.Constant) and key.value == name:
                found = "none" if _is_none(node.args[2]) else "other"
    return found


def binding_of(keys: Keys | None, key: object) -> Binding:
    """Return how a key is bound where these are."""
    if keys is None:
        return "unknown"
    if not any(type(key) is kind for kind in (str, int, bytes, float, bool, type(None))):
        return "absent"
    return keys.get((type(key), key), "absent")


def of_keys(module: ModuleType, holder: str) -> Keys | None:
    """Return how a module's source binds all constant keys of such a dict; None where the source cannot be read."""
    tree = _tree(module)
    if tree is None:
        return None
    found: dict[tuple[type, object], Binding] = {}
    for node in _before_use(tree.body):
        for target, value in _bindings(node):
            if _name_of(target) == holder:
                _note(_entries(value), found)
            elif isinstance(target, ast.Subscript) and _name_of(target.value) == holder:
                _note(_entry(target.slice, value), found)
        if isinstance(node, ast.keyword) and node.arg == holder:
            _note(_entries(node.value), found)
    return found


def _note(pairs: Iterable[tuple[object, ast.expr | None]], found: dict[tuple[type, object], Binding]) -> None:
    for key, item in pairs:
        found[type(key), key] = "none" if _is_none(item) else "other"


def source_of(where: object) -> str:
    """Return the text of a module, or of the modules of a class and its bases, as far as it can be read."""
    if is_a(where, ModuleType):
        return _text(where) or ""
    bases: list[type] = list(mro_of(where)) if is_a(where, type) else []
    names = dict.fromkeys(module_of_class(base) for base in bases if base is not object)
    return "\n".join(_text(sys.modules[name]) or "" for name in names if name in sys.modules)


def _name_of(target: ast.expr) -> str:
    """Return the name, or the attribute's name, that an assignment binds; empty if it binds none."""
    return target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")


def _entries(value: ast.expr | None) -> Iterator[tuple[object, ast.expr | None]]:
    """Yield the constant keys of the dicts that are written down in a value, as `{…}` or with keywords."""
    for node in [] if value is None else ast.walk(value):
        if isinstance(node, ast.Dict):
            for key, item in zip(node.keys, node.values, strict=True):
                yield from () if key is None else _entry(key, item)
        elif isinstance(node, ast.Call):
            yield from ((word.arg, word.value) for word in node.keywords if word.arg is not None)


def _entry(key: ast.expr, value: ast.expr | None) -> Iterator[tuple[object, ast.expr | None]]:
    if isinstance(key, ast.Constant):
        yield key.value, value


def _before_use(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported, and in its classes' `__init__`."""
    for node in _outside(body):
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _before_use(node.body)
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield from ast.walk(method)


def _last(body: Sequence[ast.stmt], name: str) -> Binding:
    """Return what the last binding of a name in some statements is; functions, classes and imports bind names too."""
    found: Binding = "absent"
    for node in _outside(body):
        if isinstance(node, _NESTED[:3]) and node.name == name:
            found = "other"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((item.asname or item.name.partition(".")[0]) == name for item in node.names):
                found = "other"
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name == name:
            found = "other"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            # A loop's variable, a `with … as`; what an assignment binds follows below, after its target.
            found = "other"
        for target, value in _bindings(node):
            if isinstance(target, ast.Name) and target.id == name:
                found = "none" if _is_none(value) else "other"
    return found


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield what an assignment binds, name by name, as far as the source shows it; otherwise the value is None."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, None


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
        return
    same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
    for place, part in enumerate(target.elts):
        yield from _pairs(part, value.elts[place] if same else None)  # type: ignore[union-attr]


def _outside(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of some statements in order, functions and classes as one node each."""
    for statement in body:
        yield from _nodes(statement)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, _NESTED):
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child)
    # After its parts, so that an assignment has the last word on its targets.
    yield node


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _definitions(cls: type) -> Iterator[ast.ClassDef | None]:
    """Yield the statements that define a class and those it inherits from; None for one whose source cannot be read."""
    for base in mro_of(cls):
        if base is object:
            continue
        module = sys.modules.get(module_of_class(base))
        tree = None if module is None else _tree(module)
        name = type_name(base).removeprefix(f"{module_of_class(base)}.")
        yield None if tree is None else _named(tree, name)


def _named(tree: ast.Module, qualname: str) -> ast.ClassDef | None:
    """Return the class of that qualified name."""
    body: list[ast.stmt] = tree.body
    found: ast.ClassDef | None = None
    for part in qualname.split("."):
        if part == "<locals>":
            continue
        holders = [
            node
            for node in _outside(body)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == part
        ]
        if not holders:
            return None
        # Of two of one name the later one is there.
        last = holders[-1]
        body, found = last.body, last if isinstance(last, ast.ClassDef) else None
    return found


def _tree(module: ModuleType) -> ast.Module | None:
    text = _text(module)
    try:
        with warnings.catch_warnings():
            # An invalid escape in the program's text was reported when it was imported.
            warnings.simplefilter("ignore")
            return None if text is None else ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _text(module: object) -> str | None:
    file = attribute(module, "__file__")
    # An extension may have hundreds of MiB.
    if type(file) is not str or not file.endswith(tuple(SOURCE_SUFFIXES)):
        return None
    try:
        return contents(file).decode()
    except (OSError, ValueError):
        return None
