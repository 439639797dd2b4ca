"""Bounded msgpack: `pack` beside `unpack`, and `Fields` for taking typed values out of an unpacked map.

Whatever the bytes, `unpack` and `Fields` return a value or raise WireError, and they take no memory for what
is declared but not present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np

from ..errors import WireError
from ..types import Buffer

VERSION = 1
MAX_INT = 2**63 - 1
MAX_SIDE = 16384
"""Largest width or height of an image, in pixels."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one msgpack message may hold."""

    total_bytes: int = 16 << 20
    text_bytes: int = 64 << 10
    container_items: int = 4096
    total_items: int = 1 << 16
    depth: int = 16


def pack(value: object) -> bytes:
    """Pack None, bool, int, float, str, bytes, list, tuple or dict; numpy scalars as their value."""
    try:
        return msgpack.packb(value, default=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot pack this message: {error}") from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected plain values, found {type(value).__name__}; pack arrays with pack_array")


def unpack(data: Buffer, *, what: str, limits: Limits | None = None) -> Any:
    """Unpack one msgpack value within `limits`; WireError, which names `what`, for anything else.

    Map keys are str or bytes. Extension types are refused.
    """
    limits = limits or Limits()
    size = memoryview(data).nbytes
    if size > limits.total_bytes:
        raise WireError(f"{what}: expected at most {limits.total_bytes} bytes, found {size}")
    count = _item_counter(what, limits.total_items)
    try:
        _require_complete(data, size)
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
        raise WireError(f"{what}: expected msgpack within limits, found {_reason(error)}") from error
    _require_shallow(value, what, limits.depth)
    return value


def _require_complete(data: Buffer, size: int) -> None:
    # unpackb allocates a list as long as its header says; skipping first proves that the items are there
    reader = msgpack.Unpacker(max_buffer_size=size)
    reader.feed(data)
    reader.skip()


def _item_counter(what: str, most: int) -> Callable[[Any], Any]:
    items = 0

    def count(container: Any) -> Any:
        nonlocal items
        items += 1 + len(container)
        if items > most:
            raise WireError(f"{what}: expected at most {most} items, found more")
        return container

    return count


def _require_shallow(value: object, what: str, depth: int) -> None:
    level = [value]
    for _ in range(depth + 1):
        level = [child for parent in level for child in _children(parent) if isinstance(child, (list, dict))]
        if not level:
            return
    raise WireError(f"{what}: expected at most {depth} levels of nesting, found more")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _reason(error: Exception) -> str:
    if isinstance(error, msgpack.OutOfData):
        return "truncated data"
    if isinstance(error, msgpack.StackError):
        return "nesting too deep"
    return str(error) or "an invalid byte"


def describe(value: object) -> str:
    """`value` for the "found" of an error message: always short, whatever it holds."""
    if value is None:
        return "nothing"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{memoryview(value).nbytes} bytes"
    if isinstance(value, (list, tuple, dict)):
        return f"a {'map' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Typed reading of one map; `what` names it in errors. Unknown keys are ignored, nil counts as absent.

    Every method raises WireError that names the field, what was expected and what was found.
    """

    __slots__ = ("_map", "what")

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise WireError(f"{what}: expected a map, found {describe(value)}")
        self._map = value
        self.what = what

    def has(self, key: str) -> bool:
        """Whether an optional field is present."""
        return self._map.get(key) is not None

    def wrong(self, key: str, expected: str) -> WireError:
        """The error for a field that is not as `expected`."""
        return WireError(
            f"{self.what}: expected '{key}' to be {expected}, found {describe(self._map.get(key))}"
        )

    def names(self) -> tuple[str, ...]:
        """All keys, which must be strings."""
        if not all(isinstance(name, str) for name in self._map):
            raise WireError(f"{self.what}: expected every key to be a string, found others")
        return tuple(self._map)

    def any(self, key: str) -> Any:
        """The value as it is, None where absent."""
        return self._map.get(key)

    def integer(self, key: str, low: int = 0, high: int = MAX_INT) -> int:
        """An integer in low..high."""
        value = self._map.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer in {low}..{high}")
        return value

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite integer or float in low..high."""
        value: Any = self._map.get(key)
        if not _is_finite(value) or not low <= value <= high:
            raise self.wrong(key, f"a finite number in {low}..{high}")
        return float(value)

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self.number(key)
        if value <= 0:
            raise self.wrong(key, "a finite number above 0")
        return value

    def flag(self, key: str) -> bool:
        """A bool."""
        value = self._map.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self._map.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def choice(self, key: str, choices: tuple[T, ...]) -> T:
        """One of `choices`, all strings."""
        value = self._map.get(key)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, "one of " + ", ".join(map(str, choices)))
        return value

    def blob(self, key: str) -> bytes:
        """Binary data."""
        value = self._map.get(key)
        if not isinstance(value, bytes):
            raise self.wrong(key, "binary data")
        return value

    def fields(self, key: str) -> Fields:
        """A map within."""
        return Fields(self._map.get(key), f"{self.what}: {key}")

    def sequence(self, key: str) -> list[Any]:
        """A list of anything."""
        value = self._map.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return value

    def integers(self, key: str, count: int, low: int = 0, high: int = MAX_INT) -> tuple[int, ...]:
        """A list of `count` integers in low..high."""
        values = self.sequence(key)
        if len(values) != count or not all(type(value) is int and low <= value <= high for value in values):
            raise self.wrong(key, f"{count} integers in {low}..{high}")
        return tuple(values)

    def numbers(self, key: str, most: int) -> tuple[float, ...]:
        """A list of at most `most` finite numbers."""
        values = self.sequence(key)
        if len(values) > most or not all(map(_is_finite, values)):
            raise self.wrong(key, f"a list of at most {most} finite numbers")
        return tuple(map(float, values))

    def triple(self, key: str, low: float = -math.inf) -> tuple[float, float, float]:
        """A list of three finite numbers, none below `low`."""
        values = self.numbers(key, 3)
        if len(values) != 3 or min(values) < low:
            raise self.wrong(key, f"three finite numbers from {low}")
        return values

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.sequence(key)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of strings")
        return tuple(values)

    def measures(self) -> dict[str, int | float]:
        """The whole map, whose keys must be strings and whose values finite numbers."""
        for name in self.names():
            self.number(name)
        return self._map

    def require_version(self) -> None:
        """Refuse a message of another wire version."""
        version = self._map.get("v")
        if type(version) is not int or version != VERSION:
            raise WireError(f"{self.what}: expected wire version {VERSION}, found {describe(version)}")

    def require_kind(self, kind: str) -> None:
        """Refuse a message of another wire version or kind."""
        self.require_version()
        self.choice("kind", (kind,))


def _is_finite(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))
