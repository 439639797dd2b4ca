"""The gate: no engine serves before it has been compared with the torch stages in float32.

Twice: each stage by itself, on the inputs that it has while the reference tracks a clip; then all of them as a
tracker, by the masks that they give on that clip.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..errors import EngineError
from ..models import TrackerModel
from ..models.stages import Stages
from ..tracking import ObjectPrompt, Tracker
from .fitted import Fitted, cast
from .judge import Judge
from .layers import worst_layers
from .ports import STAGES, Stage, stages_of
from .proposals import confident_prompts, mask_iou
from .report import Report, TrackFigures

Image = npt.NDArray[np.uint8]
Likeness = Callable[[str], nn.Module | None]


def compare(
    reference: TrackerModel,
    stages: Stages,
    frames: Sequence[Image],
    least_cosine: float,
    least_iou: float,
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
    judges = [Judge(inside[name], getattr(reference.stages, name), getattr(stages, name)) for name in STAGES]
    expected = _track(reference, Stages(*judges), clip, chosen, judges)
    faults = tuple(judge.fault for judge in judges if judge.fault)
    outputs = tuple(row for judge in judges for row in judge.figures())
    tracks = None
    if not faults:
        found = _track(reference, fit(stages, inside, stages_of(reference)), clip, chosen)
        tracks = _overlap(expected, found, [prompt.object_id for prompt in chosen])
    report = Report(least_cosine, least_iou, len(clip), outputs, tracks, faults)
    return report if report.passed else replace(report, layers=_layers(judges, likeness))


def fit(stages: Stages, inside: Mapping[str, Stage], outside: Mapping[str, Stage]) -> Stages:
    """Engines whose ports are `inside`'s, for a model whose stages are `outside`."""
    runs = zip(STAGES, stages, strict=True)
    return Stages(*(Fitted(run, inside[name], outside[name]) for name, run in runs))


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
    judges: Sequence[Judge] = (),
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


def _layers(judges: Sequence[Judge], likeness: Likeness | None) -> tuple[tuple[str, float], ...]:
    """Those of the stage that differs most that do so themselves, as (stage.layer, cosine)."""
    judge = min(judges, key=lambda judge: judge.lowest)
    name, run = judge.stage.name, judge.candidate
    other = run if isinstance(run, nn.Module) else likeness(name) if likeness else None
    if other is None or not isinstance(judge.reference, nn.Module):
        return ()
    inputs = judge.worst_inputs
    found = worst_layers(judge.reference, other, inputs, cast(inputs, judge.stage.inputs))
    return tuple((f"{name}.{layer}", cosine) for layer, cosine in found)
