"""Fills the generated parts of the pages.

A part stands between `<!-- generated: NAME -->` and `<!-- /generated: NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from .command_line import command_reference
from .compatibility import compatibility_table
from .errors import error_table
from .layers import layer_diagram, size_table
from .operations import operation_table
from .settings import setting_table
from .tables import output_table
from .wire_hex import bits_hex, frame_hex, request_hex, rle_hex

ROOT = Path(__file__).resolve().parents[2]

PARTS: dict[str, Callable[[], str]] = {
    "settings": setting_table,
    "errors": error_table,
    "operations": operation_table,
    "outputs": output_table,
    "layers": layer_diagram,
    "size": size_table,
    "cli": command_reference,
    "compatibility": compatibility_table,
    "hex-frame": frame_hex,
    "hex-bits": bits_hex,
    "hex-rle": rle_hex,
    "hex-request": request_hex,
}
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- /generated: \2 -->)", re.DOTALL)


def generated_names(text: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [part[2] for part in _PART.finditer(text)]


def fill(text: str) -> str:
    """Return the page with its generated parts made anew. Raises KeyError for a part without a generator."""
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[4]}", text)


def outdated() -> dict[Path, str]:
    """Return the new text of each page of docs/ whose generated parts differ from the code."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    filled = {path: fill(text) for path, text in pages.items()}
    return {path: text for path, text in filled.items() if text != pages[path]}
