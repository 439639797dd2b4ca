"""What a snapshot holds: the bounds of its values, parts that save themselves, and plain values for both ways.

Each part that is saved has a Struct beside it, with types and bounds. A saved state is one tree of these Structs.
`to_plain` copies it; `from_plain` checks plain values, which may come from a file that anybody made, and builds it.
"""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..errors import ReplayError, WireError
from .fields import MAX_INT, convert

MAX_COUNT = 1 << 62
"""Largest count or id of a state. What steps add to it stays within 64 bits."""
MAX_NUMBER = 1e15
"""Largest number of a state. Its square stays finite in float64."""
MAX_TEXT = 64 << 10
"""Characters of the longest text of a state, such as a label."""
MAX_DEPTH = 32
"""Levels of nesting of a state."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Id = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Time = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
"""Nanoseconds of a camera's clock, which may lie before its beginning."""
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Size = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Label = Annotated[str, Meta(max_length=MAX_TEXT)]
Position = tuple[Number, Number, Number]
Pixels = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]

State = dict[str, Any]
"""A saved state as plain values: maps and lists of int, float, str, bool, None, arrays, and tensors on the host.

A state and what is in it are never modified."""


if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:

    class _TensorType(type):
        def __instancecheck__(cls, value: object) -> bool:
            torch = sys.modules.get("torch")
            return torch is not None and isinstance(value, torch.Tensor)

    class Tensor(metaclass=_TensorType):
        """Stands for the tensor of torch in the states of modules that run without torch."""


class SavedState(msgspec.Struct):
    """Base of the states of parts. A file may have more fields than the declared ones."""


S = TypeVar("S", bound=SavedState)
T = TypeVar("T")


class SavedPart(Generic[S]):
    """A part of the program that keeps something between two frames.

    The fields of `STATE` name the attributes that are saved. An attribute may have an underscore in front. One that is
    a part itself saves and restores itself. A property without a setter is saved alone: it follows from the others.
    """

    STATE: ClassVar[type[Any]]

    def state(self) -> S:
        """Return what is kept. It shares its values with this part, so copy it before the next step: `to_plain`."""
        state: S = self.STATE(**{name: self._save(value) for name, value in self._saved().items()})
        return state

    def restore(self, state: S) -> None:
        """Continue from the moment at which `state` was called. The values of the state become those of this part.

        Raises ReplayError for the state of another part, and what `before_restore` raises.
        """
        if not isinstance(state, self.STATE):
            raise ReplayError(f"expected {self.STATE.__name__}, found {type(state).__name__}")
        self.before_restore(state)
        for name, value in self._saved().items():
            self._put(name, value, getattr(state, name))
        self.after_restore(state)

    def before_restore(self, state: S) -> None:
        """Refuse a state that does not fit this part, or prepare what its fields need. It comes before all changes."""

    def after_restore(self, state: S) -> None:
        """Compute what follows from the restored values."""

    def _saved(self) -> Mapping[str, object]:
        """Return the values that are saved, by the fields of the state."""
        return {name: getattr(self, self._attribute(name)) for name in self.STATE.__struct_fields__}

    def _attribute(self, name: str) -> str:
        return name if hasattr(self, name) else f"_{name}"

    def _save(self, value: Any) -> Any:
        """Return a value as the state has it."""
        return value.state() if isinstance(value, SavedPart) else value

    def _put(self, name: str, value: Any, saved: Any) -> None:
        """Restore the `value` of a field."""
        attribute = self._attribute(name)
        if isinstance(value, SavedPart):
            # one that the settings have added since begins afresh
            if saved is not None:
                value.restore(saved)
            return
        declared = getattr(type(self), attribute, None)
        is_derived = isinstance(declared, property) and declared.fset is None
        if not is_derived:
            setattr(self, attribute, saved)


def to_plain(value: Any) -> Any:
    """Return a copy of a value as numbers, texts, arrays, tensors on the host, and maps and lists of these.

    A map may have keys of any plain kind. A set becomes a sorted list, so that equal states are saved alike.
    """
    # most values are numbers, and a snapshot is made between two frames
    if value is None or type(value) in (int, float, str, bool, bytes):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {tuple(key) if isinstance(key, tuple) else key: to_plain(item) for key, item in value.items()}
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, msgspec.Struct) or is_dataclass(value):
        kind: Any = type(value)
        tags, names = _saved_names(kind)
        return tags | {saved: to_plain(getattr(value, name)) for saved, name in names}
    return value


@cache
def _saved_names(kind: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the tag of a Struct that is one of several, and the saved names and names of its or a dataclass's fields.

    Fields that the constructor of a dataclass does not take are computed from the others.
    """
    if not issubclass(kind, msgspec.Struct):
        return {}, [(field.name, field.name) for field in fields(kind) if field.init]
    config = kind.__struct_config__
    tags = {} if config.tag is None else {str(config.tag_field): config.tag}
    return tags, list(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))


def from_plain(kind: type[T], plain: object, what: str = "state") -> T:
    """Return the value of a type from which `to_plain` made plain values. Raises ReplayError for others.

    The error names `what`, the field, what was expected and what was found.
    """
    try:
        return convert(plain, kind, what, _restore_array)
    except WireError as error:
        raise ReplayError(f"expected a state of this version, found {error}") from error


def _restore_array(kind: Any, plain: Any) -> Any:
    if get_origin(kind) is not np.ndarray:
        return plain
    # a file has tensors in the place of arrays
    if not isinstance(plain, np.ndarray | Tensor):
        raise ValueError("expected an array")
    # a copy, because what is restored changes, and the state does not
    (_, dtype) = get_args(kind)
    array: Any = plain.numpy() if isinstance(plain, Tensor) else plain
    return np.array(array, get_args(dtype)[0])


def check_numbers(value: object, place: tuple[object, ...] = ()) -> None:
    """Raise ReplayError for a number that is not finite or too large, and for nesting that is too deep."""
    if isinstance(value, float) and not abs(value) <= MAX_NUMBER:
        raise ReplayError(f"{_join(place)}: expected a finite number up to {MAX_NUMBER:g}, found {value}")
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise ReplayError(f"{_join(place)}: expected an integer up to {MAX_INT}, found {value}")
    if len(place) > MAX_DEPTH:
        raise ReplayError(f"{_join(place[:4])}: expected at most {MAX_DEPTH} levels, found more")
    if isinstance(value, dict):
        for key, item in value.items():
            check_numbers(item, (*place, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_numbers(item, (*place, index))


def _join(place: tuple[object, ...]) -> str:
    return ".".join(map(str, place))
