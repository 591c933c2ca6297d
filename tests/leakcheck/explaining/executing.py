"""Runs a remedy as a person would who has copied it: with nothing but the imports of the modules that it names."""

from __future__ import annotations

import ast
import importlib
import sys


def execute(code: str) -> None:
    """Run some code in a namespace of its own; raises what it raises."""
    namespace: dict[str, object] = {}
    for name in modules_in(code):
        importlib.import_module(name)
        top = name.partition(".")[0]
        namespace[top] = sys.modules[top]
    exec(compile(code, "remedy", "exec"), namespace)


def modules_in(code: str) -> set[str]:
    """The modules that some code names: each dotted name's longest beginning that is one."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            names = [node.id, *parts]
            found.update(name for end in range(1, len(names) + 1) if (name := ".".join(names[:end])) in sys.modules)
    return found
