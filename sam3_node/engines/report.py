"""What the gate found out about a set of engines, to be read, kept beside them, and acted upon."""

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
    """One output of one stage, on the reference's own inputs.

    cosine: the lowest over frames and objects, on frame `frame`. error: the largest difference, as a part of the
    largest value of the reference's output on that frame.
    """

    stage: str
    output: str
    cosine: float
    error: float
    frame: int


@dataclass(frozen=True, slots=True)
class TrackFigures:
    """Masks of the clip tracked by the engines, against those of the reference: IoU, over `masks` of them."""

    mean_iou: float
    worst_iou: float
    worst_frame: int
    worst_object: int
    masks: int


@dataclass(frozen=True, slots=True)
class Report:
    """What the gate found. Without `tracks` the engines were not fit to track at all: `faults` says why.

    `layers`: of a refused stage the layers that differ most, as (stage.layer, cosine). `tracked`: False of a detector,
    which has no masks to compare. `plans`: SHA-256 of the plan of each stage that was judged, where they are plans.
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
        """Whether these engines may serve."""
        return not any(self._reasons())

    def refusal(self) -> str | None:
        """Why they may not, naming stage, figure and threshold; None where they may."""
        reasons = list(self._reasons())
        if not reasons:
            return None
        said = "; ".join(reasons)
        if self.layers:
            named = ", ".join(f"{name} ({cosine:.4f})" for name, cosine in self.layers)
            said += f"; the layers that differ most (cosine): {named}"
        return said

    def lines(self) -> Iterator[str]:
        """The figures as a table, and the verdict."""
        yield f"{'stage':<10}{'output':<12}{'cosine':>10}{'error':>10}{'frame':>7}"
        for row in self.outputs:
            yield f"{row.stage:<10}{row.output:<12}{row.cosine:>10.6f}{row.error:>10.2%}{row.frame:>7}"
        if self.tracks is not None:
            found = self.tracks
            yield (
                f"mask IoU of {found.masks} masks on {self.frames} frames: mean {found.mean_iou:.4f}, worst "
                f"{found.worst_iou:.4f} (frame {found.worst_frame}, object {found.worst_object})"
            )
        refusal = self.refusal()
        asked = f"cosine {self.min_cosine:g}" + (f" and mean IoU {self.min_iou:g}" if self.tracked else "")
        yield f"passed: {asked} or more" if refusal is None else f"refused: {refusal}"

    def to_json(self) -> str:
        """Text for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report of such text; EngineError for any other."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            found = error.errors()[0]
            where = ".".join(map(str, found["loc"])) or "the whole"
            raise EngineError(
                f"expected a report of the gate, found another text ({where}: {found['msg']}); "
                "run `sam3-node engine check`"
            ) from error

    def _reasons(self) -> Iterator[str]:
        yield from self.faults
        for row in self.outputs:
            if not row.cosine >= self.min_cosine:
                yield (
                    f"{row.stage}: cosine of {row.output} {_below(row.cosine)} on frame {row.frame}, "
                    f"below {self.min_cosine:g}"
                )
        if self.tracks is None:
            if self.tracked and not self.faults:
                yield "no mask of a tracked clip was compared"
        elif not self.tracks.mean_iou >= self.min_iou:
            found = self.tracks
            yield (
                f"mean mask IoU {_below(found.mean_iou)}, below {self.min_iou:g} (worst {found.worst_iou:.4f} on "
                f"frame {found.worst_frame}, object {found.worst_object})"
            )


def _below(value: float) -> str:
    """Rounded down, so that what is refused never reads as the threshold itself."""
    return f"{math.floor(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else str(value)
