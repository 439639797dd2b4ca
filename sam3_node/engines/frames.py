"""Pictures to calibrate and to judge engines with: from a recording, a video, or a folder of images."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from ..bags import read_frames
from ..errors import BagError, CameraError
from ..types import Frame
from ..wire import decode_image

Image = npt.NDArray[np.uint8]

IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
_log = logging.getLogger(__name__)


def frames_of(source: str | Path, count: int, step: int | None = None) -> Iterator[Image]:
    """Up to `count` pictures of a source, in its order, BGR uint8 [h, w, 3]; all where it has no more.

    They are spread evenly over the whole source or, with `step`, every so many from its beginning. A source is a
    recording (.mcap; of several cameras in it the first), a folder of images in the order of their names, or a video.
    What of it is damaged is left out with a warning. Raises CameraError or BagError where no picture can be read,
    MissingExtraError for a recording without the extra `bags`.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _of_folder(path, count, step)
    elif not path.is_file():
        raise CameraError(f"expected a recording, a video or a folder of images, found nothing at {path}")
    elif path.suffix == ".mcap":
        yield from _of_recording(path, count, step)
    else:
        yield from _of_video(path, count, step)


def _chosen(total: int, count: int, step: int | None) -> list[int]:
    """Indices of `count` out of `total`: every step-th, or spread evenly."""
    if step is not None:
        return list(range(0, total, step))[:count]
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def _of_folder(path: Path, count: int, step: int | None) -> Iterator[Image]:
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGES)
    if not files:
        raise CameraError(f"{path} holds no image: expected files that end in {', '.join(sorted(IMAGES))}")
    found = 0
    for index in _chosen(len(files), count, step):
        image = cv2.imread(str(files[index]), cv2.IMREAD_COLOR)
        if image is None:
            _log.warning("%s is left out: it cannot be read as an image", files[index])
            continue
        found += 1
        yield np.asarray(image, np.uint8)
    if not found:
        raise CameraError(f"{path}: none of its images can be read; are they damaged?")


def _of_recording(path: Path, count: int, step: int | None) -> Iterator[Image]:
    total = sum(1 for _ in _whole(path))
    wanted = set(_chosen(total, count, step))
    for index, frame in enumerate(_whole(path)):
        if index in wanted:
            yield decode_image(frame)
            wanted.remove(index)
        if not wanted:
            return


def _whole(path: Path) -> Iterator[Frame]:
    """The frames of the first camera, up to where the file is damaged."""
    camera = None
    try:
        for frame in read_frames(path):
            camera = camera or frame.camera
            if frame.camera == camera:
                yield frame
    except BagError as error:
        if camera is None:
            raise
        _log.warning("%s", error)


def _of_video(path: Path, count: int, step: int | None) -> Iterator[Image]:
    total = _length(path)
    if not total:
        raise CameraError(f"{path} holds no readable video: damaged, or of an unknown format")
    capture = cv2.VideoCapture(str(path))
    try:
        yield from _pick(capture, _chosen(total, count, step))
    finally:
        capture.release()


def _length(path: Path) -> int:
    """Pictures that can be read; what a file declares may be wrong."""
    capture, total = cv2.VideoCapture(str(path)), 0
    while capture.grab():
        total += 1
    capture.release()
    return total


def _pick(capture: cv2.VideoCapture, wanted: list[int]) -> Iterator[Image]:
    position = 0
    for index in wanted:
        while position <= index:
            capture.grab()
            position += 1
        found, image = capture.retrieve()
        if found:
            yield np.asarray(image, np.uint8)
