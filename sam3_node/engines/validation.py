"""The gate: engines are compared with the torch stages in float32 before they serve.

There are two comparisons. First each stage by itself: while the reference tracks a clip, a `StageComparator` runs the
candidate on the reference's own inputs and compares the outputs. Then all stages together, as they will serve: in the
served model, whose modules preprocess and answer the prompts, the candidates track the same clip. Their masks are
compared with those of the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EngineError, ModelError
from ..models import TrackerModel
from ..models.sam.stages import Run, Stages
from ..tracking import ObjectPrompt, Tracker
from ..tracking.association import mask_iou
from ..types import Image
from .auto_prompts import find_confident_prompts
from .layer_diff import cosine, worst_layers
from .report import OutputFigures, Report, TrackFigures
from .specs import (
    OBJECTS,
    STAGES,
    DtypeAdapter,
    SharedEncoder,
    StageSpec,
    TensorSpec,
    as_tuple,
    cast_tensors,
    has_trunk,
    tracker_stages,
)

ModuleLookup = Callable[[str], nn.Module | None]
"""Returns the torch module that stands for the engine of a stage of this name; None if there is none."""


def compare_stages(
    reference: TrackerModel,
    stages: Stages,
    frames: Sequence[Image],
    min_cosine: float,
    min_iou: float,
    *,
    dtype: torch.dtype = torch.float32,
    prompts: Sequence[ObjectPrompt] | None = None,
    find_module: ModuleLookup | None = None,
    served: TrackerModel | None = None,
) -> Report:
    """Compare `stages` with the reference, a model in float32 whose stages are its own modules.

    frames: a clip, BGR uint8 [h, w, 3] each. dtype: that of the inputs and outputs of `stages`. prompts: of the first
    frame; by default, what the reference itself segments there with confidence. find_module: gives the
    module whose layers are compared for a stage that is no torch module itself. served: the model in whose place
    `stages` will run, in its own dtype and with its own modules still there; by default, the reference. Raises
    EngineError where there is nothing to compare, ModelError for weights without memory modules.
    """
    if not reference.has_memory:
        raise ModelError(
            f"{reference.name} has no memory modules: expected weights that have them for engines"
        )
    clip = [reference.preprocess(frame) for frame in frames]
    if len(clip) < 2:
        raise EngineError(f"expected a clip of 2 frames or more to compare engines on, found {len(clip)}")
    clip_prompts = find_confident_prompts(reference, clip[0]) if prompts is None else prompts
    if not clip_prompts:
        raise EngineError(
            "the reference segments nothing on the first frame; expected a clip with objects on it"
        )
    specs = tracker_stages(reference, dtype=dtype)  # with the trunk, if the reference shares its own
    comparators = [
        StageComparator(specs[name], getattr(reference.stages, name), getattr(stages, name))
        for name in STAGES
    ]
    expected = _track(reference, Stages(*comparators), clip, clip_prompts, comparators)
    faults = tuple(comparator.fault for comparator in comparators if comparator.fault)
    outputs = tuple(row for comparator in comparators for row in comparator.figures())
    tracks = None
    if not faults:
        chain = served or reference
        chain_clip = [chain.preprocess(frame) for frame in frames]
        masks = _track(chain, fit_stages(stages, specs, chain), chain_clip, clip_prompts)
        tracks = _compare_masks(expected, masks, [prompt.object_id for prompt in clip_prompts])
    report = Report(min_cosine, min_iou, len(clip), outputs, tracks, faults)
    return report if report.passed else replace(report, layers=_find_worst_layers(comparators, find_module))


def fit_stages(stages: Stages, specs: Mapping[str, StageSpec], model: TrackerModel) -> Stages:
    """Return engines of these specs in the form in which they replace the modules of a model."""
    trunk = has_trunk(specs)
    outside = tracker_stages(model, trunk=trunk)
    runs = zip(STAGES, stages, strict=True)
    adapted = Stages(*(DtypeAdapter(run, specs[name], outside[name]) for name, run in runs))
    if not trunk:
        return adapted
    return adapted._replace(
        encode=SharedEncoder(stages.encode, specs["encode"], outside["encode"], model.encode_stage)
    )


class StageComparator:
    """A stage that returns the reference's outputs, and compares those of a candidate on the same inputs.

    stage: the spec of the candidate. frame: set it to the number of the frame, for the figures. fault: set where the
    candidate's outputs cannot be compared at all; the candidate does not run again then.
    """

    def __init__(self, stage: StageSpec, reference: Run, candidate: Run) -> None:
        self.stage, self.reference, self.candidate = stage, reference, candidate
        self.max_objects = getattr(candidate, "max_objects", None)  # see `Stages`
        self.frame = 0
        self.fault = ""
        self.lowest = float("inf")
        """Lowest cosine so far, on the inputs `worst_inputs`."""
        self.worst_inputs: tuple[Tensor, ...] = ()
        self._rows: dict[str, OutputFigures] = {}
        self._scalars: dict[str, list[tuple[Tensor, Tensor, int]]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        expected = self.reference(*inputs)
        if not self.fault:
            outputs = as_tuple(self.candidate(*cast_tensors(inputs, self.stage.inputs)))
            self._compare(inputs, as_tuple(expected), outputs)
        return expected

    def figures(self) -> Iterator[OutputFigures]:
        """Yield the figures of each output that was compared, in the order of the spec."""
        for spec in self.stage.outputs:
            if spec.name in self._scalars:
                yield self._compare_scalars(spec.name)
            elif spec.name in self._rows:
                yield self._rows[spec.name]

    def _compare(
        self, inputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
    ) -> None:
        self.fault = _find_fault(self.stage, expected, outputs, self.frame)
        if self.fault:
            self.lowest, self.worst_inputs = float("-inf"), inputs
            return
        comparable = self._select_objects(expected, outputs)
        for spec, left, right in zip(self.stage.outputs, expected, outputs, strict=True):
            if spec.shape == (OBJECTS,):
                pairs = self._scalars.setdefault(spec.name, [])
                pairs.append((left.float().cpu(), right.float().cpu(), self.frame))
            else:
                self._compare_tensors(spec, left[comparable], right[comparable], inputs)

    def _select_objects(self, expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        """Return a mask [N] of the objects to compare in full: those on whose presence both agree.

        Mask and pointer of an object that is out of view for one of them are constants. The output `presence` itself
        shows where they disagree.
        """
        names = [spec.name for spec in self.stage.outputs]
        if "presence" not in names:
            return torch.ones(len(expected[0]), dtype=torch.bool)
        index = names.index("presence")
        return ((expected[index] > 0) == (outputs[index] > 0)).cpu()

    def _compare_tensors(
        self, spec: TensorSpec, expected: Tensor, outputs: Tensor, inputs: tuple[Tensor, ...]
    ) -> None:
        for left, right in zip(expected.float(), outputs.float(), strict=True):
            now = OutputFigures(
                self.stage.name, spec.name, cosine(left, right), _relative_error(left, right), self.frame
            )
            before = self._rows.get(spec.name, now)
            worse = min(before, now, key=lambda row: row.cosine)
            self._rows[spec.name] = OutputFigures(
                worse.stage, worse.output, worse.cosine, max(before.error, now.error), worse.frame
            )
            if now.cosine < self.lowest:
                self.lowest, self.worst_inputs = now.cosine, inputs

    def _compare_scalars(self, name: str) -> OutputFigures:
        """Compare an output of one number for each object over the whole clip: a cosine needs more than one number."""
        pairs = self._scalars[name]
        left, right = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
        frame = max(pairs, key=lambda pair: (pair[0] - pair[1]).abs().max().item())[2]
        return OutputFigures(self.stage.name, name, cosine(left, right), _relative_error(left, right), frame)


def _relative_error(expected: Tensor, outputs: Tensor) -> float:
    """Return the largest difference as a fraction of the largest expected value."""
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((expected - outputs).abs().max() / scale).item()


def _find_fault(stage: StageSpec, expected: Sequence[Tensor], outputs: Sequence[Tensor], frame: int) -> str:
    """Say why outputs cannot be compared; return an empty text if they can."""
    if len(outputs) != len(stage.outputs):
        return f"{stage.name}: expected {len(stage.outputs)} outputs, found {len(outputs)}"
    for spec, left, right in zip(stage.outputs, expected, outputs, strict=True):
        if (right.dtype, right.shape) != (spec.dtype, left.shape):
            kind, expected_kind = _describe_kind(right.dtype, right), _describe_kind(spec.dtype, left)
            return f"{stage.name}: expected {spec.name} as {expected_kind}, found {kind}"
        if not bool(torch.isfinite(right).all()):
            return (
                f"{stage.name}: {spec.name} holds values that are not finite (NaN or inf), on frame {frame}"
            )
    return ""


def _describe_kind(dtype: torch.dtype, tensor: Tensor) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(tensor.shape)}"


@contextmanager
def without_tf32() -> Iterator[None]:
    """Run convolutions in true float32 within the block; cuDNN would otherwise shorten the mantissa to 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@without_tf32()
@torch.inference_mode()
def _track(
    model: TrackerModel,
    stages: Stages,
    clip: Sequence[Tensor],
    prompts: Sequence[ObjectPrompt],
    comparators: Sequence[StageComparator] = (),
) -> list[Tensor]:
    """Track the clip; return the masks of each frame, bool [N, 4h, 4w] on the CPU, in the order of the prompts."""
    model = copy.copy(model)
    model.stages, model.static_shapes = stages, True
    tracker, masks = Tracker(model, max_objects=len(prompts)), []
    for number, pixels in enumerate(clip):
        for comparator in comparators:
            comparator.frame = number
        tracks = tracker.step(pixels, prompts if number == 0 else ())
        masks.append((tracks.logits > 0).cpu())
    return masks


def _compare_masks(
    expected: Sequence[Tensor], masks: Sequence[Tensor], ids: Sequence[int]
) -> TrackFigures | None:
    """Return figures over all pairs of masks except those that are both empty; None if no pair is left."""
    ious = [
        (mask_iou(left[None], right[None]).item(), frame, object_id)
        for frame, pair in enumerate(zip(expected, masks, strict=True))
        for object_id, left, right in zip(ids, *pair, strict=True)
        if left.any() or right.any()
    ]
    if not ious:
        return None
    return TrackFigures(sum(iou for iou, _, _ in ious) / len(ious), *min(ious), len(ious))


def _find_worst_layers(
    comparators: Sequence[StageComparator], find_module: ModuleLookup | None
) -> tuple[tuple[str, float], ...]:
    """Return the layers that differ most in the stage that differs most, as (stage.layer, cosine)."""
    worst = min(comparators, key=lambda comparator: comparator.lowest)
    name, run = worst.stage.name, worst.candidate
    module = run if isinstance(run, nn.Module) else find_module(name) if find_module else None
    if module is None or not isinstance(worst.reference, nn.Module):
        return ()
    inputs = worst.worst_inputs
    layers = worst_layers(worst.reference, module, inputs, cast_tensors(inputs, worst.stage.inputs))
    return tuple((f"{name}.{layer}", cosine) for layer, cosine in layers)
