"""Pairs masks with the frames that they belong to, and names the frames' pictures."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from ...bags.native.writer import compress_colour
from ...errors import WireError
from ...files import safe_file_name
from ...types import Frame, MaskFrame
from ...wire.images import CHANNELS
from ...wire.orientation import without_orientation
from ..davis_png import FrameNames, MaskSource

T = TypeVar("T", MaskFrame, Frame)
FrameSource = Callable[[], Iterator[Frame]]
"""Each call yields the frames of the recording from the beginning."""

IMAGES = "images"
"""Folder of the pictures, in that of the outputs."""

# endings of image files by the encoding of their frames
_SUFFIXES = {"jpeg": ".jpg", "png": ".png"}


def _is_past(masks: MaskFrame, frame: MaskFrame | Frame) -> bool:
    # both are compared: seq starts again when a camera is restarted
    return frame.seq > masks.seq and frame.capture_ns > masks.capture_ns


def join_frames(masks: MaskSource, frames: Callable[[], Iterator[T]]) -> Iterator[tuple[MaskFrame, T | None]]:
    """Yield all masks in their order, each with its frame, or other masks of it, or None where that is missing.

    Each camera has its own pass over the recording, because masks and frames may come in different orders.
    """
    passes: dict[str, Iterator[T]] = {}
    upcoming: dict[str, T | None] = {}
    for frame_masks in masks():
        camera = frame_masks.camera
        key = frame_masks.key
        if camera not in passes:
            passes[camera] = select_camera(camera, frames)
            upcoming[camera] = next(passes[camera], None)
        # skip frames without masks, but keep the first one that later masks may have
        while (frame := upcoming[camera]) and frame.key != key and not _is_past(frame_masks, frame):
            upcoming[camera] = next(passes[camera], None)
        if frame is not None and frame.key == key:
            yield frame_masks, frame
        else:
            yield frame_masks, None


def compress_frame(frame: Frame | None) -> Frame | None:
    """Return a frame whose colour is JPEG or PNG: as it was, or JPEG of JPEG_QUALITY if it was raw.

    It has no EXIF orientation: labels are of the pixels as they are, and usual readers turn them. Return None if
    there is no frame, or if it cannot be decoded.
    """
    if frame is None:
        return None
    if frame.encoding not in CHANNELS:
        return replace(frame, colour=without_orientation(bytes(frame.colour)))
    try:
        return compress_colour(frame, "jpeg")
    except WireError:
        return None


def name_images(masks: MaskSource, frames: FrameSource) -> Iterator[tuple[str | None, Frame | None]]:
    """Yield the image's path below the folder of the outputs, and the frame, of each masks in their order.

    The path is images/<camera>/<name>.jpg or .png, with the names of `FrameNames`. Without a frame, both are None.
    """
    numbers = FrameNames()
    for frame_masks, frame in join_frames(masks, frames):
        if frame is None:
            yield None, None
            continue
        camera = frame_masks.camera
        number = numbers.next(camera, frame_masks.seq)
        suffix = _SUFFIXES.get(frame.encoding, ".jpg")  # raw colour becomes JPEG
        yield f"{IMAGES}/{safe_file_name(camera)}/{number}{suffix}", frame


def select_camera(camera: str, source: Callable[[], Iterator[T]]) -> Iterator[T]:
    return (value for value in source() if value.camera == camera)
