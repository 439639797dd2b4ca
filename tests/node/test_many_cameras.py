"""Four cameras at one node: each is served though one floods, and status says how they lie in time."""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from sam3_node.transport import FramePublisher
from sam3_node.transport.tap import StreamTap
from sam3_node.types import MaskFrame
from sam3_node.wire import unpack_masks
from tests.support.node_rig import Rig, picture, until
from tests.support.repeats import repetitions
from tests.support.threads import repeating

NAMES = ("front", "left", "right", "wrist")
FRAMES = repetitions(10, 50)


class FourCameras:
    """The publishers of four cameras, and a reader that gets all masks of their node in order."""

    def __init__(self, publishers: dict[str, FramePublisher], tap: StreamTap) -> None:
        self.publishers = publishers
        self._tap = tap
        self._seqs = {name: itertools.count() for name in publishers}
        self.masks: dict[str, list[MaskFrame]] = defaultdict(list)

    def send(self, name: str) -> int:
        """Publish the camera's next frame. Return its seq."""
        frame = picture(next(self._seqs[name]), name)
        self.publishers[name].send(frame)
        return frame.seq

    def read(self, timeout_ms: int = 0) -> bool:
        """Keep the masks that have arrived. Return True, so that conditions can call it."""
        message = self._tap.take(timeout_ms)
        while message is not None:
            if bytes(message.parts[0]).startswith(b"masks/"):
                masks = unpack_masks(message.parts)
                self.masks[masks.camera].append(masks)
            message = self._tap.take(0)
        return True

    def serve_in_turn(self, names: tuple[str, ...], frames: int) -> None:
        """Let each camera send its next frame when it has the masks of its last one, until each has sent `frames`."""
        last = {name: self.send(name) for name in names}
        sent = dict.fromkeys(names, 1)

        def all_answered() -> bool:
            self.read(timeout_ms=20)
            waiting = [name for name in names if not self._has(name, last[name])]
            for name in names:
                if name not in waiting and sent[name] < frames:
                    last[name] = self.send(name)
                    sent[name] = sent[name] + 1
                    waiting.append(name)
            return not waiting

        until(all_answered, "the masks of each frame")

    def _has(self, name: str, seq: int) -> bool:
        return any(masks.seq == seq for masks in self.masks[name][-1:])

    @contextmanager
    def flood(self, name: str) -> Iterator[None]:
        """Publish frames of one camera as fast as it can in a thread; wait until later ones are served again."""
        with repeating(lambda: self.send(name)):
            yield
        first = self.send(name)  # lost if queues are still full
        until(
            lambda: self.send(name) and self.read(50) and self.masks[name][-1].seq >= first,
            "masks of a frame after the flood",
        )


@pytest.fixture(scope="module")
def cameras(rig: Rig) -> Iterator[FourCameras]:
    endpoints = {name: f"ipc://{rig.folder}/{name}" for name in NAMES}
    # a frame that waits for a busy machine is stepped nevertheless
    rig.node(TRANSPORT__FRAMES=",".join(endpoints.values()), TRACKER__MAX_AGE_MS="0")
    with ExitStack() as stack:
        publishers = {name: stack.enter_context(FramePublisher(at)) for name, at in endpoints.items()}
        tap = stack.enter_context(StreamTap([f"ipc://{rig.folder}/nobody"], rig.masks, (), 1 << 24))
        four = FourCameras(publishers, tap)
        for name in NAMES:
            until(lambda: four.send(name) >= 0 and four.read(50) and four.masks[name], f"masks of {name}")  # noqa: B023
        yield four


def test_each_of_four_cameras_is_served(cameras: FourCameras) -> None:
    before = {name: len(cameras.masks[name]) for name in NAMES}
    cameras.serve_in_turn(NAMES, FRAMES)
    assert all(len(cameras.masks[name]) >= before[name] + FRAMES for name in NAMES)


def test_a_flooding_camera_takes_nothing_from_the_others(cameras: FourCameras, rig: Rig) -> None:
    flooding, *others = NAMES
    cameras.masks.clear()
    with cameras.flood(flooding):
        until(lambda: cameras.read(50) and cameras.masks[flooding], "masks of the flooding camera")
        cameras.serve_in_turn(tuple(others), FRAMES)
    published_ns = [masks.published_ns for masks in cameras.masks[flooding]]
    waited = [masks for name in others for masks in cameras.masks[name]]
    assert len(waited) >= FRAMES * len(others)
    # while a frame of another camera waits, the flooding camera has one step at most; a second one if the frame
    # arrived just before the first one began
    passed = sum(
        masks.received_ns < stamp_ns < masks.published_ns for masks in waited for stamp_ns in published_ns
    )
    assert passed <= 2 * len(waited)
    with rig.client() as client:
        assert client.status()["cameras"][flooding]["skipped"] > 0


def test_status_says_how_the_cameras_lie_in_time(cameras: FourCameras, rig: Rig) -> None:
    cameras.serve_in_turn(NAMES, 2)
    captured_ns = {name: cameras.masks[name][-1].capture_ns for name in NAMES}
    newest_ns = max(captured_ns.values())
    asked_ns = time.time_ns()
    with rig.client() as client:
        status = client.status()["cameras"]
    for name in NAMES:
        found = status[name]
        assert found["offset_ms"] == pytest.approx((captured_ns[name] - newest_ns) / 1e6, abs=0.001)
        assert found["masks_age_ms"] >= (asked_ns - captured_ns[name]) / 1e6 - 0.001
        assert found["arrival_p50_ms"] > 0
    assert max(found["offset_ms"] for found in status.values()) == 0
