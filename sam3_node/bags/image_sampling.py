"""Sampling of single images from any recording, video or folder, for calibration and comparison of engines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import BagError, WireError
from ..types import Image
from ..wire import decode_image
from .bag import open_bag
from .still_images import SUFFIXES

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", *SUFFIXES}
_log = logging.getLogger(__name__)


def sample_images(source: str | Path, count: int, step: int | None = None) -> Iterator[Image]:
    """Yield up to `count` images of a source in its order, BGR uint8 [h, w, 3]; all of them if it has fewer.

    They are spread evenly over the source or, with `step`, are every `step`-th image from its beginning. A source is a
    folder of images in the order of their names, or any recording that `open_bag` reads, of which the first camera
    counts. Damaged images are left out with a warning. Raises BagError if no image can be read, MissingExtraError if
    the library of a format is absent.
    """
    path = Path(source).expanduser()
    files = sorted(_list_images(path)) if path.is_dir() else []
    images = _read_files(files, count, step) if files else _read_bag(path, count, step)
    is_empty = True
    for image in images:
        is_empty = False
        yield image
    if is_empty:
        raise BagError(f"{path}: expected images, found none that can be read; are they damaged?")


def _list_images(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]


def _read_files(files: list[Path], count: int, step: int | None) -> Iterator[Image]:
    """Read files of any sizes, which a bag's camera would refuse."""
    import cv2

    for index in _choose(len(files), count, step):
        path, flags = str(files[index]), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        image = cv2.imread(path, flags)
        if image is None:  # of a TIFF OpenCV cannot leave out the turn
            image = cv2.imread(path, cv2.IMREAD_COLOR)
        if image is None:
            _log.warning("%s is left out: it cannot be read as an image", files[index])
        else:
            yield np.asarray(image, np.uint8)


def _read_bag(path: Path, count: int, step: int | None) -> Iterator[Image]:
    with open_bag(path) as bag:
        camera = bag.cameras[0]
    with open_bag(path, (camera,)) as bag:
        chosen = set(_choose(sum(1 for _ in bag), count, step))
        for index, frame in enumerate(bag):
            if index > max(chosen, default=-1):
                break
            if index in chosen:
                try:
                    yield decode_image(frame)
                except WireError as error:
                    _log.warning("%s: image %d is left out: %s", path, index, error)
        if bag.lost is not None:
            _log.warning("%s", bag.lost)


def _choose(total: int, count: int, step: int | None) -> list[int]:
    """Return the indices of `count` images out of `total`: every `step`-th, or spread evenly."""
    if step is not None:
        return list(range(0, total, step))[:count]
    return [int(index) for index in np.linspace(0, total - 1, min(count, total)).round()]
