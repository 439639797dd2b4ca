"""What is evaluated: frames with true masks, from a folder in DAVIS' layout or from a recording."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.bags import LabelledClip
from sam3_node.errors import CameraError
from tools.scenes.clips import Clip, Labels, list_clips, read_clip

from .metrics import Bools
from .occlusion import MIN_AREA

VOID = 255


class TrueFrame(NamedTuple):
    """BGR uint8 [h, w, 3], the mask bool [h, w] of each object in view by its id, and the pixels that do not count."""

    image: npt.NDArray[np.uint8]
    masks: Mapping[int, Bools]
    void: Bools | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.shape[0], self.image.shape[1]

    def truth(self, object_id: int) -> Bools:
        """The mask of an object, in view or not."""
        return self.masks[object_id] if object_id in self.masks else np.zeros(self.size, np.bool_)


@dataclass(frozen=True)
class Sequence:
    """A clip whose frames are read one by one, each time `frames` is called.

    An object is prompted on the first frame where it covers `least_area` of the image.
    """

    name: str
    length: int
    ids: tuple[int, ...]
    least_area: float
    frames: Callable[[], Iterator[TrueFrame]]


def open_sequences(path: Path, names: Iterable[str] = (), most_frames: int = 0) -> list[Sequence]:
    """The sequences of a folder, or those of `names` (* and ? as in the shell), or a recording.

    Of each the first `most_frames`, 0 for all.

    DAVIS' own objects are prompted where they first appear, those of rendered clips (which come with JSON) and of
    recordings once they cover 0.1 % of the image. CameraError or BagError says what is missing.
    """
    if path.is_file():
        return [_from_recording(path.stem, LabelledClip.load(path), most_frames)]
    known = list_clips(path)
    found = {name: fnmatch.filter(known, name) for name in names or ("*",)}
    missing = [name for name, matches in found.items() if not matches]
    if missing:
        raise CameraError(f"{path}: expected sequences {missing or 'in it'}, found {known or 'none'}")
    return [_from_clip(read_clip(path, name), most_frames) for name in dict.fromkeys(chain(*found.values()))]


def _from_recording(name: str, recording: LabelledClip, most_frames: int) -> Sequence:
    length = min(len(recording), most_frames or len(recording))

    def frames() -> Iterator[TrueFrame]:
        for index in range(length):
            yield TrueFrame(recording.image(index), recording.truth(index))

    return Sequence(name, length, tuple(recording.labels), MIN_AREA, frames)


def _from_clip(clip: Clip, most_frames: int) -> Sequence:
    length = min(len(clip), most_frames or len(clip))
    rendered = "objects" in clip.meta
    if rendered:
        ids, void = tuple(int(known["id"]) for known in clip.meta["objects"]), None
    else:
        ids, void = split_void(clip.labels(index) for index in range(length))

    def frames() -> Iterator[TrueFrame]:
        for index in range(length):
            yield _true_frame(clip, index, ids, void)

    return Sequence(clip.name, length, ids, MIN_AREA if rendered else 0.0, frames)


def split_void(labels: Iterable[Labels]) -> tuple[tuple[int, ...], int | None]:
    """The object ids in all labels [h, w] together, and the void label: 255, unless it is the only one there is."""
    present = np.zeros(256, np.bool_)
    for image in labels:
        present |= np.bincount(image.ravel(), minlength=256) > 0
    present[0] = False
    ids = tuple(int(label) for label in np.flatnonzero(present))
    return (ids[:-1], VOID) if VOID in ids and len(ids) > 1 else (ids, None)


def _true_frame(clip: Clip, index: int, ids: tuple[int, ...], void: int | None) -> TrueFrame:
    image, labels = clip.image(index), clip.labels(index)
    if image.shape[:2] != labels.shape:
        raise CameraError(
            f"{clip.name}, frame {index}: expected labels of the image's size {image.shape[:2]}, found {labels.shape}"
        )
    present = np.bincount(labels.ravel(), minlength=256) > 0
    masks = {object_id: labels == object_id for object_id in ids if present[object_id]}
    return TrueFrame(image, masks, None if void is None else labels == void)
