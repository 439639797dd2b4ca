"""Camera servers of other projects: their messages, built from published layouts, and a publisher of such messages."""

import base64
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import cv2
import msgpack
import numpy as np
import zmq

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.server_source import ServerSource, open_server
from sam3_node.settings import CameraSettings
from sam3_node.types import Image
from tests.support.patience import PATIENCE_S
from tests.support.threads import repeating

PERIOD_S = 0.01
# BGR
RED = (0, 0, 255)
BLUE = (255, 0, 0)


def picture(colour: Sequence[int] = RED, size: tuple[int, int] = (48, 64)) -> Image:
    """Return an image of one colour (BGR) [h, w, 3]."""
    return np.full((*size, 3), colour, np.uint8)


def jpeg(image: Image) -> bytes:
    return cv2.imencode(".jpg", image)[1].tobytes()


def base64_jpeg(image: Image) -> str:
    """Encode a BGR image as the servers do: OpenCV's encoder gets RGB."""
    return base64.b64encode(jpeg(image[:, :, ::-1])).decode()


def base64_depth(depth: np.ndarray) -> dict[str, str]:
    """Encode depth uint16 [h, w] in millimetres as GR00T's server does."""
    data = cv2.imencode(".png", depth)[1].tobytes()
    return {"encoding": "uint16_mm_png", "data": base64.b64encode(data).decode()}


def groot(images: Mapping[str, Any], stamps: Mapping[str, Any] | None = None) -> list[bytes]:
    """Return a message of GR00T's whole-body camera server; `images` are its values."""
    return [msgpack.packb({"timestamps": dict(stamps or {}), "images": dict(images)}, use_bin_type=True)]


def lerobot(images: Mapping[str, Any], stamps: Mapping[str, Any] | None = None) -> list[bytes]:
    """Return a message of lerobot's ImageServer; `images` are its values."""
    return [json.dumps({"timestamps": dict(stamps or {}), "images": dict(images)}).encode()]


def imagezmq(name: Any, image: Image) -> list[bytes]:
    """Return a raw image of imagezmq."""
    header = {"msg": name, "dtype": str(image.dtype), "shape": image.shape}
    return [json.dumps(header).encode(), np.ascontiguousarray(image).tobytes()]


def imagezmq_jpeg(name: Any, image: Image) -> list[bytes]:
    """Return a JPEG of imagezmq."""
    return [json.dumps({"msg": name}).encode(), jpeg(image)]


def bare_jpeg(image: Image, topic: str | None = None) -> list[bytes]:
    """Return a JPEG alone, or after a topic."""
    return [jpeg(image)] if topic is None else [topic.encode(), jpeg(image)]


def views(parts: Sequence[bytes]) -> list[memoryview]:
    """Return the parts as a socket gives them."""
    return [memoryview(part) for part in parts]


class StubServer(ExitStack):
    """A PUB socket that sends what `make` returns for 0, 1, 2 ... until it is closed. A context manager."""

    def __init__(
        self,
        make: Callable[[int], Sequence[bytes]],
        endpoint: str = "tcp://127.0.0.1:*",
        period_s: float = PERIOD_S,
    ) -> None:
        super().__init__()
        socket = self.enter_context(self.enter_context(zmq.Context()).socket(zmq.PUB))
        socket.linger = 0
        socket.sndhwm = 20
        socket.bind(endpoint)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        indices = itertools.count()

        def send() -> None:
            time.sleep(period_s)
            socket.send_multipart(make(next(indices)))

        self.enter_context(repeating(send))


@contextmanager
def opened(uri: str, dialect: str, **settings: Any) -> Iterator[ServerSource]:
    """Open a source of camera.dialect. Its iteration ends, and so fails the test, if nothing comes in PATIENCE_S."""
    stop = threading.Event()
    timer = threading.Timer(PATIENCE_S, stop.set)
    timer.daemon = True
    timer.start()
    source = open_server(uri, CameraSettings(dialect=dialect, **settings), stop)  # type: ignore[arg-type]
    try:
        yield source
    finally:
        timer.cancel()
        source.close()


def image_where(source: ServerSource, accept: Callable[[CapturedImage], object] = bool) -> CapturedImage:
    """Return the next image that satisfies the condition."""
    found = next((image for image in source if accept(image)), None)
    assert found is not None, f"no such image came: {source.counts}"
    return found
