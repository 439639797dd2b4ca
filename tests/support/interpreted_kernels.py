"""Compare the Triton kernels of memory attention with their definition, in Triton's interpreter; print errors as JSON.

A program of its own, because TRITON_INTERPRET has to be set before triton is imported.
"""

import copy
import json
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sam3_node.models.sam import kernels
from sam3_node.models.sam.algebra import rotate
from sam3_node.models.sam.fp8 import MAX_E4M3
from tests.support.tiny import tiny_model

COUNT = 2
LENGTH = 150
WIDTH = 64
REGIONS = (70, 130, 20)
PLACES = [5, 65, 150]
"""Row of the rotation table of a memory's first token, number of its tokens, row of pointers."""


def measure_attention(dtype: torch.dtype, counts: list[list[int]], processors: int, shared: bool) -> float:
    """Return the largest difference of the kernels from attention in float64."""
    torch.manual_seed(0)
    kernels.count_processors = lambda device: processors
    wide = 128
    tokens = sum(REGIONS)
    layer = nn.Linear(WIDTH, wide).to(dtype)
    query = (torch.randn(1 if shared else COUNT, LENGTH, wide) * 2).to(dtype)
    x, value = (torch.randn(COUNT, tokens, WIDTH).to(dtype) for _ in range(2))
    phase = torch.rand(LENGTH + 7, wide // 2) * 2 * math.pi
    rotation = torch.stack([phase.cos(), phase.sin()], dim=-1)
    rows = torch.randint(0, len(rotation), (1 if shared else COUNT, tokens), dtype=torch.int32)
    # whole memories repeat rows of the table, and pointers have one
    rows[:, REGIONS[0] : sum(REGIONS[:2])] = PLACES[0] + torch.arange(REGIONS[1]) % PLACES[1]
    rows[:, sum(REGIONS[:2]) :] = PLACES[2]
    starts = [REGIONS[0], sum(REGIONS[:2])]
    valid = torch.tensor(counts, dtype=torch.int32)
    key = kernels.project_keys(
        x, layer.weight, layer.bias, rotation, rows[:, : REGIONS[0]], valid, starts, PLACES
    )
    turned = kernels.rotate_in_place(query.clone(), rotation).expand(COUNT, -1, -1)
    out = kernels.attend(turned, key, value, valid, starts, 4, False)
    return (out.double() - define(layer, query, x, value, rotation, rows, counts)).abs().max().item()


def define(
    layer: nn.Linear,
    query: Tensor,
    x: Tensor,
    value: Tensor,
    rotation: Tensor,
    rows: Tensor,
    counts: list[list[int]],
) -> Tensor:
    """Return the attention as it is defined, computed in float64."""
    key = layer.double()(x.double())
    turned = [
        rotate(part, turn)
        for part, turn in zip(key, rotation[rows.long()].expand(COUNT, -1, -1, -1), strict=True)
    ]
    query = rotate(query.double(), rotation[:LENGTH])
    scores = query @ torch.stack(turned).transpose(1, 2) * query.shape[-1] ** -0.5
    scores[..., : REGIONS[0]] += math.log(4)
    for some, valid in zip(scores, counts, strict=True):
        for part, used in zip(some.split(REGIONS, dim=-1), valid, strict=True):
            part[:, used:] = -math.inf
    return scores.softmax(-1) @ value.double()


def measure_quantise() -> float:
    """Return the largest difference, from torch's, of what the kernel rounds to FP8, relative from 1 on.

    It is taken before the rounding: Triton's interpreter halves values that round up to a power of two.
    """
    torch.manual_seed(0)
    x = (torch.randn(3, 1100) * 4).bfloat16()
    inverse = torch.tensor(50.0)
    out = torch.empty_like(x, dtype=torch.float32)
    total = x.numel()
    errors = []
    for gelu in (False, True):
        kernels._quantise[(2,)](x, inverse, out, total, GELU=gelu, LARGEST=MAX_E4M3, BLOCK=2048)
        values = F.gelu(x.float()) if gelu else x.float()
        right = (values * inverse).clamp(-MAX_E4M3, MAX_E4M3)
        errors.append(((out - right).abs() / right.abs().clamp(min=1)).max().item())
    assert kernels.quantise(x, inverse, False).dtype == torch.float8_e4m3fn
    return max(errors)


def count_projected() -> int:
    """Return how many keys are written of an object that has a few in each region; the others are left as NaN."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    layer = nn.Linear(WIDTH, 128)
    tokens = 1000
    rotation = torch.ones(1, 2, 64)
    inputs = torch.randn(1, tokens, WIDTH), layer.weight, layer.bias, rotation
    rows = torch.zeros(1, 256, dtype=torch.int32)
    counts = torch.tensor([[3, 70, 2]], dtype=torch.int32)
    key = kernels.project_keys(*inputs, rows, counts, [256, 900], [0, 1, 0])
    torch.use_deterministic_algorithms(False)
    return int(key.isfinite().all(dim=-1).sum())


def measure_read(method: str, family: str = "sam3") -> float:
    """Return the largest difference of a whole read by the kernels from torch's, beside values of about 3."""
    kernels.count_processors = lambda device: 3
    model = tiny_model(family)
    model.use_read(method)
    plain = model.memory_attention
    fused = copy.deepcopy(model.memory_attention)
    fused.use_kernels()
    torch.manual_seed(1)
    slots = 4
    pointers = 5
    valid = torch.ones(2, slots + pointers, dtype=torch.bool)
    valid[1, 2:slots] = valid[1, slots + 3 :] = False
    inputs = (
        torch.randn(1, model.hidden, *model.grid),
        torch.randn(2, slots, model.memory_tokens, model.memory_channels),
        torch.tensor([[0, 1, 2, 6], [1, 6, 0, 0]]),
        torch.randn(2, pointers, model.hidden),
        torch.arange(10.0).view(2, 5),
    )
    with torch.inference_mode():
        masked = (plain(*inputs, valid) - fused(*inputs, valid)).abs().max()
        whole = (plain(*inputs, None) - fused(*inputs, None)).abs().max()
    return max(masked.item(), whole.item())


@torch.no_grad()
def main() -> None:
    everything = [list(REGIONS)] * COUNT
    few = [[70, 130, 20], [0, 65, 3]]
    cpu = torch.device("cpu")
    found = {
        "all keys": measure_attention(torch.float32, everything, 1, False),
        "a length for each object": measure_attention(torch.float32, few, 1, False),
        "float16": measure_attention(torch.float16, few, 1, False),
        "keys split among blocks": measure_attention(torch.float32, few, 7, False),
        "parts without keys": measure_attention(torch.float32, [[0, 1, 0], [0, 0, 2]], 32, False),
        "a query shared by all": measure_attention(torch.float32, few, 7, True),
        **{f"read {method}": measure_read(method) for method in ("exact", "pooled", "sparse")},
        "read compressed": measure_read("exact", "edgetam"),
        "keys projected": count_projected(),
        "rounded to FP8": measure_quantise(),
        "all, by their own probe": kernels.measure_error(cpu, torch.float32, kernels.choose_launch(cpu)),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
