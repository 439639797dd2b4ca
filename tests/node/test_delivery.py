"""Lossless delivery, failures that nobody foresaw, and cameras that fall silent."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import zmq

from sam3_node.errors import DeviceError
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.transport import ControlClient, FramePublisher, MaskSubscriber
from sam3_node.types import MaskFrame
from tests.support.near_node import NearNode
from tests.support.node_frames import picture
from tests.support.node_rig import Process, Rig, until
from tests.support.refuses import refuses


def endpoints(folder: Path) -> list[str]:
    return [f"ipc://{folder}/{name}" for name in "fmc"]


def lossless_node(rig: Rig, folder: Path) -> Process:
    names = ("TRANSPORT__FRAMES", "TRANSPORT__MASKS", "TRANSPORT__CONTROL")
    return rig.node(**dict(zip(names, endpoints(folder), strict=True)), TRANSPORT__DELIVERY="every")


def test_lossless_delivery_keeps_every_frame_and_still_ends(rig: Rig, tmp_path: Path) -> None:
    (frames, masks_at, _), count = endpoints(tmp_path), 40
    with FramePublisher(frames, "every") as camera:
        node = lossless_node(rig, tmp_path)
        with MaskSubscriber(masks_at, "every") as masks:
            found: list[MaskFrame | None] = []
            for seq in range(count):
                while not camera.send(picture(seq), timeout_ms=100):
                    found.append(masks.take(timeout_ms=100))
            found += iter(lambda: masks.take(timeout_ms=1500), None)
        got = [item for item in found if item is not None]
        assert [(item.seq, item.skipped) for item in got] == [(seq, 0) for seq in range(count)]
        camera.send(picture(count), timeout_ms=1000)
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(timeout=120) == 0


def test_lossless_delivery_ends_in_time_though_its_reader_hangs(rig: Rig, tmp_path: Path) -> None:
    frames, masks_at, control = endpoints(tmp_path)
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as reader,
        FramePublisher(frames, "every") as camera,
    ):
        reader.linger, reader.rcvhwm = 0, 1
        reader.connect(masks_at)
        node = lossless_node(rig, tmp_path)
        assert camera.send(picture(0), timeout_ms=10_000)
        with ControlClient(control, timeout_ms=10_000) as asker:
            until(lambda: asker.call("status")["cameras"], "the camera is served")
            for _ in range(16):  # large messages fill what the operating system holds back
                asker.call("add_object", points=[[32, 24]], label="\u20ac" * 256)
        seqs = itertools.count(1)
        while camera.send(picture(next(seqs)), timeout_ms=1000):
            pass
        assert node.terminate() == 0
        # libzmq would wait for the reader without end; what it has not taken by then is lost
        assert "dropped: no subscriber receives them" in node.log.read_text()
        camera.close(0)


@pytest.fixture
def near(rig: Rig, tmp_path: Path) -> Iterator[NearNode]:
    """Start a node for one camera in this process, so that tests can inject faults."""
    with ExitStack() as opened:
        yield NearNode(tmp_path, opened, rig.folder / "tiny", tracker=TrackerSettings(max_cameras=1))


def test_an_unforeseen_failure_is_counted_and_logged(
    near: NearNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    near.send()
    with monkeypatch.context() as fault:
        fault.setattr(Pipeline, "step", fail)
        until(lambda: near.next_masks() or near.status()["cameras"]["cam1"]["failed"], "a failure")
    near.send()
    assert "RuntimeError: out of memory" in near.status()["cameras"]["cam1"]["last_error"]
    assert "Traceback" in caplog.text


def fail_on_the_device(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")


@pytest.mark.parametrize("failing", ["step", "add"])
def test_a_lost_gpu_ends_the_node_with_the_reason(
    near: NearNode, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """No later frame could succeed, and a supervisor starts processes again that end with an error."""
    near.send()
    monkeypatch.setattr(Pipeline, failing, fail_on_the_device)
    if failing == "add":
        with refuses(DeviceError, field=("memory", "access")):
            near.client.call("add_object", points=[(5, 5)])
    until(lambda: (near.next_masks(), not near.loop.is_alive())[1], "the end")
    assert re.search("GPU has failed.*AcceleratorError: CUDA error: an illegal.*;", str(near.error))


def test_a_silent_camera_gives_its_place_to_another(near: NearNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def receives_masks(name: str, also: str = "") -> bool:
        for seq, sender in enumerate(filter(None, (name, also))):
            near.camera.send(picture(seq, sender))
        masks = near.masks.take(timeout_ms=50)
        return masks is not None and masks.camera == name

    served = near.node.perception.pipelines
    until(lambda: receives_masks("first"), "the first camera")
    until(lambda: receives_masks("first", "second") and near.status()["frames_rejected"], "a refused camera")
    assert list(served) == ["first"]
    monkeypatch.setattr("sam3_node.transport.receiver.CAMERA_IDLE_S", 0.05)
    until(lambda: receives_masks("second"), "the second camera")
    assert list(served) == ["second"]
