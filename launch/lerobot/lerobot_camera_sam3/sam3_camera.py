"""The camera `sam3`: a thread receives frames and masks and pairs them; reading draws the newest pair."""

from __future__ import annotations

import threading
import time
from typing import Any

import cv2
import numpy as np
from lerobot.cameras.camera import Camera
from lerobot.utils.errors import DeviceAlreadyConnectedError, DeviceNotConnectedError
from numpy.typing import NDArray

from sam3_node.client.observations import ANY, ObjectSlots
from sam3_node.errors import WireError
from sam3_node.transport.mask_pairing import MaskPair, MaskPairing
from sam3_node.transport.tap import StreamTap
from sam3_node.wire import decode_depth, decode_image

from .config_sam3_camera import Sam3CameraConfig

POLL_MS = 50
QUEUE_BYTES = 64 << 20
ANY_SLOTS = 6
MILLIMETRES = 1000.0


class Sam3Camera(Camera):
    """A camera of lerobot that shows what a node of sam3-node tracks. See Sam3CameraConfig.

    Pictures are uint8 [height, width, 3] in RGB order, depth is uint16 [height, width, 1] in millimetres, 0 where it is
    unknown. A picture and its masks are of the same frame. Masks that the node doubts, and old ones, are left out.
    """

    def __init__(self, config: Sam3CameraConfig) -> None:
        super().__init__(config)
        self.config = config
        self.use_rgb = True
        self.use_depth = config.use_depth
        self._slots = self._make_slots()
        self._pair: MaskPair | None = None
        self._arrived_s = 0.0
        self._taken: dict[bool, MaskPair] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def __str__(self) -> str:
        return f"Sam3Camera({self.config.camera}, {self.config.content})"

    @property
    def is_connected(self) -> bool:
        """True between `connect` and `disconnect`."""
        return self._thread is not None

    @staticmethod
    def find_cameras() -> list[dict[str, Any]]:
        """Return nothing: a node is known by its endpoints."""
        return []

    def connect(self, warmup: bool = True) -> None:
        """Start to receive. With `warmup`, wait for the first frame. Raises ConnectionError if none comes."""
        if self.is_connected:
            raise DeviceAlreadyConnectedError(f"{self} is connected already")
        tap = StreamTap([self.config.frames], self.config.masks, [self.config.camera], QUEUE_BYTES)
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(tap,), name=str(self), daemon=True)
        self._thread.start()
        if warmup and not self._wait(None, self.config.timeout_s):
            self.disconnect()
            raise ConnectionError(
                f"{self}: expected frames of {self.config.camera} from {self.config.frames} within "
                f"{self.config.timeout_s:g} s, found none; start sam3-node camera and sam3-node run"
            )

    def read(self) -> NDArray[Any]:
        """Wait for the next frame and return its picture."""
        return self.async_read(self.config.timeout_s * 1000)

    def async_read(self, timeout_ms: float = 200) -> NDArray[Any]:
        """Return the picture of the newest frame that was not returned before. Raises TimeoutError without one."""
        return self._draw(self._take(timeout_ms, is_depth=False))

    def read_latest(self, max_age_ms: int = 500) -> NDArray[Any]:
        """Return the newest picture at once. Raises TimeoutError if it came more than `max_age_ms` ago."""
        return self._draw(self._peek(max_age_ms))

    def read_depth(self, timeout_ms: int = 200) -> NDArray[np.uint16]:
        """Wait for the next frame and return its depth."""
        return self.async_read_depth(timeout_ms)

    def async_read_depth(self, timeout_ms: float = 200) -> NDArray[np.uint16]:
        """Return the depth of the newest frame whose depth was not returned before."""
        return self._measure(self._take(timeout_ms, is_depth=True))

    def read_latest_depth(self, max_age_ms: int = 500) -> NDArray[np.uint16]:
        """Return the newest depth at once. Raises TimeoutError if it came more than `max_age_ms` ago."""
        return self._measure(self._peek(max_age_ms))

    def disconnect(self) -> None:
        """Stop to receive."""
        if self._thread is None:
            raise DeviceNotConnectedError(f"{self} is not connected")
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._pair = None
        self._taken = {}
        self._slots = self._make_slots()

    def _make_slots(self) -> ObjectSlots:
        config = self.config
        labels = config.labels or [ANY] * ANY_SLOTS
        size = (config.height, config.width)
        max_age_s = config.mask_max_age_ms / 1000
        return ObjectSlots(labels, size, max_age_s=max_age_s, camera=config.camera)

    def _run(self, tap: StreamTap) -> None:
        pairing = MaskPairing()
        with tap:
            while not self._stop.is_set():
                arrived = tap.take(POLL_MS)
                try:
                    pair = pairing.accept(arrived.parts) if arrived else None
                except WireError:
                    continue  # a malformed message
                if pair is not None and pair.frame is not None:
                    with self._changed:
                        self._pair = pair
                        self._arrived_s = time.monotonic()
                        self._changed.notify_all()

    def _wait(self, seen: MaskPair | None, timeout_s: float) -> MaskPair | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pair is not seen, timeout_s)
            return self._pair if self._pair is not seen else None

    def _take(self, timeout_ms: float, is_depth: bool) -> MaskPair:
        if not self.is_connected:
            raise DeviceNotConnectedError(f"{self} is not connected")
        pair = self._wait(self._taken.get(is_depth), timeout_ms / 1000)
        if pair is None:
            raise TimeoutError(f"{self}: no new frame within {timeout_ms:g} ms")
        self._taken[is_depth] = pair
        return pair

    def _peek(self, max_age_ms: float) -> MaskPair:
        if not self.is_connected:
            raise DeviceNotConnectedError(f"{self} is not connected")
        with self._changed:
            pair = self._pair
            age_ms = (time.monotonic() - self._arrived_s) * 1000
        if pair is None:
            raise RuntimeError(f"{self}: no frame has come yet")
        if age_ms > max_age_ms:
            raise TimeoutError(
                f"{self}: the newest frame came {age_ms:.0f} ms ago, more than {max_age_ms:g} ms"
            )
        return pair

    def _draw(self, pair: MaskPair) -> NDArray[np.uint8]:
        """Return the picture of a pair, uint8 [height, width, 3] in RGB order."""
        objects = self._slots.observe(pair.masks)
        if self.config.content == "masks":
            picture = objects.pictures()["objects_0"]
            picture[..., : len(objects.usable)] *= objects.usable.astype(np.uint8)
            return picture
        size = (self.config.width, self.config.height)
        image = decode_image(pair.frame)
        if image.shape[1::-1] != size:
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        rgb = np.ascontiguousarray(image[..., ::-1])
        return objects.overlay(rgb) if self.config.content == "overlay" else rgb

    def _measure(self, pair: MaskPair) -> NDArray[np.uint16]:
        """Return the depth of a pair, uint16 [height, width, 1] in millimetres."""
        depth = pair.frame.depth
        if not self.use_depth or depth is None or not depth.aligned:
            found = "none" if depth is None else "depth that is not aligned"
            raise RuntimeError(f"{self}: expected use_depth and aligned depth in the frames, found {found}")
        values = decode_depth(depth)
        size = (self.config.width, self.config.height)
        if values.shape[::-1] != size:
            values = cv2.resize(
                values, size, interpolation=cv2.INTER_NEAREST
            )  # a mean lies on neither surface
        millimetres = np.rint(values * (depth.scale_m * MILLIMETRES))
        return np.where(millimetres > np.iinfo(np.uint16).max, 0, millimetres).astype(np.uint16)[
            ..., np.newaxis
        ]
