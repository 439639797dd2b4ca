"""Real pictures without labels: which there are, in an order whose every beginning is a varied sample.

A folder may hold videos (mp4), sequences (folders of JPEG files named by number) and photos (any other JPEG file).
Round 0 takes the middle frame of each and every photo, round 1 a frame at a quarter, and so on: a longer run adds
frames, and changes none of those before. Within a round the order follows from a hash of the name.

Videos of one day and place look alike, so that those held aside are whole days: see `is_held`.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.errors import CameraError

Image = npt.NDArray[np.uint8]  # BGR [h, w, 3]

HELD_OF = 20  # one day of so many is held aside
LONGEST = 512  # px of a picture as it is kept: what the teacher sees
DAY = re.compile(r".*?\d{4}_\d{2}_\d{2}")


@dataclass(frozen=True)
class Picture:
    """One picture to be read: a file, or a frame of a video at `share` 0..1 of its length.

    name: unique, and the same on every machine. held: never to be trained on.
    """

    name: str
    path: Path
    share: float | None
    held: bool

    def read(self) -> Image:
        """BGR uint8 [h, w, 3], at most 512 px on its longer side; raises CameraError where it cannot be read."""
        image = cv2.imread(str(self.path)) if self.share is None else _frame(self.path, self.share)
        if image is None:
            raise CameraError(f"expected a picture in {self.path}, found none that OpenCV reads")
        return shrink(image)


def list_pictures(folder: Path, rounds: int = 3) -> list[Picture]:
    """All pictures below a folder: those held aside first, then by round, each in the order of a hash.

    rounds: the most frames of one video or sequence. Raises CameraError where there are none.
    """
    found = [(number, picture) for number, picture in _walk(folder, rounds)]
    if not found:
        raise CameraError(f"expected videos or JPEG files below {folder}, found none")
    found.sort(key=lambda item: (not item[1].held, item[0], _hash(item[1].name)))
    return [picture for _, picture in found]


def is_held(name: str) -> bool:
    """Return True if a video is held aside, by the hash of its name up to the date, so that whole days are held.

    A name without a date is hashed completely.
    """
    day = DAY.match(name)
    return _hash(day[0] if day else name) % HELD_OF == 0


def unpack_all(archives: Iterable[Path], folder: Path) -> None:
    """Extract tar files into `folder`, each once; raises CameraError for one that is damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        mark = folder / f".{archive.name}.unpacked"
        if mark.is_file():
            continue
        try:
            with tarfile.open(archive) as held:
                held.extractall(folder, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise CameraError(f"expected a tar file of pictures, found {archive}: {error}") from error
        mark.touch()


def shrink(image: Image) -> Image:
    """At most 512 px on the longer side."""
    scale = LONGEST / max(image.shape[:2])
    if scale >= 1:
        return image
    size = (round(image.shape[1] * scale), round(image.shape[0] * scale))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def spread(number: int) -> float:
    """The number-th place in 0..1 of a sequence that spreads: 1/2, 1/4, 3/4, 1/8, 5/8, ..."""
    place, unit, number = 0.0, 0.5, number + 1
    while number:
        place += unit * (number & 1)
        number, unit = number >> 1, unit / 2
    return place


def _walk(folder: Path, rounds: int) -> Iterator[tuple[int, Picture]]:
    for path in sorted(folder.rglob("*.mp4")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        held = is_held(path.stem)
        for number in range(rounds):
            yield number, Picture(f"{name}@{number}", path, spread(number), held)
    for parent in sorted({path.parent for path in folder.rglob("*.jpg")}):
        yield from _stills(folder, parent, rounds)


def _stills(folder: Path, parent: Path, rounds: int) -> Iterator[tuple[int, Picture]]:
    """Yield pictures of one folder of JPEG files: a sequence if all names are numbers, otherwise single photos."""
    paths = sorted(parent.glob("*.jpg"))
    if all(path.stem.isdecimal() for path in paths):
        places = dict.fromkeys(int(spread(number) * len(paths)) for number in range(rounds))
        chosen = [(number, paths[place]) for number, place in enumerate(places)]
    else:
        chosen = [(0, path) for path in paths]
    for number, path in chosen:
        yield number, Picture(path.relative_to(folder).with_suffix("").as_posix(), path, None, False)


def _frame(path: Path, share: float) -> Image | None:
    """The frame at `share` of a video's length; the frames before it are skipped without decoding where that works."""
    capture = cv2.VideoCapture(str(path))
    wanted = int(share * max(1, int(capture.get(cv2.CAP_PROP_FRAME_COUNT))))
    last: Image | None = None
    for _ in range(wanted + 1):
        if not capture.grab():
            break
    else:
        _, last = capture.retrieve()
    capture.release()
    return last


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
