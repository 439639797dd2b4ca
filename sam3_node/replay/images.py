"""Frames of a recording as images beside their masks, and the names under which COCO finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..bags.native.writer import compress_colour
from ..errors import WireError
from ..files import safe_file_name
from ..types import Frame, MaskFrame
from ..wire.images import CHANNELS
from .coco import MaskSource

FrameSource = Callable[[], Iterator[Frame]]
"""Each call yields the frames of the recording from the beginning."""

FOLDER = "images"
QUALITY = 95
SUFFIXES, RAW_SUFFIX = {"jpeg": ".jpg", "png": ".png"}, ".jpg"


class CameraFrames:
    """Finds the frames of one camera's masks, both in the same order."""

    def __init__(self, frames: Iterator[Frame]) -> None:
        self._frames = frames
        self._frame = next(frames, None)

    @property
    def ended(self) -> bool:
        """True if no frame is left."""
        return self._frame is None

    def find(self, masks: MaskFrame) -> Frame | None:
        """Return the frame of the next masks, None if it is missing."""
        while self._frame is not None and self._frame.key != masks.key and not _is_past(masks, self._frame):
            self._frame = next(self._frames, None)
        return self._frame if self._frame is not None and self._frame.key == masks.key else None


def _is_past(masks: MaskFrame, frame: Frame) -> bool:
    # both are compared: seq starts again when a camera is restarted
    return frame.seq > masks.seq and frame.capture_ns > masks.capture_ns


def join_frames(masks: MaskSource, frames: FrameSource) -> Iterator[tuple[MaskFrame, Frame | None]]:
    """Yield all masks in their order, each with its frame, or None where that is missing.

    Each camera has its own pass over the recording, because the order of masks may differ from that of frames.
    """
    cameras: dict[str, CameraFrames] = {}
    for frame_masks in masks():
        camera = frame_masks.camera
        if camera not in cameras:
            cameras[camera] = CameraFrames(_select(camera, frames()))
        yield frame_masks, cameras[camera].find(frame_masks)


def _select(camera: str, frames: Iterator[Frame]) -> Iterator[Frame]:
    return (frame for frame in frames if frame.camera == camera)


def compress_frame(frame: Frame | None) -> Frame | None:
    """Return a frame whose colour is JPEG or PNG: as it was, or JPEG of QUALITY if it was raw.

    Return None if there is no frame, or if it cannot be decoded.
    """
    if frame is None or frame.encoding not in CHANNELS:
        return frame
    try:
        return compress_colour(frame, "jpeg", QUALITY)
    except WireError:
        return None


class ImageNames:
    """Names the image files of masks, which come in the order of each camera's frames.

    The name is images/<camera>/<seq>.jpg or .png. After a restart of the camera, numbers that come again get -1, -2
    and so on.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}

    def name(self, masks: MaskFrame, frame: Frame) -> str:
        """Return the path of the next image below the folder of the outputs."""
        last_seq, restarts = self._last.get(masks.camera, (-1, 0))
        restarts += masks.seq <= last_seq
        self._last[masks.camera] = masks.seq, restarts
        restart = f"-{restarts}" if restarts else ""
        folder = f"{FOLDER}/{safe_file_name(masks.camera)}"
        return f"{folder}/{masks.seq:05d}{restart}{SUFFIXES.get(frame.encoding, RAW_SUFFIX)}"


def write_images(
    folder: Path, masks: MaskSource, frames: FrameSource, progress: Callable[[int], None]
) -> None:
    """Write the image of each frame that has masks, as `compress_frame` makes it."""
    names = ImageNames()
    (folder / FOLDER).mkdir()
    for count, (frame_masks, frame) in enumerate(join_frames(masks, frames), start=1):
        image = compress_frame(frame)
        if image is not None:
            path = folder / names.name(frame_masks, image)  # raw colour has become JPEG
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(image.colour)
        progress(count)


def name_images(masks: MaskSource, frames: FrameSource) -> Iterator[str | None]:
    """Yield for each masks in their order the name that `write_images` gives its image, None without an image."""
    names = ImageNames()
    for frame_masks, frame in join_frames(masks, frames):
        yield names.name(frame_masks, frame) if frame is not None else None
