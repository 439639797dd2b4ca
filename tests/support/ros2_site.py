"""A bridge of launch/ros2 with the sockets of a node, for tests without a node. It needs the environment of ROS."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sam3_node_ros.link import Ros2Bridge, Ros2Settings
from sam3_node_ros.parts import Header

from sam3_node.transport import FrameSubscriber, MaskPublisher
from sam3_node.types import Frame, MaskFrame
from tests.support.processes import until
from tests.support.ros2 import make_header, make_image, serialise

SIZE = (12, 16)
RGB = np.random.default_rng(1).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
IMAGE = "/cam/color/image_raw"


def image(stamp_ns: int, pixels: np.ndarray = RGB, encoding: str = "rgb8", padding: int = 0) -> Any:
    return make_image(make_header(stamp_ns), pixels, encoding, padding)


class Site:
    """A bridge and the sockets that a node has, without a node."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.warnings: list[str] = []
        resolved = settings.pop("resolved", None)
        places = {name: f"ipc://{folder}/{name}" for name in ("frames", "masks", "control")}
        self.settings = Ros2Settings(**({"image_topic": IMAGE} | places | settings))
        resolve = lambda topic: resolved if topic == "image" and resolved else topic  # noqa: E731
        self.bridge = Ros2Bridge(self.settings, self.warnings.append, resolve)
        self.frames = FrameSubscriber([self.bridge.endpoint])
        self.published: list[tuple[MaskFrame, Header]] = []

    def close(self) -> None:
        self.bridge.close()
        self.frames.close()

    def publish(self) -> None:
        """Start to keep what is published."""
        self.bridge.start(lambda *found: self.published.append(found))

    def send(self, *messages: tuple[str, Any]) -> Frame:
        """Take messages until a frame of them arrives: those before the subscription are lost. Return it."""

        def attempt() -> Frame | None:
            for topic, message in messages:
                self.bridge.take(topic, serialise(message))
            received = self.frames.take(100)
            return received and received.frame

        return until(attempt, "a frame")

    def publish_masks(self, publisher: MaskPublisher, frame: Frame) -> tuple[MaskFrame, Header]:
        """Publish masks of a frame until the bridge passes them on."""
        masks = MaskFrame(frame.camera, frame.seq, frame.capture_ns, SIZE[1], SIZE[0])
        self.published.clear()

        def attempt() -> tuple[MaskFrame, Header] | None:
            publisher.send(masks)
            time.sleep(0.02)
            return self.published[-1] if self.published else None

        return until(attempt, "masks")


OpenSite = Callable[..., Site]
