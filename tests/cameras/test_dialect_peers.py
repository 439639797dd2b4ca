"""Sources of camera.dialect against the servers of their own projects, each in a process of its own.

They run where the packages can be imported: imagezmq and lerobot (`pip install --no-deps`), and a checkout of
NVlabs/GR00T-WholeBodyControl.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from sam3_node.wire import decode_depth
from tests.support.camera_servers import RED, image_where, opened

SIZE = (48, 64)
DRAW = f"""
import sys, time
import cv2, numpy as np, zmq
RED = np.full(({SIZE[0]}, {SIZE[1]}, 3), {RED}, np.uint8)  # BGR
def announce(socket):
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT).replace("0.0.0.0", "127.0.0.1"), flush=True)
"""
IMAGEZMQ = """
import imagezmq
address, kind = sys.argv[1:]
sender = imagezmq.ImageSender(address, REQ_REP=kind == "hub")
if kind == "pub":
    announce(sender.zmq_socket)
jpg = cv2.imencode(".jpg", RED)[1].tobytes()
while True:
    answers = [sender.send_image("raw", RED), sender.send_jpg("jpg", jpg)]
    assert answers == ([b"OK"] * 2 if kind == "hub" else [None] * 2), answers
    time.sleep(0.01)
"""
# lerobot's own camera reads a capture device that is drawn here
LEROBOT = """
from lerobot.cameras.zmq import image_server
class Capture:
    def __init__(self, *_): self.values = {}
    def isOpened(self): return True
    def set(self, key, value): self.values[key] = value; return True
    def get(self, key): return self.values.get(key, 0.0)
    def read(self): time.sleep(0.01); return True, RED
    def release(self): ...
cv2.VideoCapture = Capture
cameras = {name: {"device_id": i, "shape": RED.shape[:2]} for i, name in enumerate(("head_camera", "wrist"))}
server = image_server.ImageServer({"fps": 50, "cameras": cameras}, port=0)
announce(server.socket)
server.run()
"""
GROOT = """
from gear_sonic.camera.sensor_server import ImageMessageSchema, SensorServer
server = SensorServer()
server.start_server(0)
announce(server.socket)
jpg = cv2.imencode(".jpg", RED)[1].tobytes()
depth = np.full(RED.shape[:2], 0.75, np.float32)
while True:
    stamps = {"ego_view": time.time() - 0.2, "left_wrist": time.monotonic()}
    images = {"ego_view": RED[:, :, ::-1], "left_wrist": jpg, "ego_view_depth": depth}
    server.send_message(ImageMessageSchema(timestamps=stamps, images=images).serialize())
    time.sleep(0.01)
"""


@contextmanager
def peer(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DRAW + program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_endpoint(process: subprocess.Popen[str]) -> str:
    """Return the address that the server prints; other lines of it are skipped."""
    return next(line.strip() for line in process.stdout if line.startswith("tcp://"))


def is_red(image: np.ndarray) -> bool:
    return image.shape == (*SIZE, 3) and bool(np.abs(image.astype(int) - RED).max() <= 2)


@pytest.mark.verifies("stream", "imagezmq, PUB/SUB and REQ/REP", "own package", "imagezmq sends")
def test_imagezmq_in_pub_sub_mode() -> None:
    pytest.importorskip("imagezmq")
    server = peer(IMAGEZMQ, "tcp://127.0.0.1:0", "pub")
    with server as process, opened(read_endpoint(process), "imagezmq") as source:
        for camera in ("raw", "jpg"):
            assert is_red(image_where(source, lambda image, name=camera: image.camera == name).pixels())
        assert source.counts.rejected == 0


def test_imagezmq_in_req_rep_mode() -> None:
    pytest.importorskip("imagezmq")
    with opened("tcp://127.0.0.1:0", "imagezmq-hub") as source, peer(IMAGEZMQ, source.endpoint, "hub"):
        for camera in ("raw", "jpg") * 3:
            assert is_red(image_where(source, lambda image, name=camera: image.camera == name).pixels())
        assert source.counts.rejected == 0


@pytest.mark.verifies(
    "stream", "lerobot's `ImageServer`", "own package", "lerobot 0.4.4 sends", "servers of later versions"
)
def test_lerobots_image_server() -> None:
    pytest.importorskip("lerobot.cameras.zmq.image_server", exc_type=ImportError)
    before_ns = time.time_ns()
    with peer(LEROBOT) as process, opened(read_endpoint(process), "lerobot") as source:
        for camera in ("head_camera", "wrist"):
            image = image_where(source, lambda image, name=camera: image.camera == name)
            assert is_red(image.pixels())
            assert before_ns < image.capture_ns < image.times["arrival_ns"]
        assert source.counts.rejected == 0


@pytest.mark.verifies(
    "stream", "GR00T's camera server", "own package", "its sensor server of August 2026 sends"
)
def test_groots_sensor_server(caplog: pytest.LogCaptureFixture) -> None:
    if importlib.util.find_spec("gear_sonic") is None:
        pytest.skip("needs a checkout of GR00T-WholeBodyControl and msgpack_numpy")
    with peer(GROOT) as process, opened(read_endpoint(process), "groot") as source:
        ego = image_where(source, lambda image: image.camera == "ego_view")
        wrist = image_where(source, lambda image: image.camera == "left_wrist")
        assert source.counts.rejected == 0
    assert is_red(ego.pixels())
    assert is_red(wrist.pixels())
    assert set(source._cameras) == {"ego_view", "left_wrist"}
    depth = ego.depth
    # older servers send it as a JPEG, which is left out
    assert depth is None or np.all(decode_depth(depth) == 750)
    assert ego.times["arrival_ns"] - ego.capture_ns >= 0.2e9
    assert 0 <= wrist.times["arrival_ns"] - wrist.capture_ns < 1e9
    assert "camera left_wrist: expected stamps in Unix seconds" in caplog.text
