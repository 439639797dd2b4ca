"""Diagram of the package's layers, and the size of the package, from the architecture test."""

from __future__ import annotations

import ast
from pathlib import Path

from .tables import table

_BEFORE = (211, 38, 49, 224)
"""Modules, loose modules, units and arrows at commit 334b24c."""
_TEST = Path(__file__).resolve().parents[2] / "tests" / "test_layers.py"


def read_layers() -> tuple[frozenset[str], ...]:
    """Return the layers from the bottom up. Raises LookupError if the test has no LAYERS."""
    for node in ast.parse(_TEST.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return tuple(frozenset(units) for units in ast.literal_eval(node.value))
    raise LookupError(f"{_TEST}: expected LAYERS, found none")


def layer_diagram() -> str:
    """Return the layers as a text diagram, the highest first."""
    lines = ["   ".join(sorted(units)) for units in reversed(read_layers())]
    width = max(map(len, lines))
    rule = "+" + "-" * (width + 2) + "+"
    body = f"\n{rule}\n".join(f"| {line.center(width)} |" for line in lines)
    return f"```text\n{rule}\n{body}\n{rule}\n```"


def size_table() -> str:
    """Return the number of modules, units and imports between units, before the reorganisation and now."""
    from tests.test_layers import PACKAGE, arrows, modules, unit

    counted = {name: path for name, path in modules().items() if path.name != "__init__.py"}
    loose = [path for path in counted.values() if path.parent == PACKAGE]
    units = {unit(name) for name in modules()} - {""}
    now = (len(counted), len(loose), len(units), len(arrows()))
    names = (
        "modules",
        "loose modules beside packages",
        "units at the top level",
        "import arrows between units",
    )
    rows = [[name, str(old), str(new)] for name, old, new in zip(names, _BEFORE, now, strict=True)]
    return table(["package", "before", "now"], rows)
