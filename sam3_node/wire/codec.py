"""Bounded msgpack: `pack`, `unpack`, and `Fields`, which reads typed values from an unpacked map by a `Schema`.

For any bytes, `unpack` and `Fields` return a value or raise WireError. They allocate no memory for data that a header
declares but the message does not contain. `compress` and `decompress` are for data whose size the receiver knows.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import msgpack
import zstandard

from ..errors import WireError
from ..schema.fields import MAX_CHARACTERS, MAX_INT, MAX_ITEMS, Plain, describe
from ..types import Buffer
from ..types import lazy_numpy as np

VERSION = 1
"""Wire version of all messages."""
_MAX_RATIO = (128 << 10) // 4
"""Largest ratio of zstd: a block has at least 4 bytes, and expands to at most 128 KiB."""
_CONTAINERS = frozenset({dict, list})
_NUMBERS = frozenset({int, float})

T = TypeVar("T")


class Limits(NamedTuple):
    """Limits on the contents of one msgpack message."""

    total_bytes: int = 16 << 20
    text_bytes: int = MAX_CHARACTERS
    """of one text"""
    container_items: int = MAX_ITEMS
    """of one list or map"""
    total_items: int = 1 << 16
    """at all levels"""
    depth: int = 16
    """levels of nesting"""


def pack(value: object) -> bytes:
    """Pack None, bool, int, float, str, bytes, list, tuple or dict. Numpy scalars are packed as their value."""
    try:
        return cast(bytes, msgpack.packb(value, default=_to_builtin))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot pack this message: {error}") from error


def _to_builtin(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected plain values, found {type(value).__name__}")


def unpack(data: Buffer, *, what: str, limits: Limits | None = None) -> Any:
    """Unpack one msgpack value within `limits`. Raises WireError that names `what` for any other input.

    Map keys are str or bytes. Extension types are refused.
    """
    limits = limits or Limits()
    size = memoryview(data).nbytes
    if size > limits.total_bytes:
        raise WireError(f"{what}: expected at most {limits.total_bytes} bytes, found {size}")
    # each item has a byte and counts twice at most, so a small message cannot have too many
    count = make_item_counter(what, limits.total_items) if 2 * size > limits.total_items else None
    try:
        # before anything is allocated: are all items there that the headers declare?
        require_complete(data, size)
        value = msgpack.unpackb(
            data,
            list_hook=count,
            object_hook=count,
            max_str_len=limits.text_bytes,
            max_bin_len=size,
            max_array_len=limits.container_items,
            max_map_len=limits.container_items,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"{what}: expected msgpack within limits, found {_explain(error)}") from error
    # the depth is checked last: msgpack itself refuses what is too deep for it
    if type(value) in _CONTAINERS:
        count_items(value, what, limits.depth)
    return value


def open_message(data: Buffer, what: str, limits: Limits, has_kind: bool = True) -> Fields:
    """Return the map of a message. Raises WireError for any other bytes, and for another wire version or kind."""
    fields = Fields(unpack(data, what=what, limits=limits), what)
    # the version before all else: another one may have other fields
    fields.require_version()
    if has_kind:
        fields.choice("kind", (what,))
    return fields


def require_complete(data: Buffer, size: int) -> None:
    """Raise an error of msgpack, or ValueError, unless all items are there that the headers declare."""
    # unpackb allocates lists of the length that the header declares; skipping first proves that the items exist
    reader = msgpack.Unpacker(max_buffer_size=size)
    reader.feed(data)
    reader.skip()


def make_item_counter(what: str, max_items: int) -> Callable[[Any], Any]:
    """Return a hook of msgpack that raises WireError once lists and maps have more than `max_items` items in all."""
    items = 0

    def count_items(container: Any) -> Any:
        nonlocal items
        # a map counts its pairs: its keys are also items, and are bounded by the bytes
        items += 1 + len(container)
        if items > max_items:
            raise WireError(f"{what}: expected at most {max_items} items, found more")
        return container

    return count_items


def count_items(value: object, what: str = "value", depth: int = 16) -> int:
    """Return the number of values in a container, at all levels. Raises WireError for more than `depth` levels."""
    count = 0
    level = [value]
    # level by level instead of by recursion, so that deep nesting ends in an error of ours
    for _ in range(depth + 1):
        children: list[Any] = []
        for parent in level:
            if type(parent) is dict:
                children += parent.values()
            else:
                children += parent  # type: ignore[arg-type]
        count += len(children)
        level = [child for child in children if type(child) in _CONTAINERS]
        if not level:
            return count
    raise WireError(f"{what}: expected at most {depth} levels of nesting, found more")


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _explain(error: Exception) -> str:
    # what the bytes are: msgpack's own texts are about its implementation
    if isinstance(error, msgpack.OutOfData):
        return "truncated data"
    if isinstance(error, msgpack.StackError):
        return "nesting too deep"
    return str(error) or "an invalid byte"


class PlainValue(NamedTuple):
    """Type and bounds of the values that a reader returns as they are. `low` is None for a type without bounds."""

    kind: type | None
    low: Any = None
    high: Any = None


_NOT_PLAIN = PlainValue(None)


class Schema:
    """The fields of a map: how each is read, by name. A name with ? at its end is optional."""

    def __init__(self, fields: Mapping[str, Read]) -> None:
        # split once, at import, so that reading a message looks at plain dicts
        self.readers = {name.rstrip("?"): read for name, read in fields.items()}
        self.required = frozenset(fields) & self.readers.keys()
        self.plain: dict[str, PlainValue] = {
            name: _PLAIN[read] for name, read in self.readers.items() if read in _PLAIN
        }


class Fields:
    """A typed reader of one map. Unknown keys are ignored, and nil counts as absent.

    Every method raises WireError that names the map (`what`), the field, the expected and the actual value.
    """

    __slots__ = ("_map", "what")

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise WireError(f"{what}: expected a map, found {describe(value)}")
        self._map = value
        self.what = what

    def whole(self) -> Plain:
        """Return the map itself."""
        return self._map

    def has(self, key: str) -> bool:
        """Return True if an optional field is present."""
        return self._map.get(key) is not None

    def wrong(self, key: str, expected: str) -> WireError:
        """Return the error for a field that is not `expected`."""
        return WireError(
            f"{self.what}: expected '{key}' to be {expected}, found {describe(self._map.get(key))}"
        )

    def read(self, schema: Schema) -> dict[str, Any]:
        """Return the values of the fields that are present. Raises WireError for one that is wrong or missing."""
        values = {}
        readers = schema.readers
        plain = schema.plain
        # values that need no reader are taken as they are: the call would cost more than the check
        for name, value in self._map.items():
            rule = plain.get(name, _NOT_PLAIN)
            if type(value) is rule.kind and (rule.low is None or rule.low <= value <= rule.high):
                values[name] = value
            elif name in readers and value is not None:
                values[name] = readers[name](self, name)
        for name in schema.required - values.keys():
            readers[name](self, name)  # raises: it is missing
        return values

    def names(self) -> tuple[str, ...]:
        """Return all keys, which must be strings."""
        if not all(isinstance(name, str) for name in self._map):
            raise WireError(f"{self.what}: expected every key to be a string, found others")
        return tuple(self._map)

    def open_map(self, key: str) -> Plain:
        """Return a nested map, its values unchecked. Its keys must be strings."""
        value: Any = self._map.get(key)
        # the usual case costs no object; the error is that of a nested map
        if type(value) is not dict or not all(type(name) is str for name in value):
            self.fields(key).names()  # raises
        return cast(Plain, value)

    def any(self, key: str) -> Any:
        """Return the value unchecked, or None if it is absent."""
        return self._map.get(key)

    def integer(self, key: str, low: int = 0, high: int = MAX_INT) -> int:
        """Return an integer in low..high."""
        value = self._map.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer in {low}..{high}")
        return value

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Return a finite integer or float in low..high."""
        value: Any = self._map.get(key)
        if not _is_finite(value) or not low <= value <= high:
            raise self.wrong(key, f"a finite number in {low}..{high}")
        return float(value)

    def positive(self, key: str) -> float:
        """Return a finite number above 0."""
        value = self.number(key)
        if value <= 0:
            raise self.wrong(key, "a finite number above 0")
        return value

    def flag(self, key: str) -> bool:
        """Return a bool."""
        return self._typed(key, bool, "true or false")

    def text(self, key: str) -> str:
        """Return a string."""
        return self._typed(key, str, "a string")

    def choice(self, key: str, choices: tuple[T, ...]) -> T:
        """Return one of `choices`, all strings."""
        value = self._map.get(key)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, "one of " + ", ".join(map(str, choices)))
        return value

    def blob(self, key: str) -> bytes:
        """Return binary data."""
        return self._typed(key, bytes, "binary data")

    def fields(self, key: str) -> Fields:
        """Return a nested map."""
        return Fields(self._map.get(key), f"{self.what}: {key}")

    def sequence(self, key: str) -> list[Any]:
        """Return a list of any values."""
        return self._typed(key, list, "a list")

    def _typed(self, key: str, kind: type[T], expected: str) -> T:
        value = self._map.get(key)
        if not isinstance(value, kind):
            raise self.wrong(key, expected)
        return value

    def integers(self, key: str, count: int, low: int = 0, high: int = MAX_INT) -> tuple[int, ...]:
        """Return a list of `count` integers in low..high."""
        # checked one by one: bool is an int in Python, but not here
        values = self._map.get(key)
        if type(values) is not list or len(values) != count:
            raise self.wrong(key, f"{count} integers in {low}..{high}")
        for value in values:
            if type(value) is not int or not low <= value <= high:
                raise self.wrong(key, f"{count} integers in {low}..{high}")
        return tuple(values)

    def numbers(self, key: str, max_count: int) -> tuple[float, ...]:
        """Return a list of at most `max_count` finite numbers."""
        values = self.sequence(key)
        if len(values) > max_count or not all(map(_is_finite, values)):
            # a vector of the wrong length is refused by its own reader
            raise self.wrong(key, f"a list of at most {max_count} finite numbers")
        return tuple(map(float, values))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self.sequence(key)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of strings")
        return tuple(values)

    def measures(self) -> dict[str, int | float]:
        """Return the whole map. Its keys must be strings, and its values finite numbers."""
        values = self._map.values()
        # the usual case in a few calls: a robot's joints come a thousand times a second
        if (
            {*map(type, self._map)} <= {str}
            and {*map(type, values)} <= _NUMBERS
            and all(map(math.isfinite, values))
        ):
            return self._map
        for name in self.names():
            self.number(name)  # raises
        return self._map

    def require_version(self) -> None:
        """Raise WireError for a message of another wire version."""
        version = self._map.get("v")
        if type(version) is not int or version != VERSION:
            raise WireError(f"{self.what}: expected wire version {VERSION}, found {describe(version)}")


Read = Callable[[Fields, str], Any]
"""Reads one field: (map, name) -> value. Raises WireError if it is wrong or missing."""


_PLAIN: dict[Read, PlainValue] = {
    Fields.integer: PlainValue(int, 0, MAX_INT),
    Fields.text: PlainValue(str),
    Fields.flag: PlainValue(bool),
    Fields.sequence: PlainValue(list),
}
"""Readers that `Fields.read` need not call for such values."""


def integer(low: int = 0, high: int = MAX_INT) -> Read:
    """Return the reader of an integer in low..high."""

    def read(fields: Fields, name: str) -> int:
        return fields.integer(name, low, high)

    # known by its bounds, so that `Fields.read` checks most integers without a call
    _PLAIN[read] = PlainValue(int, low, high)
    return read


def number(low: float, high: float = math.inf) -> Read:
    """Return the reader of a finite number in low..high."""

    def read(fields: Fields, name: str) -> float:
        return fields.number(name, low, high)

    _PLAIN[read] = PlainValue(float, low, min(high, sys.float_info.max))  # a larger one is infinite
    return read


def vector(count: int, low: float = -math.inf) -> Read:
    """Return the reader of a list of `count` finite numbers, none below `low`."""

    def read(fields: Fields, name: str) -> tuple[float, ...]:
        # exactly `count`: a shorter list is no vector
        values = fields.numbers(name, count)
        if len(values) != count or min(values) < low:
            raise fields.wrong(name, f"{count} finite numbers from {low}")
        return values

    return read


def choice(choices: tuple[Any, ...]) -> Read:
    """Return the reader of one of `choices`, all strings."""
    return lambda fields, name: fields.choice(name, choices)


def _is_finite(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


class _Codecs(threading.local):
    # contexts are expensive to create, and threads must not share them
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_codecs = _Codecs()


def compress(data: Buffer) -> bytes:
    """Return one zstd frame of level 1 that declares its content size."""
    return _codecs.compressor.compress(data)


def check_size(data: Buffer, size: int, what: str) -> None:
    """Raise WireError for data that are no zstd frame, or one that declares another size. Nothing is decompressed."""
    # the header alone tells the size, so that nothing is allocated for a false one
    try:
        declared = zstandard.get_frame_parameters(data).content_size
    except (zstandard.ZstdError, ValueError) as error:
        raise WireError(f"{what}: expected a zstd frame of {size} bytes, found: {error}") from error
    # a frame that declares much and holds little would allocate the declared size
    if declared != size or size > memoryview(data).nbytes * _MAX_RATIO:
        raise WireError(f"{what}: expected a zstd frame of {size} bytes, found one that cannot hold them")


def decompress(data: Buffer, size: int, what: str) -> bytes:
    """Return the `size` bytes of one zstd frame.

    Raises WireError for invalid data, and before allocating memory if the frame declares another size.
    """
    check_size(data, size, what)
    # data behind the frame would be another message's
    try:
        content = _codecs.decompressor.decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise WireError(f"{what}: expected a zstd frame of {size} bytes, found: {error}") from error
    if len(content) != size:
        raise WireError(f"{what}: expected {size} bytes in the zstd frame, found {len(content)}")
    return content
