"""The page for writers of cameras and robots: its senders run without the package, and its refusals are the node's."""

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import msgpack
import numpy as np
import pytest

from sam3_node.errors import WireError
from sam3_node.transport import FrameSubscriber
from sam3_node.transport.tap import PoseSubscriber
from sam3_node.types import FramePose, Intrinsics, JointState
from sam3_node.wire import decode_depth, decode_image, unpack_frame
from tests.support.node_rig import Rig, until
from tests.support.pages import block_with, shown
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import mentions

PAGE = "docs/own-camera.md"
MAX_LINES = 20
"""Lines of a sender, so that it is read before it is copied."""
ALONE = "import sys\nsys.modules['sam3_node'] = None\n"
"""Start of a program that cannot import the package."""
REPEATED = """
import itertools, time
import numpy as np
colour = np.full((48, 64, 3), (1, 2, 3), np.uint8)
depth = np.full((48, 64), 500)
lens = {'fx': 60.0, 'fy': 60.0, 'cx': 31.5, 'cy': 23.5, 'model': 'none'}
def images():
    for number in itertools.count():
        time.sleep(0.02)
        yield time.time_ns(), colour, depth if number % 2 else None
def states():
    while True:
        time.sleep(0.02)
        yield time.time_ns(), (0.1, 0.2, 0.3), (0.0, 0.0, 0.0, 1.0), None
        yield time.time_ns(), None, None, {'elbow': 0.5}
"""
HEADER: dict[str, Any] = {
    "v": 1,
    "kind": "frame",
    "camera": "cam0",
    "seq": 0,
    "capture_ns": 1,
    "clock": "system",
    "sent_ns": 0,
    "width": 640,
    "height": 480,
    "encoding": "bgr8",
}
"""Header of a frame that is accepted."""
COLOUR = bytes(640 * 480 * 3)


def refusals() -> list[tuple[str, str]]:
    """Return (change of the header, what the page says of it) for each row of the table of refusals."""
    rows = re.findall(r"^\| `(\{.*\})`[^|]* \| ([a-z]+: .*) \|$", shown(ROOT / PAGE), flags=re.MULTILINE)
    assert len(rows) >= 6
    return rows


@contextmanager
def running(program: str) -> Iterator[None]:
    """Run Python code that does not end in a process of its own, and kill it at the end."""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        yield
        assert process.poll() is None, process.communicate()[1]
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("sender", ["send_frames", "send_robot"])
def test_a_sender_is_short(sender: str) -> None:
    (function,) = [
        item
        for item in ast.parse(block_with(PAGE, f"def {sender}(")).body
        if isinstance(item, ast.FunctionDef)
    ]
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno < MAX_LINES


def test_the_sender_of_frames_is_read_by_the_node(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/frames"
    program = (
        f"{ALONE}{block_with(PAGE, 'def send_frames(')}{REPEATED}send_frames({endpoint!r}, images(), lens)"
    )
    with running(program), FrameSubscriber([endpoint]) as subscriber:
        taken = [subscriber.take(timeout_ms=PATIENCE_MS) for _ in range(12)]
        assert not subscriber.refused
    frames = [item.frame for item in taken if item is not None]
    with_depth = next(frame for frame in frames if frame.depth is not None)
    assert any(frame.depth is None for frame in frames)
    assert (with_depth.camera, with_depth.clock) == ("cam0", "system")
    assert with_depth.intrinsics == Intrinsics(60.0, 60.0, 31.5, 23.5)
    assert np.array_equal(decode_image(with_depth)[0, 0], (1, 2, 3))
    assert decode_depth(with_depth.depth).max() * with_depth.depth.scale_m == pytest.approx(0.5)


def test_the_example_of_a_webcam_yields_images_until_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.zeros((4, 6, 3), np.uint8)
    capture = SimpleNamespace(read=iter([(True, image), (True, image), (False, None)]).__next__)
    monkeypatch.setattr(cv2, "VideoCapture", lambda index: capture)
    sent: dict[str, list[Any]] = {}
    space = {"time": time, "send_frames": lambda endpoint, images: sent.update({endpoint: list(images)})}
    exec(block_with(PAGE, "def webcam("), space)
    (images,) = sent.values()
    assert [colour.shape for _, colour, _ in images] == [image.shape] * 2
    assert images[0][0] <= images[1][0] <= time.time_ns()


def test_the_sender_of_poses_and_joints_is_read_by_the_node(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/robot"
    program = f"{ALONE}{block_with(PAGE, 'def send_robot(')}{REPEATED}send_robot({endpoint!r}, states())"
    found: dict[type, Any] = {}
    with running(program), PoseSubscriber(endpoint, [b"pose/gripper", b"joints/robot"]) as subscriber:

        def both() -> bool:
            found.update({type(message): message for message in subscriber.take(timeout_ms=200)})
            return len(found) == 2

        until(both, "a pose and joints")
        assert subscriber.rejected == 0
    pose = found[FramePose]
    assert (pose.frame, pose.parent, pose.position_m) == ("gripper", "base", (0.1, 0.2, 0.3))
    assert found[JointState].positions == {"elbow": 0.5}


@pytest.mark.parametrize(("change", "told"), refusals(), ids=lambda value: value[:40])
def test_a_refused_frame_says_what_the_page_says(change: str, told: str) -> None:
    parts = [b"frame/cam0", msgpack.packb(HEADER), COLOUR]
    assert unpack_frame(parts).seq == 0
    parts[1] = msgpack.packb(HEADER | ast.literal_eval(change))
    with pytest.raises(WireError) as refused:
        unpack_frame(parts)
    assert str(refused.value) == told


def test_a_node_shows_the_refusal_where_the_page_says(tmp_path: Path) -> None:
    sender = block_with(PAGE, "def send_frames(").replace('"encoding": "bgr8"', '"encoding": "bgr"')
    with Rig(tmp_path) as rig:
        node = rig.node()
        with (
            running(f"{ALONE}{sender}{REPEATED}send_frames({rig.frames[0]!r}, images())"),
            rig.client() as client,
        ):
            until(lambda: "cam0" in client.status()["frames_refused"], "a refusal")
            assert mentions(client.diagnosis(), "cam0", rig.frames[0], "bgr8", "own-camera.md")
            assert mentions(node.log.read_text(), "cam0", "bgr8")
        sender = block_with(PAGE, "def send_frames(")
        with (
            running(f"{ALONE}{sender}{REPEATED}send_frames({rig.frames[0]!r}, images())"),
            rig.client() as client,
        ):
            assert client.wait_for_camera(PATIENCE_MS) == "cam0"
