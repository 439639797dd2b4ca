"""Tests of camera names: each belongs to one endpoint, and an endpoint with many names takes none from another."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sam3_node.transport import FramePublisher, FrameSubscriber, choose_replaced
from tests.support.transport_peer import make_frame, wait_until

TCP = "tcp://127.0.0.1:*"


@contextmanager
def two_cameras(max_cameras: int = 16) -> Iterator[tuple[FramePublisher, FramePublisher, FrameSubscriber]]:
    """Open two publishers, and a subscriber that is connected to both and has heard cam0 of the first."""
    with (
        FramePublisher(TCP) as first,
        FramePublisher(TCP) as second,
        FrameSubscriber([first.endpoint, second.endpoint], max_cameras=max_cameras) as subscriber,
    ):
        wait_until(lambda: len(subscriber.connected) == 2)
        wait_until(lambda: first.send(make_frame(0)) and subscriber.take(20))
        take_cameras(subscriber)
        yield first, second, subscriber


def take_cameras(subscriber: FrameSubscriber) -> list[tuple[str, str]]:
    """Take all that wait. Return camera and endpoint of each."""
    taken = iter(lambda: subscriber.take(100), None)
    return [(received.frame.camera, received.endpoint) for received in taken]


def test_a_second_camera_of_a_name_is_refused_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), two_cameras() as (first, second, subscriber):
        wait_until(lambda: second.send(make_frame(5)) and subscriber.rejected > 3)
        first.send(make_frame(9))
        assert take_cameras(subscriber) == [("cam0", first.endpoint)]
        assert f"camera cam0 of {second.endpoint} is refused" in str(subscriber.last_error)
        assert f"{first.endpoint} has sent it first" in str(subscriber.last_error)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_name_is_free_when_its_endpoint_has_gone_and_was_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.transport.receiver.CAMERA_IDLE_S", 0.3)
    with two_cameras() as (first, second, subscriber):
        time.sleep(0.4)
        # the first is silent, but there
        wait_until(lambda: second.send(make_frame(5)) and subscriber.rejected)
        first.close()
        wait_until(lambda: second.send(make_frame(6)) and subscriber.take(20))
        assert take_cameras(subscriber) in ([], [("cam0", second.endpoint)])


def test_an_endpoint_with_many_names_takes_nothing_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.transport.receiver.CAMERA_IDLE_S", 0.01)
    with two_cameras(max_cameras=4) as (first, second, subscriber):
        for number in range(100):
            second.send(make_frame(number, f"new{number}"))
            time.sleep(0.02)
        take_cameras(subscriber)
        assert "cam0" in subscriber.names._bindings
        first.send(make_frame(1))
        second.send(make_frame(1))
        assert take_cameras(subscriber) == [("cam0", first.endpoint)]


def test_an_endpoint_that_comes_late_gets_its_share() -> None:
    with two_cameras(max_cameras=4) as (first, second, subscriber):
        for number in range(100):
            first.send(make_frame(number, f"cam{number % 8}"))
            time.sleep(0.005)
        take_cameras(subscriber)
        for name in ("a", "b"):
            second.send(make_frame(0, name))
            assert take_cameras(subscriber) == [(name, second.endpoint)]
        second.send(make_frame(0, "c"))
        wait_until(lambda: "at most 4 cameras, found another: c" in (subscriber.last_error or ""))
        first.send(make_frame(0, "cam0"))
        assert take_cameras(subscriber) in ([], [("cam0", first.endpoint)])
        assert len(subscriber.names._bindings) == 4


def test_expected_cameras_get_their_places_before_others() -> None:
    with two_cameras(max_cameras=2) as (_, second, subscriber):
        subscriber.names.expect(["left", "right"])  # as after a restart
        assert not subscriber.names.has_place("cam0")
        assert [subscriber.names.silent_s(name) for name in ("left", "right")] == [None, None]
        wait_until(lambda: second.send(make_frame(0, "left")) and subscriber.take(20))
        assert subscriber.names.silent_s("left") is not None


A, B = "tcp://a:1", "tcp://b:1"


@pytest.mark.parametrize(
    ("cameras", "expected"),
    [
        ({"one": (A, False), "two": (B, False)}, None),
        ({"one": (A, True), "two": (B, False)}, None),  # B has its share: it may replace only its own
        ({"one": (A, True), "two": (B, True)}, "two"),
        ({"one": (A, False), "two": (A, False)}, "one"),  # B has less than its share, and A has more
        ({"one": (A, False), "two": (A, True)}, "two"),
        ({"one": (A, True)}, "one"),  # a single place goes to who sends
        ({"one": (A, False)}, None),
    ],
)
def test_places_are_shared_by_endpoint(cameras: dict[str, tuple[str, bool]], expected: str | None) -> None:
    assert choose_replaced(cameras, B, 1) == expected
