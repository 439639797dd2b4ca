"""Diagram of the package's layers, from the architecture test."""

from __future__ import annotations

import ast
from pathlib import Path

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
