"""Make the tables of the fields of masks and instances, from the code and its docstrings."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from sam3_node.types import Instance, MaskFrame

from .tables import code, table

_MEANINGS = {
    "MaskFrame": {
        "camera": "name of the camera",
        "seq": "number of the frame, as the camera gave it",
        "capture_ns": "time at which the image was taken, of `clock`",
        "width": "of the frame, in pixels",
        "height": "of the frame, in pixels",
        "received_ns": "Unix time at which the frame reached the node",
        "published_ns": "Unix time of publishing",
        "skipped": "frames of this camera skipped since the previous masks",
        "model": "name of the weights",
        "stages_us": "microseconds of each stage",
        "prompts": "names that the node looks for",
        "instances": "the objects",
        "clock": "of `capture_ns`, as the camera gave it",
    },
    "Instance": {
        "id": "counts up from 1; never used again in the same `epoch`",
        "label": "as given with the object, or the name by which it was found",
        "score": "0..1: in view, times predicted IoU",
        "state": "`tracked`, `occluded` (no mask) or `tentative` (found by name, not confirmed)",
        "age": "frames since the object was added",
        "frames_since_seen": "0 while it is tracked",
        "mask": "its pixels: `full()` is bool [height, width], `crop` those inside `box`",
        "position_m": "mean of the visible surface, in `frame`; where the gripper has it while it is held and hidden",
        "frame": "`base` or `camera`: the frame of the 3-D fields",
        "extent_m": "sides of the oriented box around the visible surface, the longest first",
        "velocity_mps": "velocity in `frame`",
        "upright_size_m": "sides of the upright box",
        "box": "x0, y0, x1, y1 of the mask; zeros if it is empty",
        "area": "pixels inside the mask",
    },
}
"""Meanings of the fields whose names say enough in the code."""


class _Member(NamedTuple):
    """A field or property of a class."""

    name: str
    type: str
    docstring: str
    """empty if it has none"""


def mask_frame_table() -> str:
    """Return the table of the fields of a MaskFrame."""
    return _tabulate(MaskFrame)


def instance_table() -> str:
    """Return the table of the fields of an Instance."""
    return _tabulate(Instance)


def list_members(kind: type) -> Iterator[_Member]:
    """Yield the public fields and properties of a class, with the docstrings below them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    # a docstring of a field is the statement after it
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            yield _Member(ast.unparse(node.target), ast.unparse(node.annotation), _read_text(after))
        elif isinstance(node, ast.FunctionDef) and _is_property(node):
            assert node.returns is not None
            yield _Member(node.name, ast.unparse(node.returns), ast.get_docstring(node) or "")


def _tabulate(kind: type) -> str:
    """Return a table of all members. Raises KeyError for one without a meaning."""
    meanings = _MEANINGS[kind.__name__]
    members = [member for member in list_members(kind) if not member.name.startswith("_")]
    rows = [
        [code(member.name), code(member.type), member.docstring.removesuffix(".") or meanings[member.name]]
        for member in members
    ]
    return table(["field", "type", "meaning"], rows)


def _read_text(node: ast.stmt | None) -> str:
    """Return the text of a statement that is one; else nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _is_property(node: ast.FunctionDef) -> bool:
    """Return True if a function is a public property."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return "property" in names and not node.name.startswith("_")
