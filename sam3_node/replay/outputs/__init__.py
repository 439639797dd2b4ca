"""The outputs of a replay: a class for each format, which is listed here once.

Help, checks and completion of `replay --outputs`, plans and the table of the documentation follow from the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ...errors import ReplayError

# the command line reads the names at each start, and the formats need libraries of images
if TYPE_CHECKING:
    from .output import OutputFormat

FORMATS = {
    "mcap": "mcap:Mcap",
    "mcap-images": "mcap:McapWithImages",
    "coco": "coco:Coco",
    "yolo": "yolo:Yolo",
    "ytvis": "coco:YouTubeVis",
    "png": "png:Png",
    "overlay": "overlay:Overlay",
    "images": "pictures:Images",
    "lerobot": "lerobot:LeRobot",
    "report": "report:ReportPage",
}
"""Module and class of each format, by its name"""
OUTPUTS = tuple(FORMATS)
"""The names of all formats"""
ALIASES = {"davis": "png"}
"""Formats by another name: DAVIS is the layout of the PNG files."""


@cache
def find_output(name: str) -> type[OutputFormat]:
    """Return the class of a format. Raises ReplayError for an unknown name."""
    if name not in FORMATS:
        raise ReplayError(f"unknown output {name!r:.60}: expected some of {', '.join(OUTPUTS)}")
    module, _, kind = FORMATS[name].partition(":")
    found: type[OutputFormat] = getattr(import_module(f".{module}", __name__), kind)
    return found


def list_outputs(is_wanted: Callable[[type[OutputFormat]], bool]) -> tuple[str, ...]:
    """Return the names of the formats for which a question is answered with yes."""
    return tuple(name for name in OUTPUTS if is_wanted(find_output(name)))
