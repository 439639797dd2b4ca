"""What each stage takes and gives by name, shape and dtype: the one description that all engines share.

What an engine is given: checked against the ports of its stage, and where it can be read.

An engine in the place of a stage, where the model around it computes in another dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import EngineError
from ..models import TrackerModel
from ..models.sam.stages import Run
from ..models.yolo.config import STRIDES
from ..models.yolo.network import YoloWorld
from ..tracking.memory import MemoryBank
from ..tracking.selection import get_rule

OBJECTS = "objects"  # the one dimension that varies
STAGES = ("encode", "read", "decode", "remember")


class TensorSpec(NamedTuple):
    """A tensor that goes in or comes out. A dimension is a number, or OBJECTS."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype

    def sized(self, objects: int) -> tuple[int, ...]:
        """The shape for so many objects."""
        return tuple(objects if side == OBJECTS else int(side) for side in self.shape)


class StageSpec(NamedTuple):
    """A stage to export or build: `module` takes `inputs` in order and gives `outputs`, a tuple or the only one."""

    name: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def varies(self) -> bool:
        """Whether it runs for any number of objects."""
        return any(OBJECTS in port.shape for port in self.inputs)

    def examples(self, objects: int = 2, seed: int = 0) -> tuple[Tensor, ...]:
        """Inputs of the right shapes, on the module's device; of no meaning."""
        generator = torch.Generator().manual_seed(seed)
        device = next(iter(self.module.buffers())).device
        return tuple(_example(port, objects, generator).to(device) for port in self.inputs)


def stages_of(
    model: TrackerModel, bank_size: int = 7, dtype: torch.dtype | None = None
) -> Mapping[str, StageSpec]:
    """The four stages of `model.stages` by name, with the shapes of a bank of `bank_size` frames read in full.

    dtype: the arithmetic of an engine of them, the model's own if left out.
    """
    number, (height, width), channels = dtype or model.dtype, model.grid, model.hidden
    area, wide = height * width, model.memory_channels
    slots, pointers = MemoryBank(model, 1, bank_size, get_rule("recent")).widths
    image = TensorSpec("top", (1, channels, height, width), number)
    fine = TensorSpec("fine", (1, channels // 8, 4 * height, 4 * width), number)
    middle = TensorSpec("middle", (1, channels // 4, 2 * height, 2 * width), number)
    read = TensorSpec("read", (OBJECTS, channels, height, width), number)
    logits = TensorSpec("logits", (OBJECTS, *model.mask_size), number)
    presence = TensorSpec("presence", (OBJECTS,), number)
    bank = (
        TensorSpec("memory", (OBJECTS, slots, area, wide), torch.bfloat16),
        TensorSpec("offset", (OBJECTS, slots), torch.int64),
        TensorSpec("pointers", (OBJECTS, pointers, channels), number),
        TensorSpec("pointer_age", (OBJECTS, pointers), torch.float32),
        TensorSpec("valid", (OBJECTS, slots + pointers), torch.bool),
    )
    decoded = (
        logits,
        TensorSpec("iou", (OBJECTS,), number),
        presence,
        TensorSpec("pointer", (OBJECTS, channels), number),
    )
    side = model.image_size
    pixels = TensorSpec("pixels", (1, 3, side, side), number)
    remembered = TensorSpec("remembered", (OBJECTS, area, wide), torch.bfloat16)
    modules = model.stages
    found = (
        StageSpec("encode", _module(modules.encode), (pixels,), (fine, middle, image)),
        StageSpec("read", _module(modules.read), (image, *bank), (read,)),
        StageSpec("decode", _module(modules.decode), (read, fine, middle), decoded),
        StageSpec("remember", _module(modules.remember), (image, logits, presence), (remembered,)),
    )
    return {stage.name: stage for stage in found}


def detector_stage(
    net: YoloWorld, phrases: int, size: tuple[int, int], dtype: torch.dtype | None = None
) -> StageSpec:
    """YOLO-World for frames of `size` (H, W) and so many phrases, whose vectors go in with each frame.

    dtype: of the vectors and the arithmetic of an engine, the network's own if left out. To ask for fewer phrases,
    repeat one. Choosing among overlapping boxes is not part of it. Raises EngineError for
    no phrase, or sides that are not multiples of the network's coarsest stride.
    """
    height, width = size
    if phrases < 1 or any(side < 1 or side % STRIDES[-1] for side in size):
        raise EngineError(
            f"detect: expected at least one phrase and sides that are multiples of {STRIDES[-1]}; "
            f"found {phrases} and {height} x {width}"
        )
    anchors = sum((height // stride) * (width // stride) for stride in STRIDES)
    number = dtype or net.backbone.stem.conv.weight.dtype
    return StageSpec(
        "detect",
        net,
        (
            TensorSpec("pixels", (1, 3, height, width), torch.float32),
            TensorSpec("text", (phrases, net.config.text_channels), number),
        ),
        (
            TensorSpec("boxes", (1, anchors, 4), torch.float32),
            TensorSpec("scores", (1, anchors, phrases), torch.float32),
        ),
    )


def _module(run: object) -> nn.Module:
    if not isinstance(run, nn.Module):
        raise TypeError("expected the stages of a model that no engine has changed")
    return run


def _example(port: TensorSpec, objects: int, generator: torch.Generator) -> Tensor:
    shape = port.sized(objects)
    if port.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if port.dtype == torch.int64:
        return torch.zeros(shape, dtype=torch.int64)
    return torch.randn(shape, generator=generator).to(port.dtype)


ALIGNMENT = 256  # bytes, of every tensor that TensorRT reads


def objects_of(stage: StageSpec, inputs: Sequence[Tensor], most_objects: int, device: torch.device) -> int:
    """How many objects `inputs` are of, 1 where the stage does not vary. Raises EngineError unless they fit its ports.

    Nothing is converted: a dtype or device that is not the port's is an error.
    """
    if len(inputs) != len(stage.inputs):
        raise EngineError(f"{stage.name}: expected {len(stage.inputs)} inputs, found {len(inputs)}")
    objects = 1
    for port, tensor in zip(stage.inputs, inputs, strict=True):
        if not isinstance(tensor, Tensor):
            raise EngineError(f"{stage.name}: {port.name}: expected a tensor, found {type(tensor).__name__}")
        if OBJECTS in port.shape and tensor.ndim == len(port.shape):
            objects = tensor.shape[port.shape.index(OBJECTS)]
            break
    if not 1 <= objects <= most_objects:
        raise EngineError(
            f"{stage.name}: built for 1 to {most_objects} objects, found {objects}; build for more: "
            "sam3-node engine build --tracker.max_objects N"
        )
    for port, tensor in zip(stage.inputs, inputs, strict=True):
        _check(stage, port, tensor, objects, device)
    return objects


def placed(tensor: Tensor) -> Tensor:
    """The tensor where any engine can read it: itself if it is contiguous and aligned, else a copy."""
    whole = tensor.contiguous()
    return whole if whole.data_ptr() % ALIGNMENT == 0 else whole.clone()


def _check(stage: StageSpec, port: TensorSpec, tensor: Tensor, objects: int, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise EngineError(f"{stage.name}: {port.name}: expected a tensor, found {type(tensor).__name__}")
    shape = port.sized(objects)
    if tensor.shape != shape or tensor.dtype != port.dtype or tensor.device != device:
        raise EngineError(
            f"{stage.name}: {port.name}: expected {list(shape)} {port.dtype} on {device}, "
            f"found {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )


class DtypeAdapter:
    """Runs `run` with tensors of the dtypes that `inside` has, and gives them back in those of `outside`."""

    def __init__(self, run: Run, inside: StageSpec, outside: StageSpec) -> None:
        self.run, self.inside, self.outside = run, inside, outside

    def __call__(self, *inputs: Tensor) -> Any:
        found = as_tuple(self.run(*cast(inputs, self.inside.inputs)))
        outputs = cast(found, self.outside.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


def cast(tensors: Sequence[Tensor], ports: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Tensors in the dtypes of their ports."""
    return tuple(tensor.to(port.dtype) for tensor, port in zip(tensors, ports, strict=True))


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    """What a stage gave, be it one tensor or several."""
    return (found,) if isinstance(found, Tensor) else tuple(found)
