"""Counts the arithmetic, the memory traffic and the kernels of one frame step, without running it.

Frames and memories are fake: they have shapes, but no values, so that neither time nor a GPU is needed. FLOPs are those
of matrix products, convolutions and attention, two for each multiplication with addition. A kernel is an operation that
is no view; its traffic is the size of its inputs and outputs. The path is bfloat16's outside of compilers: its
fused attention takes values that are padded to the width of the keys. The read is also counted in float32, where plain
attention on a CPU takes them as they are. "static" is the read with static shapes, "engine" an engine's, with a mask.
"""

from importlib.util import find_spec

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sam3_node.models import TrackerModel
from sam3_node.models.sam.memory_attention import METHODS
from tools.bench.counting import Counts, count
from tools.bench.latency.step import CONFIGS, MODELS

RING = 6
READS = {"dynamic": (RING + 1, True), "static": (RING + 1, False), "engine": (RING + 1, False)}
"""Memories that are read, and whether none is masked."""


def build(name: str, dtype: torch.dtype) -> TrackerModel:
    """Make a model with random weights."""
    config = CONFIGS[name]()
    source = MODELS[type(config)](config).eval().requires_grad_(False).to(dtype)
    return TrackerModel(source, name=name, mean=[0.5] * 3, std=[0.5] * 3, has_memory=True)


def count_read(model: TrackerModel, objects: int, memories: int, unmasked: bool, masked_all: bool) -> Counts:
    """Count the read of `memories` memories and 16 pointers an object."""
    area = model.grid[0] * model.grid[1]
    pointers = model.max_pointers
    columns = memories + pointers if masked_all else pointers
    return count(
        lambda: model.stages.read(
            torch.empty(1, model.hidden, *model.grid, dtype=model.dtype),
            torch.empty(objects, memories, area, model.memory_channels, dtype=torch.bfloat16),
            torch.zeros(objects, memories, dtype=torch.int64),
            torch.empty(objects, pointers, model.hidden, dtype=model.dtype),
            torch.empty(objects, pointers),
            None if unmasked else torch.ones(objects, columns, dtype=torch.bool),
        )
    )


def count_stages(model: TrackerModel, objects: int = 1) -> dict[str, Counts]:
    """Count all stages of a step with N objects."""
    size = model.image_size
    dtype = model.dtype
    stages = model.stages
    pixels = torch.empty(1, 3, size, size, dtype=dtype)
    found = {"encode": count(lambda: stages.encode(pixels))}
    for name, (memories, unmasked) in READS.items():
        found[f"read, {name}"] = count_read(model, objects, memories, unmasked, name == "engine")
    height, width, channels = *model.grid, model.hidden
    top = torch.empty(objects, channels, height, width, dtype=dtype)
    fine = torch.empty(1, channels // 8, 4 * height, 4 * width, dtype=dtype)
    middle = torch.empty(1, channels // 4, 2 * height, 2 * width, dtype=dtype)
    found["decode"] = count(lambda: stages.decode(top, fine, middle))
    logits = torch.empty(objects, *model.mask_size, dtype=dtype)
    presence = torch.empty(objects, dtype=dtype)
    found["remember"] = count(lambda: stages.remember(top[:1], logits, presence))
    return found


def count_methods(name: str, objects: int) -> dict[str, Counts]:
    """Count the read of a full bank by each method, in float32 on a CPU and by kernels."""
    found = {}
    plain = build(name, torch.float32)
    fused = build(name, torch.bfloat16)
    ways = {"float32 on a CPU": plain}
    if find_spec("triton"):
        fused.memory_attention.use_kernels()
        ways["kernels"] = fused
    with FakeTensorMode(allow_non_fake_inputs=True):
        for method in METHODS:
            for way, model in ways.items():
                model.use_read(method)
                title = f"read, {way}" if method == "exact" else f"read, {way}, {method}"
                found[title] = count_read(model, objects, RING + 1, True, False)
    return found
