"""What a robot's programs do beside tracking, for a long run: joints, exemplars, clicks on past frames, and spans.

cam0 plays the bundled recording, and sends the joints of its robot, whose pixels the node draws. A policy shows
exemplars, on frames and on photos, clicks on frames of the last seconds, and searches for everything. A collector takes
the node's spans.
"""

import random
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import cv2
import numpy as np

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.client import PerceptionClient
from sam3_node.errors import Sam3NodeError
from tests.support.tiny_detectors import write_tiny_sam3

CAMERA = "cam0"
SOURCE = "scene:tabletop"
NAMES = ("washer", "bolt", "nut")
"""Names of exemplars. A name is forgotten when prompts without it are set."""
SIZE = (640, 480)
"""Width and height of the recording's frames."""
PHOTO_SIDE = 320
"""Side of a photo, pixels."""
PAST_FRAMES = 20
"""Frames back from the newest, among which a click chooses one."""
EVERY = 10
"""Frames from one detection to the next."""


def make_settings(folder: Path, joints: str, collector: str) -> dict[str, str]:
    """Return the environment of the node and of cam0. The detector's weights, tiny and random, go to `folder`."""
    detector = folder / "detector"
    write_tiny_sam3(detector)
    return {
        "SAM3_CAMERA__LOOP": "true",
        "SAM3_CAMERA__ROBOT": joints,
        "SAM3_SPATIAL__POSES": joints,
        "SAM3_SPATIAL__CALIBRATION": str(TABLETOP.with_suffix(".toml")),
        "SAM3_ROBOT__URDF": str(TABLETOP.with_suffix(".urdf")),
        "SAM3_ROBOT__BASE": "camera",
        "SAM3_DETECTOR__KIND": "sam3-concept",
        "SAM3_DETECTOR__NAME": str(detector),
        "SAM3_DETECTOR__EVERY": str(EVERY),
        "SAM3_DETECTOR__SCORE": "0.02",
        "SAM3_MONITORING__OTLP_ENDPOINT": collector,
    }


class Collector:
    """An OpenTelemetry collector on loopback, which takes spans and forgets them."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Spans)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """URL of the collector."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Spans(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read what was sent, and answer that it was taken."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Visitor(threading.Thread):
    """A thread that shows exemplars, clicks on past frames, and searches for everything. It begins at once."""

    def __init__(self, client: PerceptionClient, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._chance = chance
        self._over = threading.Event()
        self.done = 0
        """Requests that the node has carried out."""
        self.refused: deque[str] = deque(maxlen=100)
        """The newest errors."""
        self.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Do one thing after the other until the end."""
        actions = (
            self._show_on_frame,
            self._show_on_photo,
            self._click,
            self._click,
            self._search,
            self._forget,
        )
        while not self._over.wait(self._chance.uniform(0.3, 1.5)):
            # a node that restarts, a frame that is too old, too many exemplars
            try:
                self._chance.choice(actions)()
                self.done += 1
            except Sam3NodeError as error:
                self.refused.append(str(error))

    def _choose_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        x = self._chance.uniform(0, 0.7 * width)
        y = self._chance.uniform(0, 0.7 * height)
        return x, y, x + 0.25 * width, y + 0.25 * height

    def _choose_seq(self) -> int:
        # a node that has just restarted knows no camera and no frame yet
        newest = self._client.status()["cameras"].get(CAMERA, {}).get("last_seq") or 0
        return max(0, newest - self._chance.randrange(PAST_FRAMES))

    def _show_on_frame(self) -> None:
        name = self._chance.choice(NAMES)
        self._client.add_exemplar(name, [self._choose_box(*SIZE)], camera=CAMERA, seq=self._choose_seq())

    def _show_on_photo(self) -> None:
        name = self._chance.choice(NAMES)
        pixels = np.frombuffer(self._chance.randbytes(PHOTO_SIDE * PHOTO_SIDE * 3), np.uint8)
        photo = cv2.imencode(".png", pixels.reshape(PHOTO_SIDE, PHOTO_SIDE, 3))[1].tobytes()
        self._client.add_exemplar(name, [self._choose_box(PHOTO_SIDE, PHOTO_SIDE)], text=name, photo=photo)

    def _click(self) -> None:
        place = [(self._chance.uniform(0, SIZE[0]), self._chance.uniform(0, SIZE[1]))]
        self._client.segment(points=place, camera=CAMERA, seq=self._choose_seq())

    def _search(self) -> None:
        self._client.segment_everything(camera=CAMERA, seq=self._choose_seq(), grid=8)

    def _forget(self) -> None:
        self._client.set_prompts([self._chance.choice(NAMES)])
