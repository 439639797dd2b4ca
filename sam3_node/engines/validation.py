"""Compare engines with the torch stages in float32 before they serve: this is the accuracy check.

First each stage by itself: while the reference tracks a clip, a `StageComparator` runs the candidate on the reference's
own inputs and compares the outputs. Then all stages together, as they will serve: the candidates track the same clip in
the served model, whose modules preprocess and answer the prompts, and their masks are compared with the reference's.
Beside them the served model's own stages track the same clip, frame by frame, and both are timed. A `Report` holds
figures and verdict. `worst_layers` finds the layers in which two networks of one structure differ.
"""

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn

from ..errors import EngineError, ModelError
from ..files import read_regular
from ..models import TrackerModel
from ..models.pixels import mask_boxes
from ..models.sam.stages import Run, Stages, find_limits
from ..resumable import run_to_end
from ..settings import describe_faults
from ..tracking import ObjectPrompt, Tracker
from ..tracking.association import mask_iou
from ..tracking.everything import MAX_MASKS, EverythingOptions, segment_everything
from ..types import Image
from .specs import (
    STAGES,
    DtypeAdapter,
    StageSpec,
    TensorSpec,
    as_tuple,
    cast_tensors,
    tracker_stages,
)

MAX_REPORT_BYTES = 16 << 20
"""Size of the largest report of the accuracy check that is read. A larger one is ignored."""
_EXACT = ConfigDict(extra="forbid")
_log = logging.getLogger(__name__)


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
    """IoU of the engines' masks with the reference's masks, over the `masks` masks of a tracked clip."""

    mean_iou: float
    worst_iou: float
    worst_frame: int
    worst_object: int
    masks: int


@dataclass(frozen=True, slots=True)
class StageTime:
    """Milliseconds of a frame, medians over a clip: of a stage that may serve, and of torch's in its place.

    stage: its name, or "a step" for all stages together.
    """

    stage: str
    ms: float
    torch_ms: float


Clock = Callable[[torch.device], float]
"""Returns the seconds at which a device has finished all work that was given to it."""


def read_clock(device: torch.device) -> float:
    """Wait for a device, and return the seconds of a clock that never goes back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Report:
    """Figures and thresholds of an accuracy check.

    tracks: None if the engines could not track at all; `faults` says why. layers: the layers of a refused stage that
    differ most, as (stage.layer, cosine). tracked: False for a detector, which has no masks to compare. plans: SHA-256
    of the plan of each compared stage, empty if none came from plans. max_time: the largest ratio of a time to torch's;
    0 for any.
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
    times: tuple[StageTime, ...] = ()
    max_time: float = 0.0
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
        yield f"{'stage':<10}{'output':<15}{'cosine':>10}{'error':>10}{'frame':>7}"
        for row in self.outputs:
            yield f"{row.stage:<10}{row.output:<15}{row.cosine:>10.6f}{row.error:>10.2%}{row.frame:>7}"
        if self.tracks is not None:
            tracks = self.tracks
            yield (
                f"mask IoU of {tracks.masks} masks on {self.frames} frames: mean {tracks.mean_iou:.4f}, worst "
                f"{tracks.worst_iou:.4f} (frame {tracks.worst_frame}, object {tracks.worst_object})"
            )
        for timed in self.times:
            yield f"time of {timed.stage}: {timed.ms:.3g} ms, in torch {timed.torch_ms:.3g} ms"
        refusal = self.refusal()
        thresholds = f"cosine {self.min_cosine:g}" + (
            f" and mean IoU {self.min_iou:g}" if self.tracked else ""
        )
        yield f"passed: {thresholds} or more" if refusal is None else f"refused: {refusal}"

    def to_json(self) -> str:
        """Return the report as JSON, which `load` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def load(cls, path: Path | None) -> Self | None:
        """Read a report from a file; None where it is absent or damaged, with a warning if it is damaged."""
        try:
            return TypeAdapter(cls).validate_json(read_regular(path, MAX_REPORT_BYTES)) if path else None
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            _log.warning("%s is ignored, as it holds no report of the gate: %s", path, describe_faults(error))
            return None

    def _reasons(self) -> Iterator[str]:
        yield from self.faults
        for row in self.outputs:
            # `not >=` is also true for NaN
            if not row.cosine >= self.min_cosine:
                yield (
                    f"{row.stage}: cosine of {row.output} {_round_down(row.cosine)} on frame {row.frame}, "
                    f"below {self.min_cosine:g}"
                )
        if self.tracks is None:
            if self.tracked and not self.faults:
                yield "no mask of a tracked clip was compared"
        # this also refuses NaN
        elif not self.tracks.mean_iou >= self.min_iou:
            tracks = self.tracks
            yield (
                f"mean mask IoU {_round_down(tracks.mean_iou)}, below {self.min_iou:g} (worst {tracks.worst_iou:.4f} "
                f"on frame {tracks.worst_frame}, object {tracks.worst_object})"
            )
        for timed in self.times:
            if self.max_time and not timed.ms <= self.max_time * timed.torch_ms:
                yield (
                    f"{timed.stage} is slower here: {timed.ms:.3g} against {timed.torch_ms:.3g} ms; to serve it all "
                    "the same: --engine.max_time 0"
                )


def _round_down(value: float) -> str:
    """Format a figure rounded down, so that a refused one never reads as the threshold itself."""
    return f"{math.floor(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else str(value)


ModuleLookup = Callable[[str], nn.Module | None]
"""Returns the torch module that stands for the engine of a stage of this name; None if there is none."""


@torch.inference_mode()
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
    engines: bool = True,
    clock: Clock | None = None,
) -> Report:
    """Compare `stages` with the reference, a model in float32 whose stages are its own modules.

    frames: a clip, BGR uint8 [h, w, 3] each. dtype: of the inputs and outputs of `stages`. prompts: of the first
    frame; by default, what the reference itself segments there with confidence. find_module: gives the
    module whose layers are compared for a stage that is no torch module itself. served: the model in whose place
    `stages` will run, in its own dtype and with its own modules still there; by default, the reference. engines: False
    for torch stages in the dtype of `served`, which serve as they are. clock: times them in turns with `served`;
    by default, nothing is timed. Raises EngineError where there is nothing to compare, ModelError for weights without
    memory modules.
    """
    clip, clip_prompts = _prepare_clip(reference, frames, prompts)
    specs = tracker_stages(reference, dtype=dtype)
    pairs = zip(STAGES, reference.stages, stages, strict=True)
    comparators = [StageComparator(specs[name], own, other) for name, own, other in pairs]
    with without_tf32():
        expected = list(_track(reference, Stages(*comparators), clip, clip_prompts, comparators=comparators))
    faults = tuple(comparator.fault for comparator in comparators if comparator.fault)
    outputs = tuple(row for comparator in comparators for row in comparator.figures())
    tracks = None
    times = tuple[StageTime, ...]()
    # outputs that are not finite, or of another shape, would spoil the tracking
    if not faults:
        chain = served or reference
        chain_clip = [chain.preprocess(frame) for frame in frames]
        fitted = fit_stages(stages, specs, chain) if engines else stages
        with without_tf32():
            masks, times = _track_beside_torch(chain, fitted, chain_clip, clip_prompts, engines, clock)
        tracks = _compare_masks(expected, masks, [prompt.object_id for prompt in clip_prompts])
    report = Report(min_cosine, min_iou, len(clip), outputs, tracks, faults, times=times)
    # only a refusal needs the layers, which take two more passes
    return report if report.passed else replace(report, layers=_find_worst_layers(comparators, find_module))


def _prepare_clip(
    reference: TrackerModel, frames: Sequence[Image], prompts: Sequence[ObjectPrompt] | None
) -> tuple[list[Tensor], Sequence[ObjectPrompt]]:
    if reason := reference.capabilities.why_not_engines():
        raise ModelError(f"{reference.name} {reason}")
    clip = [reference.preprocess(frame) for frame in frames]
    if len(clip) < 2:
        raise EngineError(f"expected a clip of 2 frames or more to compare engines on, found {len(clip)}")
    prompts = find_confident_prompts(reference, clip[0]) if prompts is None else prompts
    if not prompts:
        raise EngineError(
            "the reference segments nothing on the first frame; expected a clip with objects on it"
        )
    return clip, prompts


def fit_stages(stages: Stages, specs: Mapping[str, StageSpec], model: TrackerModel) -> Stages:
    """Return engines of these specs in the form in which they replace the modules of a model."""
    outside = tracker_stages(model)
    runs = zip(STAGES, stages, strict=True)
    return Stages(*(DtypeAdapter(run, specs[name], outside[name]) for name, run in runs))


class StageComparator:
    """A stage that returns the reference's outputs, and compares a candidate's outputs on the same inputs.

    stage: the spec of the candidate. frame: set it to the number of the frame, for the figures. fault: set where the
    candidate's outputs cannot be compared at all; the candidate does not run again then.
    """

    def __init__(self, stage: StageSpec, reference: Run, candidate: Run) -> None:
        self.stage = stage
        self.reference = reference
        self.candidate = candidate
        self.limits = find_limits(candidate)._replace(any_width=False, full_from=None)
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
            # no cosine is as bad as a fault, so the layers of this stage are the ones to compare
            self.lowest = float("-inf")
            self.worst_inputs = inputs
            return
        # objects that share memories: each slot of a group is an object
        expected = self._split_groups(expected)
        outputs = self._split_groups(outputs)
        comparable = self._select_objects(expected, outputs)
        for spec, left, right in zip(self.stage.outputs, expected, outputs, strict=True):
            if left.ndim == 1:
                # on the host, because they are kept for the whole clip
                pairs = self._scalars.setdefault(spec.name, [])
                pairs.append((left.float().cpu(), right.float().cpu(), self.frame))
            else:
                self._compare_tensors(spec, left[comparable], right[comparable], inputs)

    def _split_groups(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return outputs by object: [G, slots, ...] of a decoder of groups becomes [G * slots, ...]."""
        presence = [spec for spec in self.stage.outputs if spec.name == "presence"]
        if not presence or len(presence[0].shape) == 1:
            return outputs
        return tuple(output.flatten(0, 1) for output in outputs)

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
            self._rows[spec.name] = replace(worse, error=max(before.error, now.error))
            if now.cosine < self.lowest:
                self.lowest = now.cosine
                self.worst_inputs = inputs

    def _compare_scalars(self, name: str) -> OutputFigures:
        """Compare an output of one number for each object over the whole clip: a cosine needs more than one number."""
        pairs = self._scalars[name]
        left = torch.cat([pair[0] for pair in pairs])
        right = torch.cat([pair[1] for pair in pairs])
        frame = max(pairs, key=lambda pair: (pair[0] - pair[1]).abs().max().item())[2]
        return OutputFigures(self.stage.name, name, cosine(left, right), _relative_error(left, right), frame)


def _relative_error(expected: Tensor, outputs: Tensor) -> float:
    """Return the largest difference as a fraction of the largest expected value."""
    # an output of zeros alone must not divide by 0
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((expected - outputs).abs().max() / scale).item()


def _find_fault(stage: StageSpec, expected: Sequence[Tensor], outputs: Sequence[Tensor], frame: int) -> str:
    """Say why outputs cannot be compared; return an empty text if they can."""
    if len(outputs) != len(stage.outputs):
        return f"{stage.name}: expected {len(stage.outputs)} outputs, found {len(outputs)}"
    for spec, left, right in zip(stage.outputs, expected, outputs, strict=True):
        if (right.dtype, right.shape) != (spec.dtype, left.shape):
            kind = _describe_kind(right.dtype, right)
            expected_kind = _describe_kind(spec.dtype, left)
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


class TimedStage:
    """A stage that adds up the seconds that its calls take, with the device's work."""

    def __init__(self, run: Run, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._seconds = 0.0
        self.limits = find_limits(run)

    def __call__(self, *inputs: Tensor) -> Any:
        start = self._clock()
        outputs = self._run(*inputs)
        self._seconds += self._clock() - start
        return outputs

    def take_ms(self) -> float:
        """Return the milliseconds of all calls since the last time that they were taken."""
        seconds = self._seconds
        self._seconds = 0.0
        return 1e3 * seconds


def _track_beside_torch(
    model: TrackerModel,
    stages: Stages,
    clip: Sequence[Tensor],
    prompts: Sequence[ObjectPrompt],
    engines: bool,
    clock: Clock | None,
) -> tuple[list[Tensor], tuple[StageTime, ...]]:
    """Track the clip with `stages`, and with the model's own on the same frames; return the masks and the times.

    The times are of engines together, because they serve together, and of each torch stage that is not the model's own.
    Without a clock there are none.
    """
    few_shapes = engines or None
    if clock is None:
        return list(_track(model, stages, clip, prompts, few_shapes)), ()
    read = partial(clock, model.device)
    own = model.stages
    mine, theirs = ([TimedStage(run, read) for run in side] for side in (stages, own))
    tracks = _track(model, Stages(*mine), clip, prompts, few_shapes)
    beside = _track(model, Stages(*theirs), clip, prompts, None)
    masks = []
    frames = list[list[list[float]]]()
    for mask, _ in zip(tracks, beside, strict=True):  # in turns, so that a change of the load meets both
        masks.append(mask)
        frames.append([[stage.take_ms() for stage in side] for side in (mine, theirs)])
    ms = np.array(frames[1:])  # [frames, 2, stages]; on the first frame nothing is read yet
    if engines:
        groups = {"a step": range(len(STAGES))}
    else:
        groups = {STAGES[i]: range(i, i + 1) for i, run in enumerate(stages) if run is not own[i]}
    medians = {name: np.median(ms[..., group].sum(axis=-1), axis=0) for name, group in groups.items()}
    return masks, tuple(StageTime(name, *pair.tolist()) for name, pair in medians.items())


def _track(
    model: TrackerModel,
    stages: Stages,
    clip: Sequence[Tensor],
    prompts: Sequence[ObjectPrompt],
    few_shapes: bool | None = True,
    comparators: Sequence[StageComparator] = (),
) -> Iterator[Tensor]:
    """Track the clip; yield the masks of each frame, bool [N, 4h, 4w] on the CPU, in the order of the prompts."""
    # a shallow copy, so that the caller's model keeps its own stages
    model = copy.copy(model)
    model.serve_by(stages, few_shapes)
    tracker = Tracker(model, max_objects=len(prompts))
    for number, pixels in enumerate(clip):
        for comparator in comparators:
            comparator.frame = number
        tracks = tracker.step(pixels, prompts if number == 0 else ())
        yield (tracks.logits > 0).cpu()


def _compare_masks(
    expected: Sequence[Tensor], masks: Sequence[Tensor], ids: Sequence[int]
) -> TrackFigures | None:
    """Return figures over all pairs of masks except pairs of empty masks; None if no pair is left."""
    ious = [
        (mask_iou(left[None], right[None]).item(), frame, object_id)
        for frame, pair in enumerate(zip(expected, masks, strict=True))
        for object_id, left, right in zip(ids, *pair, strict=True)
        if left.any() or right.any()
    ]
    if not ious:
        return None
    # tuples compare by IoU first, so the least one also names its frame and object
    return TrackFigures(sum(iou for iou, _, _ in ious) / len(ious), *min(ious), len(ious))


def _find_worst_layers(
    comparators: Sequence[StageComparator], find_module: ModuleLookup | None
) -> tuple[tuple[str, float], ...]:
    """Return the layers that differ most in the stage that differs most, as (stage.layer, cosine)."""
    worst = min(comparators, key=lambda comparator: comparator.lowest)
    name = worst.stage.name
    run = worst.candidate
    module = run if isinstance(run, nn.Module) else find_module(name) if find_module else None
    if module is None or not isinstance(worst.reference, nn.Module):
        return ()
    inputs = worst.worst_inputs
    layers = worst_layers(worst.reference, module, inputs, cast_tensors(inputs, worst.stage.inputs))
    return tuple((f"{name}.{layer}", cosine) for layer, cosine in layers)


LAYERS = 5
"""Number of layers that a refusal names: those whose outputs differ most."""
SAMPLE_SIZE = 65536
"""Values of each layer's output that are compared, evenly spread over it. It bounds the memory of the comparison."""

Outputs = dict[str, list[Tensor]]


def worst_layers(
    reference: nn.Module,
    other: nn.Module,
    inputs: Sequence[Tensor],
    other_inputs: Sequence[Tensor] | None = None,
    count: int = LAYERS,
) -> list[tuple[str, float]]:
    """Return the `count` layers whose outputs differ most, the lowest cosine first: (name, cosine).

    Layers are the leaf modules of the reference that `other` has under the same name. `inputs` belong to one forward
    pass, `other_inputs` are the same in the dtypes of `other`. Of large outputs it compares an evenly spread sample.
    """
    others = dict(other.named_modules())
    layers = reference.named_modules()
    names = [
        name
        for name, layer in layers
        if name in others and layer is not reference and not [*layer.children()]
    ]
    expected = _record_outputs(reference, names, inputs)
    outputs = _record_outputs(other, names, inputs if other_inputs is None else other_inputs)
    cosines = ((name, _lowest_cosine(expected[name], outputs[name])) for name in names if expected[name])
    return sorted(cosines, key=lambda item: item[1])[:count]


def cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine of two tensors of the same size as vectors, in float32.

    NaN if one holds values that are not finite. Two tensors of zeros only count as equal: 1.
    """
    left = first.flatten().float()
    right = second.flatten().float()
    if not (left.any() or right.any()):
        return 1.0
    return F.cosine_similarity(left, right, dim=0).clamp(max=1.0).item()


@torch.inference_mode()
def _record_outputs(module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]) -> Outputs:
    """Run one forward pass; return the outputs of each named layer, one tensor for each call of the layer."""
    outputs: Outputs = {name: [] for name in names}
    with ExitStack() as stack:
        for name in names:
            hook = partial(_record, outputs[name])
            stack.enter_context(module.get_submodule(name).register_forward_hook(hook))
        module(*inputs)
    return outputs


def _record(samples: list[Tensor], layer: nn.Module, inputs: Any, output: Any) -> None:
    """Append a sample of each of a layer's outputs."""
    values = output if isinstance(output, tuple) else (output,)
    samples.extend(_sample(value) for value in values if isinstance(value, Tensor))


def _sample(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    # a slice would keep the whole output in memory
    return flat[:: max(1, flat.numel() // SAMPLE_SIZE)].clone().float().cpu()


def _lowest_cosine(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Return the lowest cosine over all calls; -1, which sorts first, for NaN or another shape."""
    # the other network may call a layer more or fewer times
    values = [
        cosine(*pair) for pair in zip(expected, outputs, strict=False) if pair[0].shape == pair[1].shape
    ]
    # only NaN differs from itself
    return min((value if value == value else -1.0 for value in values), default=-1.0)


MAX_PROMPTS = 4
"""Objects that are prompted on the clip of the accuracy check, if the clip has no boxes of its own."""
EVERYTHING = EverythingOptions(grid=6, min_iou=0.0, min_stability=0.0, max_overlap=0.5, most=MAX_MASKS)
"""Options of the search that finds these objects: a coarse grid, and no limit of quality."""
MIN_AREA = 0.002
"""Share of the image below which an object is small: others are preferred."""
MAX_AREA = 0.4
"""Share of the image above which an object is large: others are preferred."""


@torch.inference_mode()
def find_confident_prompts(model: TrackerModel, pixels: Tensor) -> list[ObjectPrompt]:
    """Return a box prompt for each of up to MAX_PROMPTS objects on one frame, pixels [1, 3, S, S], the surest first.

    They are of what `segment_everything` finds, as far as their boxes give a mask. Medium sizes come before others.
    """
    features = model.encode(pixels)
    found = run_to_end(segment_everything(model, features, EVERYTHING))
    masks = found.logits > 0
    area = masks.flatten(1).float().mean(1)
    # the sort is stable, so among equals the surer masks stay first
    is_unusual = (area < MIN_AREA) | (area > MAX_AREA)
    boxes = mask_boxes(masks) * (model.image_size / masks.shape[-1])
    surest = boxes[is_unusual.int().argsort(stable=True)[:MAX_PROMPTS]]
    if not len(surest):
        return []
    # a box may give no mask where a point gave one
    is_seen = (Tracker(model, 1).propose(features, surest).logits > 0).flatten(1).any(1)
    return [ObjectPrompt(number, box=box) for number, box in enumerate(surest[is_seen].tolist(), 1)]
