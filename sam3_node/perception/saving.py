"""Turn values of declared types into plain ones, which a checkpoint packs, and back without loss."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import repeat
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

from ..types import Mask, State
from ..wire import decode_mask, encode_mask

SCALARS: Mapping[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}
"""Types of the plain values that stand for a value of each type."""


class SavedByType:
    """Saves and restores the attributes that `SAVED` names, by the types that the class declares for them.

    The saved name of an attribute has no underscore in front.
    """

    SAVED: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {name.lstrip("_"): to_plain(getattr(self, name)) for name in self.SAVED}

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called."""
        kinds = get_type_hints(type(self))
        for name in self.SAVED:
            setattr(self, name, from_plain(kinds[name], state[name.lstrip("_")]))


def to_plain(value: Any) -> Any:
    """Return a value as numbers, texts, tensors, and lists of these.

    A dataclass becomes a map by the names of its fields, a tuple or an array a list, a map a list of pairs.
    """
    # most values are numbers, and a snapshot is made between two frames
    if value is None or type(value) in (int, float, str, bool):
        return value
    if isinstance(value, Tensor):
        return value.cpu()
    # before dataclasses: a mask is one, too, but takes less as an encoded mask
    if isinstance(value, Mask):
        return encode_mask(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        # fields that the constructor does not take are computed from the others
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, dict):
        # pairs, because the keys may be ids, or tuples
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Return the value of this type from which `to_plain` made a plain one. Raises TypeError or ValueError for others.

    Numbers, texts and tensors must have their type, because a file may hold any.
    """
    origin: Any = get_origin(kind) or kind
    arguments = get_args(kind)
    if origin in (Union, types.UnionType):  # of one type and None
        if plain is None:
            return None
        (kind,) = [each for each in arguments if each is not types.NoneType]
        return from_plain(kind, plain)
    if origin is Mask:
        return decode_mask(plain)
    if origin is np.ndarray:
        return _build_array(plain)
    if is_dataclass(origin):
        return _build(origin, plain)
    if hasattr(origin, "_fields"):
        return _build(origin, dict(zip(origin._fields, plain, strict=True)))
    if origin is dict:
        return {from_plain(arguments[0], key): from_plain(arguments[1], item) for key, item in plain}
    if origin is list:
        return [from_plain(arguments[0], item) for item in plain]
    if origin is tuple:
        kinds: Any = arguments
        if arguments[-1] is Ellipsis:
            kinds = repeat(arguments[0], len(plain))
        return tuple(from_plain(*pair) for pair in zip(kinds, plain, strict=True))
    if origin is Literal:
        is_fitting = plain in arguments
    elif kind in SCALARS:
        # True is an int to Python
        is_fitting = isinstance(plain, SCALARS[kind]) and isinstance(plain, bool) == (kind is bool)
    else:
        is_fitting = kind is Any or isinstance(plain, kind)
    if not is_fitting:
        raise TypeError(f"expected {kind}, found {plain!r:.80}")
    return plain


def _build_array(plain: Any) -> Any:
    """Return an array of these numbers."""
    array = np.array(plain)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected numbers, found {plain!r:.80}")
    return array


def _build(record: Any, plain: Mapping[str, Any]) -> Any:
    """Return a dataclass or a NamedTuple with these fields."""
    kinds = _find_kinds(record)
    return record(**{name: from_plain(kinds[name], item) for name, item in plain.items()})


@cache
def _find_kinds(record: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass or a NamedTuple, by name."""
    return get_type_hints(record)
