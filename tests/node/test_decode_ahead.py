"""Decoding ahead changes when a frame is decoded, and nothing else."""

import queue
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sam3_node.errors import WireError
from sam3_node.models import load_tracker
from sam3_node.node import cameras as cameras_module
from sam3_node.node.cameras import DecodeAhead
from sam3_node.perception.perception import Perception
from sam3_node.perception.preparing import PreparedFrame, prepares_ahead
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import decode_image, encode_image
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.near_node import NearNode
from tests.support.node_rig import Rig, picture
from tests.support.patience import PATIENCE_MS, PATIENCE_S

FRAMES = 8


class Camera:
    """The frame that waits, as an inbox shows it, and the decoder's work."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[Frame] = queue.Queue()
        self.begun: queue.Queue[Frame] = queue.Queue()
        self.may_end = threading.Event()
        self.may_end.set()

    def peek(self, seen: Collection[Frame], timeout_ms: int) -> Frame | None:
        try:
            return self.waiting.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            return None

    def prepare(self, frame: Frame) -> PreparedFrame:
        self.begun.put(frame)
        assert self.may_end.wait(PATIENCE_S)
        if frame.encoding == "jpeg":
            raise WireError("not a picture")
        return PreparedFrame(frame, decode_image(frame), torch.zeros(1), None)


@pytest.fixture
def camera() -> Camera:
    return Camera()


@pytest.fixture
def ahead(camera: Camera) -> Iterator[DecodeAhead]:
    with DecodeAhead(camera.peek, camera.prepare) as started:
        yield started


def test_the_newest_frame_is_prepared_and_an_older_one_forgotten(camera: Camera, ahead: DecodeAhead) -> None:
    old = picture(1)
    new = picture(2)
    with ahead.during_step():
        for frame in (old, new):
            camera.waiting.put(frame)
            assert camera.begun.get(timeout=PATIENCE_S) is frame
    prepared = ahead.take(new)
    assert prepared.frame is new
    assert ahead.take(old) is None


def test_a_frame_in_work_is_waited_for(camera: Camera, ahead: DecodeAhead) -> None:
    frame = picture(1)
    taken = queue.Queue[PreparedFrame | None]()
    camera.may_end.clear()
    with ahead.during_step():
        camera.waiting.put(frame)
        camera.begun.get(timeout=PATIENCE_S)
    taker = threading.Thread(target=lambda: taken.put(ahead.take(frame)))
    taker.start()
    assert ahead.take(picture(2)) is None  # another frame does not wait
    camera.may_end.set()
    taker.join(PATIENCE_S)
    assert not taker.is_alive()


def test_a_frame_that_cannot_be_decoded_is_left_to_its_step(camera: Camera, ahead: DecodeAhead) -> None:
    broken = replace(picture(1), encoding="jpeg")
    sound = picture(2)
    with ahead.during_step():
        camera.waiting.put(broken)
        camera.begun.get(timeout=PATIENCE_S)
        assert ahead.take(broken) is None
        camera.waiting.put(sound)
        camera.begun.get(timeout=PATIENCE_S)
    assert ahead.take(sound) is not None


def test_with_slots_a_frame_of_each_camera_is_prepared(camera: Camera) -> None:
    frames = [picture(seq, name) for seq, name in enumerate(("left", "right", "left"))]
    with DecodeAhead(camera.peek, camera.prepare, slots=2) as ahead:
        with ahead.during_step():
            for frame in frames:
                camera.waiting.put(frame)
                assert camera.begun.get(timeout=PATIENCE_S) is frame
        old, right, left = frames
        assert ahead.take(right) is not None
        assert ahead.take(left) is not None
        assert ahead.take(old) is None


def test_nothing_is_decoded_ahead_without_a_step(camera: Camera, ahead: DecodeAhead) -> None:
    camera.waiting.put(picture(1))
    with pytest.raises(queue.Empty):
        camera.begun.get(timeout=0.2)


def test_a_cpu_keeps_its_cores_for_the_model(rig: Rig) -> None:
    assert not prepares_ahead(load_tracker(rig.folder / "tiny"))


def jpeg(seq: int) -> Frame:
    frame = picture(seq)
    return replace(frame, encoding="jpeg", colour=encode_image(decode_image(frame), "jpeg"))


def test_masks_of_a_node_that_decodes_ahead_equal_those_of_a_pipeline(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cameras_module, "prepares_ahead", lambda model: True)
    used: list[bool] = []
    take = DecodeAhead.take

    def count_use(ahead: DecodeAhead, frame: Frame) -> PreparedFrame | None:
        prepared = take(ahead, frame)
        used.append(prepared is not None)
        return prepared

    monkeypatch.setattr(DecodeAhead, "take", count_use)
    frames = [jpeg(seq) for seq in range(FRAMES)]
    with NearNode(tmp_path, rig.folder / "tiny", "every") as near:
        assert near.camera.send(frames[0], timeout_ms=PATIENCE_MS)
        answered = [near.masks.take(timeout_ms=PATIENCE_MS)]
        near.client.call("add_object", points=[[20.0, 20.0]], seq=0)
        for frame in frames[1:]:
            assert near.camera.send(frame, timeout_ms=PATIENCE_MS)
        answered += [near.masks.take(timeout_ms=PATIENCE_MS) for _ in frames[1:]]
    assert any(used)

    pipeline = Perception.load(near.settings).serve(frames[0].camera)
    expected = [pipeline.step(frames[0])]
    pipeline.add(FramePrompt(points=[(20.0, 20.0)]), seq=0)
    expected += [pipeline.step(frame) for frame in frames[1:]]
    assert [shown(masks) for masks in answered if masks is not None] == [shown(masks) for masks in expected]


def shown(masks: MaskFrame) -> object:
    """Return everything in masks that does not depend on time and on the node."""
    told = ((i, i.mask) for i in masks.instances)
    return masks.seq, [(i.id, i.score, i.state, i.confidence, m.box, m.crop.tobytes()) for i, m in told]
