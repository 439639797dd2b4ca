"""What the fields of a class say about themselves: name, limits, and their one line of meaning.

The meaning is the text below a field in the source. Tables of the documentation and schemas for agents show it.
"""

import ast
import sys
from collections.abc import Collection
from functools import cache
from inspect import getsource
from typing import Any, NamedTuple

import msgspec
from msgspec import NODEFAULT, inspect

from .fields import ABOVE_0, MAX_EPOCH, MAX_INT, MAX_SIDE, accepts, describe_type
from .operations import SHARED_MEANINGS, Operation

# bounds that all numbers of a kind have, which would tell a reader nothing
_COMMON = (MAX_INT, MAX_EPOCH, MAX_SIDE, sys.float_info.max)
NOUNS: dict[type | None, str] = {int: "a whole number", float: "a number"}
"""What a person types for a number"""


class FieldFacts(NamedTuple):
    """A field of a class."""

    name: str
    """as messages have it"""
    is_required: bool
    meaning: str
    """one line; empty where the name says all"""
    limits: str
    """such as "1..6" or "normal, low"; empty for a type without limits of its own"""
    part: type[msgspec.Struct] | None
    """The class of a map, or of each map of a list or map; None for other values, and for a mask or a pose"""
    default: object
    """None if it has none"""
    kind: type | None
    """int, float, bool or str: of a number, a truth value or a text, also one that may be None; None for others"""
    choices: tuple[str, ...]
    """the values of a field that has one of a few texts"""
    info: inspect.Type
    """its type, with all bounds"""

    def read_text(self, text: str) -> object:
        """Return a number or a text of this field as typed. Raises ValueError that says what was expected."""
        value: object = text
        try:
            if self.kind in (int, float):
                value = self.kind(text)
        except ValueError:
            raise ValueError(f"expected {NOUNS[self.kind]}, found {text!r:.80}") from None
        if not accepts(self.info, value):
            raise ValueError(f"expected {describe_type(self.info, value)}, found {text!r:.80}")
        return value

    @property
    def sentence(self) -> str:
        """The meaning, with the limits if there are any and it does not name the choices."""
        return self.meaning + (f", {self.limits}" if self.limits and not self.choices else "")


def list_fields(kind: type[msgspec.Struct]) -> tuple[FieldFacts, ...]:
    """Return the fields of a class, in their order."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    meanings = read_meanings(kind)
    return tuple(
        FieldFacts(
            field.encode_name,
            field.required,
            meanings.get(field.name, ""),
            _limits(field.type),
            _part(field.type),
            None if field.default is NODEFAULT else field.default,
            _scalar(field.type),
            _choices(field.type),
            field.type,
        )
        for field in info.fields
    )


@cache
def find_field(kind: type[msgspec.Struct], name: str) -> FieldFacts:
    """Return the field of a name."""
    (field,) = (field for field in list_fields(kind) if field.name == name)
    return field


@cache
def read_meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the texts below the fields of a class and of its bases in the source, each as one line.

    An argument of an operation without a text means what it means in all of them.
    """
    meanings = dict(SHARED_MEANINGS) if issubclass(kind, Operation) else {}
    for base in reversed(kind.__mro__):
        # without fields of its own, it may have been made without source
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct) or not base.__annotations__:
            continue
        body = _parse_classes(base.__module__)[base.__qualname__]
        for field, below in zip(body.body, body.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                meanings[field.target.id] = " ".join(str(below.value.value).split())
    return meanings


@cache
def _parse_classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module as its source has them, by their names."""
    parsed = ast.parse(getsource(sys.modules[module]))
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}


def describe_json(kind: type[msgspec.Struct], left_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of a class whose fields are plain values, with their meanings, without some fields."""
    (whole,), parts = msgspec.json.schema_components((kind,))
    assert "$ref" in whole
    schema = parts[kind.__name__]
    meanings = read_meanings(kind)
    properties = {}
    for name, described in schema["properties"].items():
        if name in left_out:
            continue
        properties[name] = _shorten(described)
        if name in meanings:
            properties[name]["description"] = meanings[name]
    required = [name for name in schema["required"] if name not in left_out]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": schema.get("additionalProperties", True),
    }


def _shorten(schema: Any) -> Any:
    """Return a part of a JSON schema without bounds that JSON's own numbers have, and with one type for equal items."""
    if isinstance(schema, list):
        return [_shorten(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    short = {
        key: _shorten(value)
        for key, value in schema.items()
        if key not in ("minimum", "maximum") or abs(value) <= MAX_EPOCH
    }
    if short.get("minimum") == ABOVE_0:
        del short["minimum"]
        short["exclusiveMinimum"] = 0
    first, *others = short.get("prefixItems", (None, True))
    if others == [first] * len(others):
        del short["prefixItems"]
        short["items"] = first
    return short


def _inner(info: inspect.Type) -> inspect.Type:
    """Return the type of the values that matter: of a list or map its items, of an optional field what it may be."""
    if isinstance(info, inspect.UnionType):
        return _inner(next(one for one in info.types if not isinstance(one, inspect.NoneType)))
    if isinstance(info, inspect.DictType):
        return _inner(info.value_type)
    if isinstance(info, inspect.VarTupleType | inspect.ListType):
        return _inner(info.item_type)
    return info


def _limits(info: inspect.Type) -> str:
    inner = _inner(info)
    if isinstance(inner, inspect.LiteralType):
        return ", ".join(map(str, inner.values))
    if isinstance(inner, inspect.StrType) and inner.min_length is not None:
        return f"{inner.min_length} to {inner.max_length} characters"
    if not isinstance(inner, inspect.IntType | inspect.FloatType):
        return ""
    low = inner.ge
    if low == ABOVE_0:
        return "above 0" if inner.le in _COMMON else f"above 0, at most {inner.le:g}"
    if inner.le is not None and inner.le not in _COMMON:
        return f"{low:g}..{inner.le:g}"
    return f"from {low:g}" if low is not None and low > 0 else ""


def _scalar(info: inspect.Type) -> type | None:
    """Return the type of a number, a truth value or a text; None for lists, maps and all else."""
    kinds = [one for one in getattr(info, "types", (info,)) if not isinstance(one, inspect.NoneType)]
    scalars: dict[type, type] = {
        inspect.IntType: int,
        inspect.FloatType: float,
        inspect.BoolType: bool,
        inspect.StrType: str,
        inspect.LiteralType: str,
    }
    return scalars.get(type(kinds[0])) if len(kinds) == 1 else None


def _choices(info: inspect.Type) -> tuple[str, ...]:
    inner = _inner(info)
    return tuple(map(str, inner.values)) if isinstance(inner, inspect.LiteralType) else ()


def _part(info: inspect.Type) -> type[msgspec.Struct] | None:
    inner = _inner(info)
    # a mask or a pose is a map that is described once for all messages
    if not isinstance(inner, inspect.StructType) or inner.cls.__module__.endswith("schema.values"):
        return None
    return inner.cls
