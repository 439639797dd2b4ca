"""Videos of masks drawn on the recorded frames that they were found on, one for each camera."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ..errors import WireError
from ..types import Frame, MaskFrame
from ..visual import Film, overlay
from ..wire import decode_image
from .sources import Frames, Masks, Progress

T = TypeVar("T", MaskFrame, Frame)


def write_overlays(folder: Path, masks: Masks, frames: Frames, progress: Progress) -> None:
    """Write overlay-<camera>.mp4 for each camera, in a pass over both for each of them.

    Masks whose frame is not there, or does not decode, are passed over; where there is none at all, so is the video.
    """
    count = 0
    for camera in sorted({found.camera for found in masks()}):
        with Film(folder / f"overlay-{camera}.mp4") as film:
            for found, frame in pair(_of(camera, masks()), _of(camera, frames())):
                _draw(film, found, frame)
                progress(count + film.frames)
        count += film.frames


def pair(masks: Iterator[MaskFrame], frames: Iterator[Frame]) -> Iterator[tuple[MaskFrame, Frame]]:
    """Masks of one camera with their frames, which are in the same order; those without one are left out.

    A frame is known by seq and time of capture, as seq begins again where a camera was started again.
    """
    frame = next(frames, None)
    for found in masks:
        while frame is not None and not _is_of(found, frame) and not _is_past(found, frame):
            frame = next(frames, None)
        if frame is None:
            return
        if _is_of(found, frame):
            yield found, frame


def _of(camera: str, values: Iterator[T]) -> Iterator[T]:
    return (value for value in values if value.camera == camera)


def _is_of(found: MaskFrame, frame: Frame) -> bool:
    return (frame.seq, frame.capture_ns) == (found.seq, found.capture_ns)


def _is_past(found: MaskFrame, frame: Frame) -> bool:
    return frame.seq > found.seq and frame.capture_ns > found.capture_ns


def _draw(film: Film, found: MaskFrame, frame: Frame) -> None:
    try:
        image = decode_image(frame)
    except WireError:
        return
    film.add(overlay(image, found), found.capture_ns)
