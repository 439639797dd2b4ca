"""Tests of the live source and of the messages to the page, with real sockets and without a browser."""

import json
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.console.views import FrameView, LiveViews, pack_view
from sam3_node.settings import Settings
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire import Event, Reply, Request, unpack_masks
from tests.support.node_rig import until
from tests.support.wire_examples import golden

SIZE = (24, 32)
STATIC = Path(__file__).parents[2] / "sam3_node/console/static"
CASES = Path(__file__).with_name("page_tests.js")


def frame(seq: int, camera: str = "cam0") -> Frame:
    pixels = np.full((*SIZE, 3), seq % 256, np.uint8).tobytes()
    return Frame(camera, seq, 1000 + seq, SIZE[1], SIZE[0], "bgr8", pixels)


def masks(seq: int, camera: str = "cam0") -> MaskFrame:
    crop = np.ones((4, 5), np.bool_)
    instance = Instance(1, "thing", 0.5, "tracked", 1, 0, Mask(SIZE, (2, 3, 7, 7), crop))
    return MaskFrame(camera, seq, 1000 + seq, SIZE[1], SIZE[0], instances=(instance,))


WARM_UP = "warm-up"
"""Camera by whose first frame and masks `Peers` knows that both subscriptions have come."""


class Peers:
    """A camera and a node as far as a subscriber sees them, and the source that hears them."""

    def __init__(self, folder: Path) -> None:
        names = {name: f"ipc://{folder}/{name}" for name in ("frames", "masks", "control")}
        self.camera = FramePublisher(names["frames"])
        self.node = MaskPublisher(names["masks"])
        transport = {"frames": (names["frames"],), "masks": names["masks"], "control": names["control"]}
        self.source = LiveViews(Settings(transport=transport), lambda: None)  # type: ignore[arg-type]
        # a publisher drops what it sends before the subscription has come, and when its queue is full
        heard = lambda: self.source.next_view({})  # noqa: E731
        until(lambda: self._send(self.camera, frame(0, WARM_UP)) and heard(), "a first frame")
        until(lambda: self._send(self.node, masks(0, WARM_UP)) and heard().masks, "its masks")

    @staticmethod
    def _send(publisher: FramePublisher | MaskPublisher, message: Any) -> bool:
        """Send a message after a pause, in which the source empties the queue."""
        time.sleep(0.02)
        return publisher.send(message)

    def newer(self, seen: dict[str, int]) -> FrameView | None:
        """Return the next view of a camera of the test; None if there is no newer one."""
        view = self.source.next_view(seen)
        return self.source.next_view(seen) if view is not None and view.camera == WARM_UP else view

    def next(self, seen: dict[str, int]) -> FrameView:
        return until(lambda: self.newer(seen), "a view")

    def close(self) -> None:
        for owner in (self.source, self.camera, self.node):
            owner.close()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    found = Peers(tmp_path)
    yield found
    found.close()


def test_masks_are_paired_with_exactly_their_frame(peers: Peers) -> None:
    seen: dict[str, int] = {}
    for seq in range(4):
        peers.camera.send(frame(seq))
        assert peers.next(seen).masks is None  # a live picture, until masks come
    peers.node.send(masks(1))
    view = peers.next(seen)
    assert (view.masks.seq, view.frame.seq) == (1, 1)


def test_masks_that_overtake_their_frame_wait_for_it(peers: Peers) -> None:
    peers.node.send(masks(7))
    peers.node.send_event(Event(0, "pause"))  # comes after the masks, on the same connection
    until(lambda: peers.source.state()["events"], "the event behind the masks")
    assert peers.newer({}) is None
    peers.camera.send(frame(7))
    view = peers.next({})
    assert view.seq == 7
    assert view.masks is not None


def test_a_slow_page_gets_the_newest_view_and_no_older_one(peers: Peers) -> None:
    seen: dict[str, int] = {}
    for seq in range(50):
        peers.camera.send(frame(seq))
        peers.node.send(masks(seq))
        until(lambda seq=seq: (view := peers.newer({})) and view.masks and view.seq == seq, "a pair")
    assert peers.next(seen).seq == 49
    assert peers.newer(seen) is None
    peers.camera.send(frame(50))
    peers.node.send(masks(50))
    assert peers.next(seen).seq == 50


def test_cameras_take_turns(peers: Peers) -> None:
    for camera in ("left", "right"):
        peers.camera.send(frame(0, camera))
    seen: dict[str, int] = {}
    assert {peers.next(seen).camera, peers.next(seen).camera} == {"left", "right"}


def test_events_are_listed_without_masks(peers: Peers) -> None:
    peers.node.send_event(Event(0, "add_object", {"camera": "cam0", "label": "mug", "mask": {"data": b""}}))
    (event,) = until(lambda: peers.source.state()["events"], "the event")
    assert (event["op"], event["label"], "mask" in event) == ("add_object", "mug", False)


def test_lost_objects_are_listed_those_first_that_were_seen_last(tmp_path: Path) -> None:
    place = {"camera": "cam0", "epoch": 1, "id": 1, "label": "mug", "state": "tracked", "in_view": True}
    lost = place | {"id": 2, "state": "lost", "in_view": False, "age_s": 12.5, "has_picture": True}
    replies = {"where": {"objects": [place, lost]}, "status": {"paused": False, "cameras": {}}}
    endpoint = f"ipc://{tmp_path}/control"
    transport = {
        "masks": f"ipc://{tmp_path}/masks",
        "frames": (f"ipc://{tmp_path}/frames",),
        "control": endpoint,
    }

    def answer(request: Request) -> Reply:
        return Reply(request.id, replies.get(request.op, {"settings": {"transport": transport}}))

    transport["delivery"] = "newest"
    settings = Settings(transport=transport)  # type: ignore[arg-type]
    with ControlServer(endpoint, answer), LiveViews(settings, lambda: None) as source:
        (found,) = until(lambda: source.state()["lost"], "the lost object")
    assert (found.id, found.age_s, found.has_picture) == (2, 12.5, True)


@pytest.fixture(scope="module")
def blank(browser: Any) -> Iterator[Any]:
    """A page that finds the console's modules and the cases for them at its own address."""
    page = browser.new_page()

    def serve(route: Any) -> None:
        name = route.request.url.split("/")[-1]
        if name == "blank.html":
            route.fulfill(content_type="text/html", body="<!doctype html><title>blank</title>")
            return
        route.fulfill(path=CASES if name == CASES.name else STATIC / name)

    page.route("http://console.test/*", serve)
    yield page
    page.close()


@pytest.fixture
def modules(blank: Any) -> Any:
    """The page without content, and with no module imported yet."""
    blank.goto("http://console.test/blank.html")
    return blank


@pytest.mark.parametrize("case", re.findall(r"export async function (\w+)", CASES.read_text()))
def test_a_module_of_the_page(modules: Any, case: str) -> None:
    modules.evaluate("async (case_) => (await import('http://console.test/page_tests.js'))[case_]()", case)


@pytest.mark.parametrize("name", ["bits", "rle"])
def test_the_page_reads_the_bits_of_the_golden_files(modules: Any, name: str) -> None:
    found = unpack_masks(golden(f"masks-{name}"))
    inside = modules.evaluate(
        """async (bytes) => {
            const { parseView, isInside } = await import("http://console.test/wire.js");
            const view = parseView(new Uint8Array(bytes).buffer);
            return view.masks.instances.map((instance) => Array.from({length: view.height}, (_, y) =>
                Array.from({length: view.width}, (_, x) => isInside(instance, x, y))));
        }""",
        list(pack_view(FrameView(None, found), live=True)),
    )
    assert inside == [item.mask.full().tolist() for item in found.instances]


def test_a_message_holds_picture_and_bits_after_its_header() -> None:
    view = FrameView(frame(3), replace(masks(3), received_ns=1))
    message = pack_view(view, live=True)
    (length,) = struct.unpack_from("<I", message)
    header = json.loads(message[4 : 4 + length])
    assert header["image"]["type"] == "image/jpeg"
    assert message[4 + length :][:2] == b"\xff\xd8"
    assert len(message) == 4 + length + header["image"]["bytes"] + header["masks"]["instances"][0]["bytes"]
    assert header["origin_ms"] == 1003 / 1e6
