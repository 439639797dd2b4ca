"""Save the states of parts as a snapshot does."""

from typing import TypeVar

from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.schema.state import SavedState, from_plain, to_plain

S = TypeVar("S", bound=SavedState)


def pack(state: SavedState) -> bytes:
    """Return the bytes of a state, which are equal for equal states."""
    return pack_state(to_plain(state))


def unpack(state: S, data: bytes) -> S:
    """Return a state of the same kind from its bytes."""
    return from_plain(type(state), unpack_state(data))


def reload(state: S) -> S:
    """Return a state as it comes back from a file."""
    return unpack(state, pack(state))
