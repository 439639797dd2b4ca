"""Who is where on each frame of a rendered clip, by object id, with the names that they go by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.errors import CameraError
from tools.scenes.clips import Clip, list_clips, read_clip

MIN_AREA = 0.001  # of the image, for an object to count
Bools = npt.NDArray[np.bool_]


class TrueFrame(NamedTuple):
    """BGR uint8 [h, w, 3]; bool masks [h, w] by id of objects that count, and of those too small to ask for."""

    image: npt.NDArray[np.uint8]
    counted: Mapping[int, Bools]
    slivers: Mapping[int, Bools]


@dataclass(frozen=True)
class TrueClip:
    """A clip in which the objects called by `names` are looked for.

    named: for each of their ids what it may be called, the kind ("mug") or the full name ("red mug").
    """

    clip: Clip
    named: Mapping[int, str]

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.named.values())))

    @property
    def fps(self) -> float:
        return float(self.clip.meta.get("fps", 12.0))

    def frames(self, most: int = 0) -> Iterator[TrueFrame]:
        """The first `most` frames, 0 for all."""
        for index in range(min(len(self.clip), most or len(self.clip))):
            labels = self.clip.labels(index)
            masks = {object_id: labels == object_id for object_id in self.named}
            large = {i: mask for i, mask in masks.items() if mask.mean() >= MIN_AREA}
            small = {i: mask for i, mask in masks.items() if mask.any() and i not in large}
            yield TrueFrame(self.clip.image(index), large, small)


def open_clips(root: Path, known: Callable[[str], bool], field: str) -> list[TrueClip]:
    """The rendered clips of a folder; objects are called by `field` of their metadata, kind or name.

    known: whether a name can be looked for; objects of others are not. Raises CameraError for clips without names.
    """
    clips, asked = [], cache(known)
    for name in list_clips(root):
        clip = read_clip(root, name)
        if "objects" not in clip.meta:
            raise CameraError(
                f"clip {name}: expected the names of its objects (Clips/{name}.json), found none"
            )
        named = {int(each["id"]): str(each[field]) for each in clip.meta["objects"]}
        clips.append(TrueClip(clip, {i: n for i, n in named.items() if asked(n)}))
    return clips
