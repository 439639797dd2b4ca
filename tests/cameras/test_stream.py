"""Streams of the network: a server of MJPEG on this machine, whose end is a lost camera."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np
import pytest

from sam3_node.cameras.sources import open_camera
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings


class Server:
    """A network camera that sends images of rising grey, `count` on each connection."""

    def __init__(self, count: int) -> None:
        self.connections = itertools.count()
        camera = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                start = next(camera.connections) * 100
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=image")
                self.end_headers()
                for index in range(count):
                    grey = np.full((48, 64, 3), (start + index) % 250, np.uint8)
                    data = cv2.imencode(".jpg", grey)[1].tobytes()
                    head = f"--image\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                    try:
                        self.wfile.write(head.encode() + data + b"\r\n")
                    except OSError:
                        return
                    time.sleep(0.01)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def uri(self) -> str:
        return f"http://user:secret@127.0.0.1:{self.server.server_port}/video.mjpg"


@pytest.fixture
def server() -> Iterator[Server]:
    camera = Server(20)
    yield camera
    camera.server.shutdown()
    camera.server.server_close()


def test_a_stream_is_read_and_connected_again_after_its_end(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_camera(server.uri, CameraSettings())
    images = iter(source)
    assert next(images).image.shape == (48, 64, 3)
    while next(images).image.mean() < 90:  # from the second connection on
        pass
    source.close()
    assert not source.is_finite
    assert (
        f"http://127.0.0.1:{server.server.server_port}/video.mjpg: no image; opening it again" in caplog.text
    )
    assert "secret" not in caplog.text + source.name


def test_a_stream_that_is_absent_is_a_camera_error_without_the_password() -> None:
    with pytest.raises(CameraError, match="expected a video stream, found none; check that") as raised:
        open_camera("rtsp://user:secret@127.0.0.1:1/front", CameraSettings())
    assert "rtsp://127.0.0.1:1/front" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_an_address_without_a_host_is_no_stream() -> None:
    with pytest.raises(CameraError, match="as a camera source"):
        open_camera("rtsp:front", CameraSettings())
