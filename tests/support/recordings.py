"""Small recordings with ground truth, for the tests of bags, cameras and the demo."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.bags import Pose, RecordingWriter, open_bag
from sam3_node.types import Frame, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import encode_depth

SIZE = (48, 64)
INTRINSICS = Intrinsics(60.0, 61.0, 31.5, 23.5)
MS = 1_000_000


def frame_at(seq: int, camera: str = "table", stamp_ns: int | None = None) -> Frame:
    """Return a grey JPEG of brightness 10 * seq with depth 500 + seq, 40 ms after the previous frame."""
    jpeg = cv2.imencode(".jpg", np.full((*SIZE, 3), 10 * seq % 256, np.uint8))[1].tobytes()
    return Frame(
        camera,
        seq,
        1_000 * MS + 40 * MS * seq if stamp_ns is None else stamp_ns,
        SIZE[1],
        SIZE[0],
        "jpeg",
        jpeg,
        "device",
        depth=encode_depth(np.full(SIZE, 500 + seq, np.uint16), "z16+zstd", 0.001, aligned=True),
        intrinsics=INTRINSICS,
        times={"sensor_ns": seq},
    )


def write_film(path: Path, images: Iterable[np.ndarray], fps: float = 25.0, codec: str = "mp4v") -> Path:
    """Write a video of these BGR images, by OpenCV."""
    images = list(images)
    height, width = images[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, (width, height))
    if not writer.isOpened():
        pytest.skip(f"OpenCV has no encoder for {path.suffix} here")
    for image in images:
        writer.write(image)
    writer.release()
    return path


def make_truth(frame: Frame, count: int = 2) -> MaskFrame:
    """Return squares that move a pixel per frame; the second is out of view at every third frame."""
    instances = []
    for k in range(1, count + 1):
        full = np.zeros(SIZE, np.bool_)
        if k != 2 or frame.seq % 3:
            full[20 * k - 15 : 20 * k, 5 + frame.seq : 25 + frame.seq] = True
        state = "tracked" if full.any() else "occluded"
        instances.append(Instance(k, f"object {k}", 1.0, state, frame.seq, 0, Mask.from_full(full)))  # type: ignore[arg-type]
    size = (frame.width, frame.height)
    return MaskFrame(
        frame.camera, frame.seq, frame.capture_ns, *size, instances=tuple(instances), clock=frame.clock
    )


def make_pose(frame: Frame) -> Pose:
    matrix = np.eye(4)
    matrix[0, 3] = frame.seq / 10
    return Pose(frame.camera, frame.seq, matrix)


def read_bag(path: Path, topics: Sequence[str] = (), **options: Any) -> tuple[list[Frame], str | None]:
    """Return all frames of a recording, and what was lost."""
    with open_bag(path, topics, **options) as bag:
        return list(bag), bag.lost


def write_recording(path: Path, frames: int | Sequence[Frame] = 5) -> Path:
    """Write these frames, or that many, each with its truth and pose."""
    with RecordingWriter(path, overwrite=True) as writer:
        for frame in [frame_at(seq) for seq in range(frames)] if isinstance(frames, int) else frames:
            writer.write_frame(frame, frame.capture_ns)
            writer.write_truth(make_truth(frame))
            writer.write_pose(make_pose(frame), frame.capture_ns)
    return path
