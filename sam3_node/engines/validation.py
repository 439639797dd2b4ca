"""One stage of the reference, and beside it the engine that is to take its place.

The gate: no engine serves before it has been compared with the torch stages in float32.

Twice: each stage by itself, on the inputs that it has while the reference tracks a clip; then all of them as a
tracker, by the masks that they give on that clip."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..errors import EngineError
from ..models import TrackerModel
from ..models.sam.stages import Run, Stages
from ..tracking import ObjectPrompt, Tracker
from .auto_prompts import confident_prompts, mask_iou
from .layer_diff import cosine, worst_layers
from .report import OutputFigures, Report, TrackFigures
from .specs import OBJECTS, STAGES, DtypeAdapter, StageSpec, TensorSpec, as_tuple, cast, stages_of


class StageComparator:
    """Runs as the reference's stage does; the candidate runs along on the same inputs and is compared.

    stage: the ports of the candidate. `frame` is the number of the frame, for whoever reads the figures. With
    `fault`, what the candidate gives is no answer at all, and it is not asked again.
    """

    def __init__(self, stage: StageSpec, reference: Run, candidate: Run) -> None:
        self.stage, self.reference, self.candidate = stage, reference, candidate
        self.frame = 0
        self.fault = ""
        self.lowest = float("inf")
        """Cosine of what differs most so far, on the inputs `worst_inputs`."""
        self.worst_inputs: tuple[Tensor, ...] = ()
        self._rows: dict[str, OutputFigures] = {}
        self._numbers: dict[str, list[tuple[Tensor, Tensor, int]]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        expected = self.reference(*inputs)
        if not self.fault:
            found = as_tuple(self.candidate(*cast(inputs, self.stage.inputs)))
            self._compare(inputs, as_tuple(expected), found)
        return expected

    def figures(self) -> Iterator[OutputFigures]:
        """Of each output that was compared, in the order of the ports."""
        for port in self.stage.outputs:
            if port.name in self._numbers:
                yield self._of_numbers(port.name)
            elif port.name in self._rows:
                yield self._rows[port.name]

    def _compare(
        self, inputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], found: tuple[Tensor, ...]
    ) -> None:
        self.fault = _fault(self.stage, expected, found, self.frame)
        if self.fault:
            self.lowest, self.worst_inputs = float("-inf"), inputs
            return
        agreed = self._agreed(expected, found)
        for port, left, right in zip(self.stage.outputs, expected, found, strict=True):
            if port.shape == (OBJECTS,):
                kept = self._numbers.setdefault(port.name, [])
                kept.append((left.float().cpu(), right.float().cpu(), self.frame))
            else:
                self._note(port, left[agreed], right[agreed], inputs)

    def _agreed(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
        """Which objects to compare in full: mask and pointer of one that is out of view for either are constants.

        Whether both see it, the presence itself tells.
        """
        names = [port.name for port in self.stage.outputs]
        if "presence" not in names:
            return torch.ones(len(expected[0]), dtype=torch.bool)
        index = names.index("presence")
        return ((expected[index] > 0) == (found[index] > 0)).cpu()

    def _note(self, port: TensorSpec, expected: Tensor, found: Tensor, inputs: tuple[Tensor, ...]) -> None:
        for left, right in zip(expected.float(), found.float(), strict=True):
            now = OutputFigures(
                self.stage.name, port.name, cosine(left, right), _error(left, right), self.frame
            )
            before = self._rows.get(port.name, now)
            worse = min(before, now, key=lambda row: row.cosine)
            self._rows[port.name] = OutputFigures(
                worse.stage, worse.output, worse.cosine, max(before.error, now.error), worse.frame
            )
            if now.cosine < self.lowest:
                self.lowest, self.worst_inputs = now.cosine, inputs

    def _of_numbers(self, name: str) -> OutputFigures:
        """One number an object: over the whole clip, since a direction takes more than one."""
        kept = self._numbers[name]
        left, right = torch.cat([item[0] for item in kept]), torch.cat([item[1] for item in kept])
        frame = max(kept, key=lambda item: (item[0] - item[1]).abs().max().item())[2]
        return OutputFigures(self.stage.name, name, cosine(left, right), _error(left, right), frame)


def _error(expected: Tensor, found: Tensor) -> float:
    """The largest difference as a part of the largest expected value."""
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((expected - found).abs().max() / scale).item()


def _fault(stage: StageSpec, expected: Sequence[Tensor], found: Sequence[Tensor], frame: int) -> str:
    """What makes an answer none at all; empty where it is one."""
    if len(found) != len(stage.outputs):
        return f"{stage.name}: expected {len(stage.outputs)} outputs, found {len(found)}"
    for port, left, right in zip(stage.outputs, expected, found, strict=True):
        if (right.dtype, right.shape) != (port.dtype, left.shape):
            return f"{stage.name}: expected {port.name} as {_kind(port.dtype, left)}, found {_kind(right.dtype, right)}"
        if not bool(torch.isfinite(right).all()):
            return (
                f"{stage.name}: {port.name} holds values that are not finite (NaN or inf), on frame {frame}"
            )
    return ""


def _kind(dtype: torch.dtype, tensor: Tensor) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(tensor.shape)}"


Image = npt.NDArray[np.uint8]
Likeness = Callable[[str], nn.Module | None]


def compare(
    reference: TrackerModel,
    stages: Stages,
    frames: Sequence[Image],
    min_cosine: float,
    min_iou: float,
    *,
    dtype: torch.dtype = torch.float32,
    prompts: Sequence[ObjectPrompt] | None = None,
    likeness: Likeness | None = None,
) -> Report:
    """Judge `stages` by the reference, a model in float32 whose stages are its own modules.

    frames: a clip, BGR uint8 [h, w, 3] each. dtype: the arithmetic of the ports of `stages`. prompts: of the first
    frame; left out, what the reference itself segments there with confidence. likeness: gives the torch module
    that stands for a stage of this name when layers are compared, or None; a stage that is a module stands for itself.
    Raises EngineError where there is nothing to compare, ModelError for weights that cannot track.
    """
    clip = [reference.preprocess(frame) for frame in frames]
    if len(clip) < 2:
        raise EngineError(f"expected a clip of 2 frames or more to judge engines by, found {len(clip)}")
    chosen = confident_prompts(reference, clip[0]) if prompts is None else prompts
    if not chosen:
        raise EngineError(
            "the reference segments nothing on the first frame; expected a clip with objects on it"
        )
    inside = stages_of(reference, dtype=dtype)
    judges = [
        StageComparator(inside[name], getattr(reference.stages, name), getattr(stages, name))
        for name in STAGES
    ]
    expected = _track(reference, Stages(*judges), clip, chosen, judges)
    faults = tuple(judge.fault for judge in judges if judge.fault)
    outputs = tuple(row for judge in judges for row in judge.figures())
    tracks = None
    if not faults:
        found = _track(reference, fit(stages, inside, stages_of(reference)), clip, chosen)
        tracks = _overlap(expected, found, [prompt.object_id for prompt in chosen])
    report = Report(min_cosine, min_iou, len(clip), outputs, tracks, faults)
    return report if report.passed else replace(report, layers=_layers(judges, likeness))


def fit(stages: Stages, inside: Mapping[str, StageSpec], outside: Mapping[str, StageSpec]) -> Stages:
    """Engines whose ports are `inside`'s, for a model whose stages are `outside`."""
    runs = zip(STAGES, stages, strict=True)
    return Stages(*(DtypeAdapter(run, inside[name], outside[name]) for name, run in runs))


@contextmanager
def without_tf32() -> Iterator[None]:
    """Convolutions of the reference in float32 proper, which cuDNN would shorten to 10 bits of mantissa."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@without_tf32()
@torch.inference_mode()
def _track(
    reference: TrackerModel,
    stages: Stages,
    clip: Sequence[Tensor],
    prompts: Sequence[ObjectPrompt],
    judges: Sequence[StageComparator] = (),
) -> list[Tensor]:
    """The masks of each frame, bool [N, 4h, 4w] on the CPU, in the order of the prompts."""
    model = copy.copy(reference)
    model.stages, model.static_shapes = stages, True  # engines read the whole bank
    tracker, masks = Tracker(model, max_objects=len(prompts)), []
    for number, pixels in enumerate(clip):
        for judge in judges:
            judge.frame = number
        tracks = tracker.step(pixels, prompts if number == 0 else ())
        masks.append((tracks.logits > 0).cpu())
    return masks


def _overlap(expected: Sequence[Tensor], found: Sequence[Tensor], ids: Sequence[int]) -> TrackFigures | None:
    """Over all masks but those that both leave empty; None where there are no others."""
    ious = [
        (mask_iou(*pair), frame, object_id)
        for frame, masks in enumerate(zip(expected, found, strict=True))
        for object_id, *pair in zip(ids, *masks, strict=True)
        if pair[0].any() or pair[1].any()
    ]
    if not ious:
        return None
    return TrackFigures(sum(iou for iou, _, _ in ious) / len(ious), *min(ious), len(ious))


def _layers(judges: Sequence[StageComparator], likeness: Likeness | None) -> tuple[tuple[str, float], ...]:
    """Those of the stage that differs most that do so themselves, as (stage.layer, cosine)."""
    judge = min(judges, key=lambda judge: judge.lowest)
    name, run = judge.stage.name, judge.candidate
    other = run if isinstance(run, nn.Module) else likeness(name) if likeness else None
    if other is None or not isinstance(judge.reference, nn.Module):
        return ()
    inputs = judge.worst_inputs
    found = worst_layers(judge.reference, other, inputs, cast(inputs, judge.stage.inputs))
    return tuple((f"{name}.{layer}", cosine) for layer, cosine in found)
