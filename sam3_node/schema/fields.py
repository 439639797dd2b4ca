"""Types of fields with their bounds, and `convert`, which makes a value of the schema from plain values.

`convert` accepts what msgpack or JSON unpacks to. It checks types and bounds in one pass in C; its errors name the
field, what was expected and what was found.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, inspect

from ..errors import WireError

MAX_INT = 2**63 - 1
"""Largest integer of a message: that of 64 bits with a sign."""
MAX_SIDE = 16384
"""Maximum width or height of an image, in pixels."""
MAX_EPOCH = 2**53 - 1
"""Largest epoch: every language reads it exactly, also as a float."""
MAX_THREADS = 1024
"""CPU threads of a step."""
MAX_BATCH = 8
"""Frames of several cameras that are encoded together, at most."""
MAX_CHARACTERS = 64 << 10
"""Characters of one text."""
MAX_ITEMS = 4096
"""Items of one list or map."""
MAX_LEVELS = 64
"""Levels of nesting of JSON in a file. What is shown of deeper values would exceed the stack."""
MAX_DESCRIBED = 60
"""Characters of a value in an error message."""
_LARGEST = sys.float_info.max
ABOVE_0 = sys.float_info.min
"""Lower bound of numbers above 0. msgspec bounds by the least denormal instead, which is 0 where a process flushes
denormals, as trainings do."""
_BINARY = (bytes, bytearray, memoryview)
_Record = inspect.StructType | inspect.DataclassType | inspect.TypedDictType

# numbers: NaN and the infinite lie outside of all bounds
Natural = Annotated[int, Meta(ge=0, le=MAX_INT)]
FromOne = Annotated[int, Meta(ge=1, le=MAX_INT)]
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
NotNegative = Annotated[float, Meta(ge=0.0, le=_LARGEST)]
Positive = Annotated[float, Meta(ge=ABOVE_0, le=_LARGEST)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
Pixel = Annotated[int, Meta(ge=0, le=MAX_SIDE)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
Vector2 = Annotated[tuple[Finite, ...], Meta(min_length=2, max_length=2)]
Vector3 = tuple[Finite, Finite, Finite]
Vector4 = Annotated[tuple[Finite, ...], Meta(min_length=4, max_length=4)]
Vector6 = Annotated[tuple[Finite, ...], Meta(min_length=6, max_length=6)]
Size3 = tuple[NotNegative, NotNegative, NotNegative]
NAME = r"(?!\.+\Z)[A-Za-z0-9_.-]{1,64}"
"""Pattern of names that may be a part of a topic: not of dots alone, because outputs name files by cameras."""
Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]
Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
PixelBox = tuple[Pixel, Pixel, Pixel, Pixel]

T = TypeVar("T")
Plain = Mapping[str, object]
"""A map of plain values: what msgpack and JSON can carry."""

_MISSING_FIELD = re.compile(
    r"Object missing required field `(?P<name>[^`]*)`(?: - at `(?P<path>.*)`)?", re.DOTALL
)
_UNKNOWN_FIELD = re.compile(
    r"Object contains unknown field `(?P<name>.*?)`(?: - at `(?P<path>\$.*)`)?", re.DOTALL
)
_AT_PATH = re.compile(r".* - at `(?P<key>key` in `)?(?P<path>\$.*)`", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")


class WrongField(NamedTuple):
    """A place in a value of the schema, where something is wrong."""

    name: str
    """as in "instances[2].score"; empty for the whole value"""
    expected: str
    found: object
    allowed: tuple[str, ...] = ()
    """Names of the fields that a map has here"""


def convert(
    value: object,
    kind: type[T],
    what: str,
    read_other: Callable[[type, Any], Any] | None = None,
    strict: bool = True,
) -> T:
    """Return plain values as `kind`. In a message, nil in the place of a field that may be left out counts as left out.

    `read_other` returns a value of a type that is not plain; it raises ValueError for one that cannot be read. Unless
    `strict`, a text that writes a number or a truth value counts as that where no text is expected. Raises WireError
    that names `what`, the field, what was expected and what was found.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=read_other, strict=strict)
    except (msgspec.ValidationError, RecursionError):
        pass  # tried again below without nil, which most values lack; the second error is told
    plain = value
    try:
        # in what this package itself has saved, which has values of other types, nil is a value
        plain = value if read_other else _without_nil(value)
        return msgspec.convert(plain, kind, dec_hook=read_other, strict=strict)
    except msgspec.ValidationError as error:
        raise WireError(_explain(error, plain, kind, what)) from None
    except RecursionError as error:
        raise WireError(f"{what}: expected fewer levels of nesting, found more") from error


def decode_json(text: bytes | str, what: str, has_nan: bool = True) -> Any:
    """Return the value of a JSON file, unchecked but for its nesting and its characters.

    has_nan: whether NaN and infinity may be in it, which are no JSON. Raises WireError that names `what`.
    """
    try:
        # a mark at the beginning, as some editors write it, is no part of the text
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=None if has_nan else _refuse_constant)
        # half of a pair of escapes is a character that no text in UTF-8 can have
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        value = None
        is_deep = True
    except ValueError as error:
        raise WireError(f"{what}: expected JSON, found {str(error)[:MAX_DESCRIBED]}") from error
    else:
        is_deep = count_levels(value) > MAX_LEVELS
    if is_deep:
        raise WireError(f"{what}: expected at most {MAX_LEVELS} levels of nesting, found more")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name}, which is no number of JSON")


def count_levels(value: object) -> int:
    """Return the number of levels of lists and maps, up to one more than allowed."""
    level = [value]
    for count in range(MAX_LEVELS + 1):
        inner = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level = [child for children in inner for child in children]
        if not inner:
            return count
    return MAX_LEVELS + 1


def to_plain(value: msgspec.Struct) -> dict[str, object]:
    """Return a value of the schema as plain values; what has its default is left out, if its class omits defaults."""
    plain: dict[str, object] = msgspec.to_builtins(value, builtin_types=_BINARY, enc_hook=_to_builtin)
    return plain


def _to_builtin(value: object) -> object:
    # a text with a class of its own, such as the version of a package
    if isinstance(value, str):
        return str(value)
    # scalars of numpy, without an import of it
    item: Callable[[], object] | None = getattr(value, "item", None)
    if item is None or getattr(value, "shape", None) != ():
        raise TypeError(f"expected plain values, found {type(value).__name__}")
    return item()


def _without_nil(value: object) -> object:
    """Return a value whose maps lack the keys that have nil."""
    if isinstance(value, dict):
        return {key: _without_nil(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nil(inner) for inner in value]
    return value


def describe(value: object) -> str:
    """Return a short description of any value, for the part of an error message after "found"."""
    # never the bytes or the contents of a container: they may be long, or secret
    if value is None:
        return "nothing"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{memoryview(value).nbytes} bytes"
    if isinstance(value, dict):
        return f"a map of {len(value)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = repr(value)
    if len(text) > MAX_DESCRIBED:
        return text[: MAX_DESCRIBED - 3] + "..."
    return text


def _explain(error: msgspec.ValidationError, value: object, kind: type, what: str) -> str:
    """Return the message of an error: which field is wrong, what it should be, and what it is."""
    text = str(error)
    if unknown := _UNKNOWN_FIELD.fullmatch(text):
        place = _find(unknown["path"], value, kind)
        allowed = ", ".join(place.allowed) or "none"
        inside = f"{place.name}: " if place.name else ""
        return f"{what}: {inside}unknown argument {unknown['name']!r:.60}; expected {allowed}"
    if missing := _MISSING_FIELD.fullmatch(text):
        path = f"{missing['path'] or '$'}.{missing['name']}"
    else:
        at_path = _AT_PATH.fullmatch(text)
        path = at_path["path"] if at_path else "$"
        if at_path and at_path["key"]:
            path += "[...]"
    place = _find(path, value, kind)
    if not place.name:
        return f"{what}: expected {place.expected}, found {describe(place.found)}"
    # the map that has the field, then the field: "masks: instances[1]: expected 'score' to be"
    *parents, name = place.name.split(".")
    whole = ": ".join([what, *parents])
    return f"{whole}: expected '{name}' to be {place.expected}, found {describe(place.found)}"


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _find(path: str | None, value: object, kind: type) -> WrongField:
    """Return the place that a path of msgspec names, such as "$.instances[2].score"."""
    info = _type_info(kind)
    name = ""
    found = value
    for step in _STEP.finditer(path or "$"):
        info = _without_none(info)
        key = step["name"]
        if key is not None:
            name = f"{name}.{key}" if name else key
            found = found.get(key) if isinstance(found, Mapping) else None
            info = _field(info, key)
        elif step["index"] != "...":
            index = int(step["index"])
            name = f"{name}[{index}]"
            found = found[index] if isinstance(found, list | tuple) and index < len(found) else None
            info = _item(info, index)
        elif isinstance(info, inspect.DictType):
            # msgspec does not say which entry of a map is wrong
            name, found, info = _find_record(name, found, info) or _find_entry(name, found, info)
    return WrongField(name, describe_type(info, found), found, _field_names(_without_none(info)))


def _field(info: inspect.Type, name: str) -> inspect.Type:
    if isinstance(info, _Record):
        for field in info.fields:
            if field.encode_name == name:
                return field.type
    return inspect.AnyType()


def _field_names(info: inspect.Type) -> tuple[str, ...]:
    if not isinstance(info, inspect.StructType):
        return ()
    return tuple(field.encode_name for field in info.fields)


def _item(info: inspect.Type, index: int) -> inspect.Type:
    if isinstance(info, inspect.TupleType):
        return info.item_types[index] if index < len(info.item_types) else inspect.AnyType()
    if isinstance(info, inspect.NamedTupleType):
        return info.fields[index].type if index < len(info.fields) else inspect.AnyType()
    if isinstance(info, inspect.VarTupleType | inspect.ListType):
        return info.item_type
    return inspect.AnyType()


def _find_record(name: str, found: object, info: inspect.DictType) -> tuple[str, object, inspect.Type] | None:
    """Return the first entry of a map of records that is wrong, as `_find_entry` does; None for other maps."""
    kind = info.value_type
    if isinstance(kind, _Record) and isinstance(found, Mapping):
        for key, value in found.items():
            try:
                msgspec.convert(value, kind.cls)
            except msgspec.ValidationError:
                return f"{name}.{key}", value, kind
    return None


def _find_entry(name: str, found: object, info: inspect.DictType) -> tuple[str, object, inspect.Type]:
    """Return the name and the value of the first entry of a map that is wrong, and the type that it should have."""
    if not isinstance(found, Mapping):
        return name, found, info
    for key, value in found.items():
        if not _fits(key, info.key_type):
            return f"{name}: every key", key, info.key_type
        if not _fits(value, info.value_type):
            return f"{name}.{key}", value, info.value_type
    return name, found, info


def accepts(info: inspect.Type, value: object) -> bool:
    """Return whether a number or text can be the value of a field of a type, which may also be None."""
    return _fits(value, _without_none(info))


def _fits(value: object, info: inspect.Type) -> bool:
    """Return False for a number or text that is surely not of a type; other values are not looked at."""
    if isinstance(info, inspect.UnionType):
        return any(_fits(value, one) for one in info.types)
    if isinstance(info, inspect.LiteralType):
        return value in info.values
    if isinstance(info, inspect.StrType):
        longest = info.max_length if info.max_length is not None else math.inf
        return isinstance(value, str) and (info.min_length or 0) <= len(value) <= longest
    if isinstance(info, inspect.IntType | inspect.FloatType):
        is_number = type(value) is int or (type(value) is float and isinstance(info, inspect.FloatType))
        if not is_number:
            return False
        number: Any = value
        low, high = _bounds(info)
        return math.isfinite(number) and bool(low <= number <= high)
    return True


def _without_none(info: inspect.Type) -> inspect.Type:
    """Return the type of a field that may be None without the None; of several types, the union."""
    if isinstance(info, inspect.UnionType):
        others = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        if len(others) == 1:
            return others[0]
    return info


def describe_type(info: inspect.Type, found: object = None) -> str:
    """Return what a value of a type is, in words: "an integer in 0..9". `found` is the value that is none."""
    info = _without_none(info)
    if isinstance(info, inspect.IntType | inspect.FloatType):
        return _describe_number(info)
    if isinstance(info, inspect.LiteralType):
        return "one of " + ", ".join(map(str, info.values))
    if isinstance(info, inspect.StrType):
        if info.pattern is not None:
            return (
                "the name of a camera, frame or robot: 1 to 64 letters, digits, '_', '.' or '-', and not of dots "
                "alone"
            )
        if info.min_length is not None:
            return f"a string of {info.min_length} to {info.max_length} characters"
        is_long = isinstance(found, str) and info.max_length is not None
        return f"a string of at most {info.max_length} characters" if is_long else "a string"
    if isinstance(info, inspect.TupleType):
        first = info.item_types[0]
        is_float = isinstance(first, inspect.FloatType)
        numbers = "finite numbers" if is_float else "integers"
        low, high = _bounds(first) if isinstance(first, inspect.IntType | inspect.FloatType) else ("", "")
        return f"{len(info.item_types)} {numbers} in {low}..{high}"
    if isinstance(info, inspect.VarTupleType | inspect.ListType):
        if info.min_length is not None and info.min_length == info.max_length:
            return f"{info.min_length} finite numbers"
        most = "" if info.max_length is None else f" of at most {info.max_length}"
        is_text = isinstance(info.item_type, inspect.StrType)
        return f"a list{most} of strings" if is_text else f"a list{most}"
    if isinstance(info, inspect.UnionType):
        return describe_type(info.types[-1])
    names = {
        inspect.BoolType: "true or false",
        inspect.BytesType: "binary data",
        inspect.StructType: "a map",
        inspect.DataclassType: "a map",
        inspect.TypedDictType: "a map",
        inspect.DictType: "a map",
        inspect.NamedTupleType: "a list",
    }
    if isinstance(info, inspect.CustomType):
        return f"a value of the type {info.cls.__name__}"
    return names.get(type(info), "another value")


def _bounds(info: inspect.IntType | inspect.FloatType) -> tuple[float, float]:
    low = -math.inf if info.ge is None or info.ge == -_LARGEST else info.ge
    high = math.inf if info.le is None or info.le == _LARGEST else info.le
    return low, high


def _describe_number(info: inspect.IntType | inspect.FloatType) -> str:
    low, high = _bounds(info)
    if low == ABOVE_0:
        return "a finite number above 0" + (f", at most {high:g}" if high < MAX_EPOCH else "")
    noun = "a finite number" if isinstance(info, inspect.FloatType) else "an integer"
    return f"{noun} in {low}..{high}"
