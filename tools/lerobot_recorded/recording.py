"""Writes a recording as `sam3-node record` makes it: cameras, masks, joints, actions and marks of episodes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from sam3_node.bags import RecordingWriter
from sam3_node.types import NANOSECONDS, Frame, Instance, JointState, Mask, MaskFrame, RobotAction
from sam3_node.wire import Event, pack_action, pack_event, pack_masks, pack_pose

BEGIN_NS = 1_760_000_000 * NANOSECONDS
"""Time at which the recording begins."""
FPS = 10
"""Frames per second of both cameras."""
SIZES = {"front": (160, 120), "wrist": (96, 72)}
"""Width and height of the cameras' frames."""
OFFSETS_MS = {"front": 0, "wrist": 13}
"""Milliseconds by which a camera's frames come later than whole periods."""
JOINTS = ("shoulder_pan", "elbow_flex", "finger_slide")
"""Names of the joints, as a URDF has them."""
JOINTS_HZ = 100
ACTIONS_HZ = 50
STEP_PX = 2
"""Pixels by which the objects move from a frame to the next."""


@dataclass(frozen=True)
class Mark:
    """An episode: its first frame, the frame after its last one, its task, and whether it is kept."""

    first: int
    end: int
    task: str = ""
    keep: bool = True


MARKS = (Mark(3, 15, "put the mug on the tray"), Mark(18, 24, "drop it", keep=False), Mark(27, 41))
"""The episodes of the recording. The last has no task of its own."""
FRAMES = 45


def time_of(frame: int, camera: str = "front") -> int:
    """Return the capture time of a frame of a camera."""
    return BEGIN_NS + frame * NANOSECONDS // FPS + OFFSETS_MS[camera] * NANOSECONDS // 1000


def joint_positions(time_ns: int) -> dict[str, float]:
    """Return the positions of the joints at a time: lines, so that they are known between two messages."""
    seconds = (time_ns - BEGIN_NS) / NANOSECONDS
    return {"shoulder_pan": 0.1 * seconds, "elbow_flex": 1.0 - 0.2 * seconds, "finger_slide": 0.01 * seconds}


def draw(frame: int, camera: str) -> np.ndarray[Any, Any]:
    """Return a picture, BGR uint8 [h, w, 3]: a ramp with a bright square for each object."""
    width, height = SIZES[camera]
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.linspace(0, 120, width).astype(np.uint8)
    image[..., 2] = 40 + 2 * frame
    for x0, y0, side in place_objects(frame):
        image[y0 : y0 + side, x0 : x0 + side] = (40, 200, 220)
    return image


def place_objects(frame: int) -> list[tuple[int, int, int]]:
    """Return left, top and side of each object."""
    return [(4 + frame, 8, 20), (10 + frame, 40, 16)]


def masks_of(frame: int, camera: str) -> MaskFrame:
    """Return the masks of a frame: a mug, and a bowl that is doubtful on each third frame."""
    width, height = SIZES[camera]
    instances = []
    named = zip((7, 9), ("mug", "bowl"), place_objects(frame), strict=True)
    for object_id, label, (x0, y0, side) in named:
        full = np.zeros((height, width), np.bool_)
        full[y0 : y0 + side, x0 : x0 + side] = True
        found = Instance(object_id, label, 0.8, "tracked", frame, 0, Mask.from_full(full), confidence=0.9)
        if label == "bowl":
            found = replace(found, score=0.4, confidence=0.25, doubtful=frame % 3 == 0)
        instances.append(found)
    return MaskFrame(
        camera,
        frame,
        time_of(frame, camera),
        width,
        height,
        prompts=("mug", "bowl"),
        instances=tuple(instances),
    )


def write_recording(
    path: Path,
    marks: Sequence[Mark] = MARKS,
    has_actions: bool = True,
    masked: Sequence[str] = ("front",),
    lost: Sequence[int] = (),
    first: int = 0,
    unmarked: Sequence[int] = (),
) -> Path:
    """Write the recording, from the frame `first` on.

    `lost` are frames of the camera front, `unmarked` numbers of events that the recorder has not received.
    """
    messages = sorted(_make_messages(marks, has_actions, masked, lost), key=lambda message: message[0])
    with RecordingWriter(path) as writer:
        for time_ns, kind, values in messages:
            is_lost = kind == "write_event" and values[1] in unmarked
            if time_ns >= time_of(first) and not is_lost:
                getattr(writer, kind)(*values, time_ns)
    return path


def _make_messages(
    marks: Sequence[Mark], has_actions: bool, masked: Sequence[str], lost: Sequence[int]
) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    """Yield the time of arrival of each message, the method that writes it, and its arguments."""
    for camera in SIZES:
        for frame in range(FRAMES):
            if camera == "front" and frame in lost:
                continue
            arrival_ns = time_of(frame, camera) + 5_000_000
            yield arrival_ns, "write_frame", (_make_frame(frame, camera),)
            if camera in masked:
                masks = masks_of(frame, camera)
                yield arrival_ns + 20_000_000, "write_masks", (pack_masks(masks)[1], masks)
    seconds = FRAMES / FPS
    for number in range(math.ceil(seconds * JOINTS_HZ)):
        time_ns = BEGIN_NS + number * NANOSECONDS // JOINTS_HZ
        topic, body = pack_pose(JointState("arm", time_ns, joint_positions(time_ns)))
        yield time_ns + 1_000_000, "write_robot", (body, topic.decode())
    if has_actions:
        for number in range(math.ceil(seconds * ACTIONS_HZ)):
            time_ns = BEGIN_NS + number * NANOSECONDS // ACTIONS_HZ
            ahead = joint_positions(time_ns + NANOSECONDS // FPS)
            topic, body = pack_action(RobotAction("arm", time_ns, ahead, "leader"))
            yield time_ns + 1_000_000, "write_robot", (body, topic.decode())
    yield from _make_events(marks)


def _make_events(marks: Sequence[Mark]) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    n = 0
    for number, mark in enumerate(marks):
        begun_ns = time_of(mark.first) - 10_000_000
        ended_ns = time_of(mark.end) - 10_000_000
        args: dict[str, Any] = {"episode": number, "task": mark.task, "begun_ns": begun_ns}
        yield begun_ns, "write_event", (pack_event(Event(n, "begin_episode", args))[1], n)
        ended = {**args, "ended_ns": ended_ns, "keep": mark.keep}
        yield ended_ns, "write_event", (pack_event(Event(n + 1, "end_episode", ended))[1], n + 1)
        n += 2


def _make_frame(frame: int, camera: str) -> Frame:
    width, height = SIZES[camera]
    png = cv2.imencode(".png", draw(frame, camera))[1].tobytes()
    return Frame(camera, frame, time_of(frame, camera), width, height, "png", png)
