"""Ground truth of rendered clips for tracking by name: the masks of each frame by object id, and the objects' names."""

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


class MotFrame(NamedTuple):
    """One frame and its true masks, bool [h, w] by object id."""

    image: npt.NDArray[np.uint8]
    """BGR [h, w, 3]"""
    counted: Mapping[int, Bools]
    """objects large enough to be counted"""
    slivers: Mapping[int, Bools]
    """objects of which too little is visible to be counted"""


@dataclass(frozen=True)
class TrueClip:
    """A clip and the names under which its objects are looked for."""

    clip: Clip
    named: Mapping[int, str]
    """by object id: the kind ("mug") or the full name ("red mug")"""

    @property
    def prompts(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(sorted(set(self.named.values())))

    @property
    def fps(self) -> float:
        """Frames per second of the clip."""
        return float(self.clip.meta.get("fps", 12.0))

    def frames(self, max_frames: int = 0) -> Iterator[MotFrame]:
        """Read the first `max_frames` frames; 0 for all."""
        for index in range(min(len(self.clip), max_frames or len(self.clip))):
            labels = self.clip.labels(index)
            masks = {object_id: labels == object_id for object_id in self.named}
            large = {i: mask for i, mask in masks.items() if mask.mean() >= MIN_AREA}
            small = {i: mask for i, mask in masks.items() if mask.any() and i not in large}
            yield MotFrame(self.clip.image(index), large, small)


def open_clips(root: Path, can_detect: Callable[[str], bool], field: str) -> list[TrueClip]:
    """Open the rendered clips of a folder; `field` of their metadata, kind or name, names the objects.

    Objects whose names `can_detect` rejects are left out. Raises CameraError for clips without names.
    """
    clips, is_detectable = [], cache(can_detect)
    for name in list_clips(root):
        clip = read_clip(root, name)
        if "objects" not in clip.meta:
            raise CameraError(
                f"clip {name}: expected the names of its objects (Clips/{name}.json), found none"
            )
        named = {int(entry["id"]): str(entry[field]) for entry in clip.meta["objects"]}
        clips.append(TrueClip(clip, {i: name for i, name in named.items() if is_detectable(name)}))
    return clips
