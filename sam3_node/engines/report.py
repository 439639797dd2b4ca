"""Reports of the gate: the figures of a comparison with torch, the verdict, and their text and JSON forms."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import EngineError

_EXACT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class OutputFigures:
    """Figures of one output of one stage, on the reference's own inputs.

    cosine: the lowest over frames and objects, found on frame `frame`. error: the largest difference, as a fraction of
    the largest value of the reference's output on that frame.
    """

    stage: str
    output: str
    cosine: float
    error: float
    frame: int


@dataclass(frozen=True, slots=True)
class TrackFigures:
    """IoU of the engines' masks with those of the reference, over the `masks` masks of a tracked clip."""

    mean_iou: float
    worst_iou: float
    worst_frame: int
    worst_object: int
    masks: int


@dataclass(frozen=True, slots=True)
class Report:
    """Figures and thresholds of a gate run.

    tracks: None if the engines could not track at all; `faults` says why. layers: the layers of a refused stage that
    differ most, as (stage.layer, cosine). tracked: False for a detector, which has no masks to compare. plans: SHA-256
    of the plan of each compared stage, empty if none came from plans.
    """

    min_cosine: float
    min_iou: float
    frames: int
    outputs: tuple[OutputFigures, ...]
    tracks: TrackFigures | None
    faults: tuple[str, ...] = ()
    layers: tuple[tuple[str, float], ...] = ()
    tracked: bool = True
    plans: Mapping[str, str] = field(default_factory=dict)
    version: Literal[1] = 1
    __pydantic_config__: ClassVar[ConfigDict] = _EXACT

    @property
    def passed(self) -> bool:
        """True if these engines may serve."""
        return not any(self._reasons())

    def refusal(self) -> str | None:
        """Return why they may not serve, with stage, figure and threshold; None if they may."""
        reasons = list(self._reasons())
        if not reasons:
            return None
        text = "; ".join(reasons)
        if self.layers:
            named = ", ".join(f"{name} ({cosine:.4f})" for name, cosine in self.layers)
            text += f"; the layers that differ most (cosine): {named}"
        return text

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table of the figures, then the verdict."""
        yield f"{'stage':<10}{'output':<12}{'cosine':>10}{'error':>10}{'frame':>7}"
        for row in self.outputs:
            yield f"{row.stage:<10}{row.output:<12}{row.cosine:>10.6f}{row.error:>10.2%}{row.frame:>7}"
        if self.tracks is not None:
            tracks = self.tracks
            yield (
                f"mask IoU of {tracks.masks} masks on {self.frames} frames: mean {tracks.mean_iou:.4f}, worst "
                f"{tracks.worst_iou:.4f} (frame {tracks.worst_frame}, object {tracks.worst_object})"
            )
        refusal = self.refusal()
        thresholds = f"cosine {self.min_cosine:g}" + (
            f" and mean IoU {self.min_iou:g}" if self.tracked else ""
        )
        yield f"passed: {thresholds} or more" if refusal is None else f"refused: {refusal}"

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a report from the text that `to_json` made. Raises EngineError for any other text."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the whole"
            raise EngineError(
                f"expected a report of the gate, found another text ({field}: {first['msg']}); "
                "run `sam3-node engine check`"
            ) from error

    def _reasons(self) -> Iterator[str]:
        yield from self.faults
        for row in self.outputs:
            if not row.cosine >= self.min_cosine:
                yield (
                    f"{row.stage}: cosine of {row.output} {_round_down(row.cosine)} on frame {row.frame}, "
                    f"below {self.min_cosine:g}"
                )
        if self.tracks is None:
            if self.tracked and not self.faults:
                yield "no mask of a tracked clip was compared"
        elif not self.tracks.mean_iou >= self.min_iou:
            tracks = self.tracks
            yield (
                f"mean mask IoU {_round_down(tracks.mean_iou)}, below {self.min_iou:g} (worst {tracks.worst_iou:.4f} "
                f"on frame {tracks.worst_frame}, object {tracks.worst_object})"
            )


def _round_down(value: float) -> str:
    """Format a figure rounded down, so that a refused one never reads as the threshold itself."""
    return f"{math.floor(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else str(value)
