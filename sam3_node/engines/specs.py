"""Specifications of the stages that engines run: names, shapes and dtypes of every input and output.

All engines share these specs. The module makes them for a tracker, checks tensors against them, and
adapts an engine to a model that computes in another dtype.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..errors import EngineError
from ..models import TrackerModel
from ..models.capabilities import USUAL_OBJECTS
from ..models.sam.stages import Run, find_limits
from ..tracking.memory import MemoryBank, get_rule

# the dimensions that vary
OBJECTS = "objects"
MEMORIES = "memories"
IMAGES = "images"
POINTS = "points"
HEIGHT = "height"
WIDTH = "width"
MIN_MEMORIES = 2
"""Least memories of an object that a read takes at once: of one prompted frame and one other."""
STAGES = ("encode", "read", "decode", "remember")
ALIGNMENT = 256  # bytes, of every tensor that TensorRT reads


class Sizes(NamedTuple):
    """Sizes of the dimensions that vary."""

    objects: int = 1
    memories: int = 0
    images: int = 1
    points: int = 3
    """of a prompt"""
    height: int = 90
    """of an image, pixels"""
    width: int = 120


class TensorSpec(NamedTuple):
    """Name, shape and dtype of an input or output. A dimension is a number, a name, or "memories + 16"."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype

    def shape_for(self, *sizes: int) -> tuple[int, ...]:
        """Return the shape for the fields of a `Sizes`, of which those at the end may be left out."""
        named = Sizes(*sizes)._asdict()
        return tuple(
            sum(named[part] if part in named else int(part) for part in str(side).split(" + "))
            for side in self.shape
        )


class StageSpec(NamedTuple):
    """A stage to export or build. `module` takes `inputs` in order and returns one tensor or a tuple, as `outputs`."""

    name: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_memories: int = 0
    """of an object, for a stage that takes MIN_MEMORIES or more"""
    usual_objects: int = USUAL_OBJECTS

    @property
    def varies(self) -> bool:
        """True if the stage runs for any number of objects or images."""
        return any(isinstance(side, str) for spec in self.inputs for side in spec.shape)

    def examples(self, objects: int = 2, seed: int = 0, memories: int | None = None) -> tuple[Tensor, ...]:
        """Make inputs of the right shapes and dtypes on the module's device, by default with the most memories.

        Their values are random.
        """
        generator = torch.Generator().manual_seed(seed)
        device = next(chain(self.module.buffers(), self.module.parameters())).device
        # one image more: an export must not take images and objects for the same dimension
        sizes = Sizes(objects, self.max_memories if memories is None else memories, objects + 1)
        return tuple(_make_example(spec, sizes, generator).to(device) for spec in self.inputs)


def tracker_stages(
    model: TrackerModel, bank_size: int = 7, dtype: torch.dtype | None = None
) -> Mapping[str, StageSpec]:
    """Specify the four stages of `model.stages` by name, for a memory bank of `bank_size` frames.

    Weights without memory modules have the stage "encode" alone. dtype: the dtype that an engine of them computes in.
    By default it is the model's own. The encoder of SAM 3 also returns what a detector may share.
    """
    number = dtype or model.dtype
    (height, width) = model.grid
    channels = model.hidden
    image = TensorSpec("top", (1, channels, height, width), number)
    fine = TensorSpec("fine", (1, channels // 8, 4 * height, 4 * width), number)
    middle = TensorSpec("middle", (1, channels // 4, 2 * height, 2 * width), number)
    features = [fine, middle, image]
    if model.trunk is not None:
        depth = model.trunk.get_buffer("position").shape[-1]
        features.append(TensorSpec("trunk", (1, depth, height, width), number))
    # objects that share memories come as groups; their prompts are decoded on features of their own
    shared = model.capabilities.shared
    if model.capabilities.has_prompt_features:
        features += [spec._replace(name=f"prompt_{spec.name}") for spec in (fine, middle, image)]
    side = model.image_size
    modules = cast("tuple[nn.Module, ...]", model.stages)  # no engine has replaced them yet
    pixels = TensorSpec("pixels", (1, 3, side, side), number)
    encode = StageSpec("encode", modules[0], (pixels,), tuple(features))
    if model.capabilities.why_not_engines():
        return {encode.name: encode}
    memory = (model.memory_tokens, model.memory_channels)
    kept = torch.bfloat16 if model.rounds_memories else number
    # a bank for one object: its widths do not depend on the number of objects
    slots, pointers = MemoryBank(model, 1, bank_size, get_rule("recent")).widths
    read = TensorSpec("read", (OBJECTS, channels, height, width), number)
    logits = TensorSpec("logits", (OBJECTS, *shared, *model.mask_size), number)
    presence = TensorSpec("presence", (OBJECTS, *shared), number)
    used = [TensorSpec("used", (OBJECTS, *shared), torch.bool)] if shared else []
    prompted = [spec._replace(name="prompted") for spec in used]
    bank = (
        TensorSpec("memory", (OBJECTS, MEMORIES, *memory), kept),
        TensorSpec("offset", (OBJECTS, MEMORIES), torch.int64),
        TensorSpec("pointers", (OBJECTS, pointers, model.pointer_width), number),
        TensorSpec("pointer_age", (OBJECTS, pointers), torch.float32),
        TensorSpec("valid", (OBJECTS, f"{MEMORIES} + {pointers}"), torch.bool),
    )
    decoded = (
        logits,
        TensorSpec("iou", (OBJECTS, *shared), number),
        presence,
        TensorSpec("pointer", (OBJECTS, *shared, channels), number),
    )
    remembered = TensorSpec("remembered", (OBJECTS, *memory), kept)
    stages = (
        encode,
        StageSpec("read", modules[1], (image, *bank), (read,), slots),
        StageSpec("decode", modules[2], (read, fine, middle, *used), decoded),
        StageSpec("remember", modules[3], (image, logits, presence, *prompted), (remembered,)),
    )
    usual = model.capabilities.usual_rows
    return {stage.name: stage._replace(usual_objects=usual) for stage in stages}


def _make_example(spec: TensorSpec, sizes: Sizes, generator: torch.Generator) -> Tensor:
    shape = spec.shape_for(*sizes)
    # all memories are valid, as in a full bank
    if spec.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if not spec.dtype.is_floating_point:
        return torch.zeros(shape, dtype=spec.dtype)
    return torch.randn(shape, generator=generator).to(spec.dtype)


def find_sizes(stage: StageSpec, inputs: Sequence[Tensor], max_objects: int, device: torch.device) -> Sizes:
    """Check inputs of a stage, and return their sizes: one object where the stage does not vary.

    Raises EngineError unless number, shapes, dtypes and devices fit the stage. It converts nothing.
    """
    if len(inputs) != len(stage.inputs):
        raise EngineError(f"{stage.name}: expected {len(stage.inputs)} inputs, found {len(inputs)}")
    found = {OBJECTS: 1, MEMORIES: 0}
    for spec, tensor in zip(stage.inputs, inputs, strict=True):
        if not isinstance(tensor, Tensor):
            found_type = type(tensor).__name__
            raise EngineError(f"{stage.name}: {spec.name}: expected a tensor, found {found_type}")
    # the first input for all objects gives the sizes; every input is checked against them below
    for spec, tensor in zip(stage.inputs, inputs, strict=True):
        if OBJECTS in spec.shape and tensor.ndim == len(spec.shape):
            found |= {str(side): size for side, size in zip(spec.shape, tensor.shape, strict=True)}
            break
    objects = found[OBJECTS]
    memories = found[MEMORIES]
    if not 1 <= objects <= max_objects:
        raise EngineError(
            f"{stage.name}: built for 1 to {max_objects} objects, found {objects}; build for more: "
            "sam3-node engine build --tracker.max_objects N"
        )
    if stage.max_memories and not MIN_MEMORIES <= memories <= stage.max_memories:
        raise EngineError(
            f"{stage.name}: expected {MIN_MEMORIES} to {stage.max_memories} memories of an object, found {memories}"
        )
    sizes = Sizes(objects, memories)
    for spec, tensor in zip(stage.inputs, inputs, strict=True):
        _check_tensor(stage, spec, tensor, sizes, device)
    return sizes


def _check_tensor(
    stage: StageSpec, spec: TensorSpec, tensor: Tensor, sizes: Sizes, device: torch.device
) -> None:
    shape = spec.shape_for(*sizes)
    if tensor.shape != shape or tensor.dtype != spec.dtype or tensor.device != device:
        raise EngineError(
            f"{stage.name}: {spec.name}: expected {list(shape)} {spec.dtype} on {device}, "
            f"found {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )


def ensure_aligned(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous and aligned for every engine, else a copy that is."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return allocate_aligned(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def allocate_aligned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a contiguous tensor that is aligned for every engine; torch aligns those on a CPU to 64 bytes alone."""
    size = math.prod(shape) * dtype.itemsize
    # as much more as the start may have to move up
    block = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -block.data_ptr() % ALIGNMENT
    return block[start : start + size].view(dtype).view(shape)


class DtypeAdapter:
    """An engine that runs instead of a stage, where the model around it computes in another dtype.

    `run` gets tensors in the dtypes of the spec `inside`. The caller gets them in the dtypes of the spec `outside`.
    """

    def __init__(self, run: Run, inside: StageSpec, outside: StageSpec) -> None:
        self.run = run
        self.inside = inside
        self.outside = outside
        self.limits = find_limits(run)

    def __call__(self, *inputs: Tensor) -> Any:
        results = as_tuple(self.run(*cast_tensors(inputs, self.inside.inputs)))
        outputs = cast_tensors(results, self.outside.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


def cast_tensors(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Return the tensors in the dtypes of their specs."""
    return tuple(tensor.to(spec.dtype) for tensor, spec in zip(tensors, specs, strict=True))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return a stage's outputs as a tuple, also where it returned a single tensor."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
