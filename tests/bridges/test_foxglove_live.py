"""Tests of `sam3-node bridge foxglove` as a process, with a real camera and node."""

from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.types import MaskFrame
from tests.bridges.conftest import NAME
from tests.support.console_rig import ConsoleRig
from tests.support.foxglove_client import FoxgloveClient, Received, stamp_ns
from tests.support.node_rig import Process, masks_where, until
from tests.support.tabletop import iou

TOPICS = ("/cam0/image", "/cam0/annotations")


@pytest.fixture(scope="module")
def bridge(rig: ConsoleRig) -> tuple[Process, str]:
    process = rig.launch("bridge", "foxglove", "127.0.0.1:0")
    line = process.next_line()
    assert line.startswith("bridge: foxglove at ws://127.0.0.1:"), line
    return process, line.split()[-1]


def fill(annotations: Any, size: tuple[int, ...]) -> Any:
    """Return the pixels inside the outlines, bool [height, width]. Objects, told apart by colour, may overlap."""
    loops: dict[tuple[float, ...], list[Any]] = {}
    for loop in annotations.points:
        colour = loop.outline_color
        corners = np.round([(point.x - 0.5, point.y - 0.5) for point in loop.points]).astype(np.int32)
        loops.setdefault((colour.r, colour.g, colour.b), []).append(corners)
    image = np.zeros(size, np.uint8)
    for of_object in loops.values():
        one = np.zeros(size, np.uint8)
        cv2.drawContours(one, of_object, -1, 1, cv2.FILLED)  # holes stay open
        image |= one
    return image > 0


def with_name(client: FoxgloveClient, topic: str = TOPICS[1]) -> Received:
    """Return the next annotations that have the mug's outline."""

    def find() -> Received | None:
        found = client.next(topic)
        return found if any(NAME in text.text for text in found.message.texts) else None

    return until(find, "annotations of the mug")


@pytest.mark.verifies(
    "viewer",
    "Foxglove, live",
    "own package",
    "foxglove-sdk serves, a WebSocket client decodes by the schemas it announces",
    "Foxglove's application",
)
def test_outlines_lie_on_the_objects_of_their_picture(rig: ConsoleRig, bridge: tuple[Process, str]) -> None:
    with FoxgloveClient(bridge[1]) as client, rig.client() as perception:
        client.subscribe(*TOPICS)
        outlines: dict[int, Received] = {}
        masks: dict[int, MaskFrame] = {}

        def find() -> set[int]:
            found = with_name(client)
            outlines[found.time_ns] = found
            latest = masks_where(perception, lambda masks: True, "masks")
            masks[latest.capture_ns] = latest
            return outlines.keys() & masks.keys()

        (time_ns,) = until(find, "outlines and the node's own message of one frame")
    instances = [instance for instance in masks[time_ns].instances if instance.area]
    inside = np.any([instance.mask.full() for instance in instances], axis=0)
    assert iou(fill(outlines[time_ns].message, inside.shape), inside) > 0.95
    ids = [text.text.split()[0] for text in outlines[time_ns].message.texts]
    assert ids == [str(instance.id) for instance in instances]


def test_pictures_are_those_of_the_camera_with_the_stamps_of_their_outlines(
    bridge: tuple[Process, str],
) -> None:
    with FoxgloveClient(bridge[1]) as client:
        client.subscribe(*TOPICS)
        stamps: dict[str, set[int]] = {topic: set() for topic in TOPICS}
        images: list[Any] = []

        def both() -> bool:
            received = client.next()
            stamps[received.topic].add(received.time_ns)
            images.extend([received.message] if received.topic == TOPICS[0] else [])
            return len(stamps[TOPICS[0]] & stamps[TOPICS[1]]) >= 3

        until(both, "three pictures with outlines")
        image = cv2.imdecode(np.frombuffer(images[0].data, np.uint8), cv2.IMREAD_COLOR)
        assert image.shape == (480, 640, 3)
        assert stamp_ns(images[0].timestamp) in stamps[TOPICS[0]]


def test_a_signal_ends_it_with_a_summary(bridge: tuple[Process, str]) -> None:
    process, _ = bridge
    assert process.terminate() == 0
    assert process.next_line().startswith("bridge: showed ")
