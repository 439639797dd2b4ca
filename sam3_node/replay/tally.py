"""What a replay has done so far, counted, as it is kept with each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ..types import MaskFrame


@dataclass(slots=True)
class Tally:
    """`counts` are those of a Player; `frames` have masks, by camera; `objects` are labels by camera and id; `work_s`
    is the time that it took, over all runs."""

    counts: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    objects: dict[str, dict[str, str]] = field(default_factory=dict)
    work_s: float = 0.0

    def add(self, masks: MaskFrame) -> None:
        """Take note of one frame's masks."""
        self.frames[masks.camera] += 1
        known = self.objects.setdefault(masks.camera, {})
        for instance in masks.instances:
            known[str(instance.id)] = instance.label

    def plain(self) -> dict[str, Any]:
        """What `of` takes: maps, numbers and text."""
        return {
            "counts": dict(self.counts),
            "frames": dict(self.frames),
            "objects": self.objects,
            "work_s": round(self.work_s, 3),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """The tally that `plain` was asked of; an empty one of an empty map."""
        if not plain:
            return cls()
        return cls(
            Counter(plain["counts"]), Counter(plain["frames"]), dict(plain["objects"]), plain["work_s"]
        )
