"""Make the tables of the fields of masks and instances, from the code and its docstrings."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from sam3_node.schema import fields as schema_fields
from sam3_node.schema.describing import list_fields
from sam3_node.types import Instance, MaskFrame

from .tables import code, table

KINDS: dict[type, str] = {
    msgspec.inspect.IntType: "integer",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.StrType: "text",
    msgspec.inspect.LiteralType: "text",
    msgspec.inspect.BoolType: "bool",
    msgspec.inspect.BytesType: "bytes",
}
OF_MASKS = {"box": "4 integers", "area": "integer"}
"""Fields of an instance in a message that the mask of an Instance has"""
WIRE_WORDS = {
    "id": "counts up from 1 for each camera; never used again in the same `epoch`",
    "label": "as given with the object; for an object found by name, the name with the most votes",
    "box": "tight around the mask; zeros if it is empty",
    "area": "pixels inside the mask",
    "state": "`tracked`; `occluded` (not in view, no pixel found, or its mask surely wrong, see `tracker.hide_below`: "
    "the mask is empty); `tentative` (found by name and not confirmed; or no frame yet, only in `list_objects`)",
    "mask": "see [codecs](#mask-codecs); of the frame's size",
    "confidence": "0..1: probability that the mask is right, that is, has an IoU of at least 0.5 with the object. Left "
    "out if there is no mask. See [design](design.md#confidence-of-masks)",
    "doubtful": "true if `confidence` is below the node's `tracker.min_confidence`, or `name_confidence` below its "
    "`detector.min_name_confidence`; left out otherwise. `state` does not depend on it",
    "name_confidence": "0..1: probability that the label is right, of an object that was found by name. Left out if a "
    "user gave the label, or if there is no mask. See [objects by name](objects-by-name.md#how-sure-a-name-is)",
    "held": "the gripper [holds it](three-d.md#what-the-gripper-holds). While it is hidden, `position_m` is where the "
    "gripper has it",
    "world_id": "the same for the objects of all cameras that the node takes for one thing, for as long as `node` "
    "stays the same. Left out unless `tracker.link_distance_m` is set and a position in `base` is known",
    "depth_share": "0..1: share of the mask's pixels with a valid depth. Sent if the frame has depth that can be used; "
    "see [3-D](three-d.md)",
    "frame": "of the fields in metres: `base` (the robot's) or `camera` (x right, y down, z forward)",
    "points_m": "points of the surface: float32 x, y, z, little-endian. Sent if `spatial.points` is set",
}
"""What readers of messages must know beyond the meanings of the fields"""


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


def wire_instance_table() -> str:
    """Return the table of the fields of an instance in a message: those of its class, and those of its mask."""
    fields = {field.name: field for field in list_fields(Instance)}
    rows = []
    for name in (*fields, *OF_MASKS):
        kind = "map" if name == "mask" else OF_MASKS.get(name, "")
        meaning = ""
        if name in fields:
            kind = kind or _name_kind(fields[name].info) + ("" if fields[name].is_required else ", optional")
            meaning = fields[name].meaning
        rows.append([code(name), kind, WIRE_WORDS.get(name, meaning)])
    return table(["instance field", "type", "meaning"], rows)


def _name_kind(info: msgspec.inspect.Type) -> str:
    """Return what readers of any language call a type: integer, number, text, bool, bytes, or some numbers."""
    parts = [
        part for part in getattr(info, "types", (info,)) if not isinstance(part, msgspec.inspect.NoneType)
    ]
    (kind,) = parts
    if isinstance(kind, msgspec.inspect.TupleType):
        return f"{len(kind.item_types)} numbers"
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return f"{kind.min_length} numbers"
    return KINDS[type(kind)]


def list_members(kind: type) -> Iterator[_Member]:
    """Yield the public fields and properties of a class and of its bases beside it, with the docstrings below them."""
    for base in kind.__mro__:
        if base.__module__ == kind.__module__:
            yield from _list_own(base)


def _list_own(kind: type) -> Iterator[_Member]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    # a docstring of a field is the statement after it
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            yield _Member(ast.unparse(node.target), _spell(node.annotation), _read_text(after))
        elif isinstance(node, ast.FunctionDef) and _is_property(node):
            assert node.returns is not None
            yield _Member(node.name, ast.unparse(node.returns), ast.get_docstring(node) or "")


def _tabulate(kind: type) -> str:
    """Return a table of all members, each of which has a docstring."""
    members = [member for member in list_members(kind) if not member.name.startswith("_")]
    rows = [[code(member.name), code(member.type), member.docstring.removesuffix(".")] for member in members]
    return table(["field", "type", "meaning"], rows)


class _WithoutBounds(ast.NodeTransformer):
    """Replaces types of the schema, which have bounds, by the types of their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        found = getattr(schema_fields, node.id, None)
        return node if found is None else ast.Name(_name_type(found))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value) == "Annotated":
            assert isinstance(node.slice, ast.Tuple)
            return ast.Name(_spell(node.slice.elts[0]))
        return self.generic_visit(node)


def _spell(annotation: ast.AST) -> str:
    """Return an annotation as its values' type."""
    changed: ast.AST = _WithoutBounds().visit(annotation)
    return ast.unparse(changed)


def _name_type(kind: Any) -> str:
    """Return the name of a type without its bounds."""
    if kind is Ellipsis:
        return "..."
    if get_origin(kind) is Annotated:
        return _name_type(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return f"tuple[{', '.join(map(_name_type, get_args(kind)))}]"
    return str(kind.__name__)


def _read_text(node: ast.stmt | None) -> str:
    """Return the text of a statement that is one; else nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _is_property(node: ast.FunctionDef) -> bool:
    """Return True if a function is a public property."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return "property" in names and not node.name.startswith("_")
