"""Make the tables of the fields of masks and instances, from the code and its docstrings."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from sam3_node.schema import fields as schema_fields
from sam3_node.types import Instance, MaskFrame

from .tables import code, table


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
