"""Sequences to evaluate: frames with true masks, from a folder in DAVIS' layout or from a recording."""

import fnmatch
import json
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

from .metrics import MIN_AREA, Bools

VOID = 255
UNKNOWN = "invalid.json"
"""File beside the clips, by training.doubt.pseudo: for each clip the [frame, id] pairs whose truth is unknown."""


class TrueFrame(NamedTuple):
    """An image BGR uint8 [h, w, 3], the mask bool [h, w] of each object in view by id, and the void pixels.

    unknown: ids of objects whose truth is not known on this frame, whatever `masks` says.
    """

    image: npt.NDArray[np.uint8]
    masks: Mapping[int, Bools]
    void: Bools | None = None
    unknown: frozenset[int] = frozenset()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.shape[0], self.image.shape[1]

    def truth(self, object_id: int) -> Bools:
        """Return the mask of an object, in view or not."""
        return self.masks[object_id] if object_id in self.masks else np.zeros(self.size, np.bool_)


@dataclass(frozen=True)
class LabelledSequence:
    """A clip with true masks; each call of `frames` reads the frames one by one.

    An object is prompted on the first frame where it covers `min_area` of the image.
    """

    name: str
    length: int
    ids: tuple[int, ...]
    min_area: float
    frames: Callable[[], Iterator[TrueFrame]]


def open_sequences(
    path: Path, names: Iterable[str] = (), max_frames: int = 0, every: int = 1
) -> list[LabelledSequence]:
    """Open the sequences of a folder, all or `names` (* and ? are wildcards), or a recording.

    Each has every `every`-th of its first `max_frames` frames, 0 for all. DAVIS' own objects are prompted where they
    first appear, those of rendered clips (with JSON) and of recordings once they cover 0.1 % of the image. Raises
    CameraError or BagError for missing clips or truth.
    """
    if path.is_file():
        return [_from_recording(path.stem, LabelledClip.load(path), max_frames, every)]
    available = list_clips(path)
    matching = {name: fnmatch.filter(available, name) for name in names or ("*",)}
    missing = [name for name, matches in matching.items() if not matches]
    if missing:
        raise CameraError(f"{path}: expected sequences {missing or 'in it'}, found {available or 'none'}")
    unknown = _read_unknown(path)
    return [
        _from_clip(read_clip(path, name), max_frames, every, unknown.get(name, {}))
        for name in dict.fromkeys(chain(*matching.values()))
    ]


def _read_unknown(folder: Path) -> dict[str, dict[int, frozenset[int]]]:
    """Return the ids whose truth is unknown by clip and frame."""
    path = folder / UNKNOWN
    if not path.is_file():
        return {}
    return {
        name: {frame: frozenset(i for at, i in pairs if at == frame) for frame, _ in pairs}
        for name, pairs in json.loads(path.read_text()).items()
    }


def _from_recording(name: str, recording: LabelledClip, max_frames: int, every: int) -> LabelledSequence:
    chosen = range(0, min(len(recording), max_frames or len(recording)), every)

    def frames() -> Iterator[TrueFrame]:
        for index in chosen:
            yield TrueFrame(recording.image(index), recording.truth(index))

    return LabelledSequence(name, len(chosen), tuple(recording.labels), MIN_AREA, frames)


def _from_clip(
    clip: Clip, max_frames: int, every: int, unknown: Mapping[int, frozenset[int]]
) -> LabelledSequence:
    chosen = range(0, min(len(clip), max_frames or len(clip)), every)
    rendered = "objects" in clip.meta
    if rendered:
        ids = tuple(int(entry["id"]) for entry in clip.meta["objects"])
        void = None
    else:
        ids, void = split_void(clip.labels(index) for index in chosen)

    def frames() -> Iterator[TrueFrame]:
        for index in chosen:
            yield _true_frame(clip, index, ids, void)._replace(unknown=unknown.get(index, frozenset()))

    return LabelledSequence(clip.name, len(chosen), ids, MIN_AREA if rendered else 0.0, frames)


def split_void(labels: Iterable[Labels]) -> tuple[tuple[int, ...], int | None]:
    """Return the object ids in all labels [h, w], and the void label: 255, unless it is the only label."""
    present = np.zeros(256, np.bool_)
    for image in labels:
        present |= np.bincount(image.ravel(), minlength=256) > 0
    present[0] = False
    ids = tuple(int(label) for label in np.flatnonzero(present))
    return (ids[:-1], VOID) if VOID in ids and len(ids) > 1 else (ids, None)


def _true_frame(clip: Clip, index: int, ids: tuple[int, ...], void: int | None) -> TrueFrame:
    image = clip.image(index)
    labels = clip.labels(index)
    if image.shape[:2] != labels.shape:
        wanted = f"labels of the image's size {image.shape[:2]}"
        raise CameraError(f"{clip.name}, frame {index}: expected {wanted}, found {labels.shape}")
    present = np.bincount(labels.ravel(), minlength=256) > 0
    masks = {object_id: labels == object_id for object_id in ids if present[object_id]}
    return TrueFrame(image, masks, None if void is None else labels == void)
