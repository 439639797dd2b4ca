"""Tests of event messages."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3_node.errors import WireError
from sam3_node.wire import EVENTS_TOPIC, SERVED, Event, pack, pack_event, unpack_event

BODY = {"v": 1, "kind": "event", "n": 3, "op": "reset", "args": {}}


def test_an_event_is_unpacked_as_it_was_packed() -> None:
    for event in (
        Event(0, SERVED, {"camera": "cam0"}),
        Event(7, "add_object", {"box": [1, 2.5, 3, 4], "mask": {"data": b"\0"}}),
    ):
        assert unpack_event(pack_event(event)) == event


@pytest.mark.parametrize(
    "change", [{"v": 2}, {"kind": "masks"}, {"n": -1}, {"n": 1.0}, {"op": 4}, {"op": None}, {"args": []}]
)
def test_wrong_fields_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(WireError):
        unpack_event([EVENTS_TOPIC, pack(BODY | change)])


def test_another_topic_or_number_of_parts_is_refused() -> None:
    for parts in ([], [EVENTS_TOPIC], [b"eventsx", pack(BODY)], [EVENTS_TOPIC, pack(BODY), b""]):
        with pytest.raises(WireError, match="event"):
            unpack_event(parts)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(unpack_event([EVENTS_TOPIC, data]), Event)
