"""Bodies of messages: maps that carry a value of the schema, written in a fixed order and read in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec import NODEFAULT

from ..errors import WireError
from ..schema.fields import Plain, convert
from ..schema.values import Value
from ..types import Buffer
from .codec import VERSION, Limits, open_message, pack

_OPTIONAL: Any = msgspec.field(default_factory=dict)
_SIMPLE = (str, bool, int, tuple, type(None))
"""Types of defaults. Any other default makes an empty map."""


class Body:
    """The map of a value in a message, {v, kind, fields}, and the same map without v and kind inside another.

    The fields are those of the value's class. Wire version 1 has fixed the order of some; others follow in the order of
    the class. A field that has its default is left out, unless it is required.
    """

    def __init__(
        self,
        kind: type[Value],
        what: str,
        order: str = "",
        required: str = "",
        limits: Limits | None = None,
        forms: Mapping[str, Any] | None = None,
    ) -> None:
        """Describe a map by names that are separated by spaces.

        `forms` are the types of fields that have another form in a message than in the value, and of those that only
        the message has. A field with None is in no message.
        """
        self.what = what
        self._kind = kind
        self._required = frozenset(required.split())
        self._limits = limits or Limits()
        self._forms = dict(forms or {})
        first = order.split()
        rest = (name for name in kind.__struct_fields__ if name not in first)
        self.names = (*first, *(name for name in rest if self._forms.get(name, name) is not None))
        renamed = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
        self._keys = {name: renamed.get(name, name) for name in self.names}
        defaults = kind.__struct_defaults__
        self._defaults: dict[str, object] = dict.fromkeys(self.names, NODEFAULT)
        self._defaults |= dict(zip(kind.__struct_fields__[-len(defaults) :], defaults, strict=False))
        self._get = attrgetter(*self.names)
        # what is required is never left out
        self._left_out = [
            NODEFAULT if name in self._required else self._defaults[name] for name in self.names
        ]
        self._compared: dict[str, object] = {}
        for key, default in zip(self._keys.values(), self._left_out, strict=True):
            if isinstance(default, str):
                self._compared[key] = default
            elif not isinstance(default, _SIMPLE) and default is not NODEFAULT:
                self._compared[key] = {}

    def to_map(self, value: object) -> dict[str, object]:
        """Return the fields of a value in their order. The parts are as they are."""
        parts = zip(self._keys.values(), self._get(value), self._left_out, strict=True)
        fields = {key: part for key, part, default in parts if part is not default}
        # equal texts and empty maps are not always the same object
        for key, default in self._compared.items():
            if fields.get(key, default) == default:
                fields.pop(key, None)
        return fields

    def pack(self, fields: Plain) -> bytes:
        """Return the bytes of a message with these fields."""
        return pack({"v": VERSION, "kind": self.what, **fields})

    def unpack(self, data: Buffer) -> Any:
        """Return the message, a Struct of the type `struct`. Raises WireError for any other bytes."""
        size = memoryview(data).nbytes
        if size > self._limits.total_bytes:
            raise WireError(f"{self.what}: expected at most {self._limits.total_bytes} bytes, found {size}")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            # slowly, to say what is wrong; nil counts as absent
            fields = open_message(data, self.what, self._limits).whole()
            return convert(fields, self.struct, self.what)

    def build(self, message: Any) -> Any:
        """Return the value that a message, or the same map inside another, carries."""
        return self._kind(**{name: getattr(message, name) for name in self.names})

    @cached_property
    def struct(self) -> type[msgspec.Struct]:
        """The type of the message."""
        return self._define([("v", Literal[1]), ("kind", Literal[self.what])])

    @cached_property
    def inner(self) -> type[msgspec.Struct]:
        """The type of the map inside another."""
        return self._define([])

    def _define(self, fields: list[Any]) -> type[msgspec.Struct]:
        types = get_type_hints(self._kind, include_extras=True) | self._forms
        for name in self.names:
            default = self._defaults[name]
            # what has another form may be None, which the value's default may not be
            if name in self._forms and default is not NODEFAULT:
                default = None
            if default is NODEFAULT or name in self._required:
                fields.append((name, types[name]))
            elif isinstance(default, _SIMPLE):
                fields.append((name, types[name], default))
            else:
                fields.append((name, types[name], _OPTIONAL))
        return msgspec.defstruct(f"{self._kind.__name__}Map", fields, kw_only=True, rename=self._keys)

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Any]:
        return msgspec.msgpack.Decoder(self.struct)
