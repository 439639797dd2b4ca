"""Kernels alone: copies, matrix products in bfloat16 and FP8, and fused attention by backend; then the GPU tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.bench.common import ROOT

from .journal import Journal, Scale, median_ms

FRAME_BYTES = 1080 * 1920 * 3
MASK_BYTES = 16 * 288 * 288 * 4
PRODUCTS = {"qkv": (1024, 3072), "projection": (1024, 1024), "mlp in": (1024, 4736), "mlp out": (4736, 1024)}
"""Inputs and outputs of the linear layers of SAM 3's encoder."""
READ_WIDTH, KEYS = 256, (36352, 51964)  # 7 and 10 memories with their pointers
HEADS = {"windows": (144, 576), "global": (16, 5184)}
"""Heads times windows, and tokens, of the encoder's attentions of 64 channels."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
GPU_TESTS_S = 240
KINDS = ("passed", "failed", "errors", "skipped", "deselected")


def run(journal: Journal) -> None:
    """Measure all kernels."""
    scale = journal.scale
    journal.measure("copies", "GB/s", partial(copy_rates, scale))
    for name, sizes in PRODUCTS.items():
        width, out = (scale.channels(size) for size in sizes)
        journal.measure(f"product, {name}, bfloat16", "TFLOP/s", partial(bfloat16_rate, scale, width, out))
        for rows in (False, True):
            what = "scales by row and column" if rows else "one scale each"
            journal.measure(
                f"product, {name}, FP8, {what}", "TFLOP/s", partial(fp8_rate, scale, width, out, rows)
            )
    for figure, rate in attentions(scale):
        journal.measure(f"attention, {figure}", "TFLOP/s", rate)
    journal.measure("tests on a GPU", "tests", partial(count_tests, scale))


def copy_rates(scale: Scale) -> dict[str, float]:
    """Return the rates of copies of a 1080p frame to the device, and of 16 masks' logits back."""
    rates, pinned = {}, scale.device.type == "cuda"
    for name, size in (("frame", FRAME_BYTES), ("logits", MASK_BYTES)):
        for pin in (False, True) if pinned else (False,):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
            there = torch.empty(size, dtype=torch.uint8, device=scale.device)
            pair = (there, host) if name == "frame" else (host, there)
            ms = median_ms(partial(_copy, *pair), scale)
            rates[f"{name}, {'pinned' if pin else 'pageable'}"] = size / ms / 1e6
    return rates


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def bfloat16_rate(scale: Scale, width: int, out: int) -> float:
    """Return the rate of a linear layer with bias."""
    x = torch.randn(scale.rows, width, device=scale.device, dtype=torch.bfloat16)
    weight, bias = torch.randn_like(x[:1]).expand(out, -1).contiguous(), x.new_zeros(out)
    ms = median_ms(lambda: F.linear(x, weight, bias), scale)
    return 2 * scale.rows * width * out / ms / 1e9


def fp8_rate(scale: Scale, width: int, out: int, by_row: bool) -> float:
    """Return the rate of the same product of FP8 numbers, with bfloat16 outputs."""
    left = torch.randn(scale.rows, width, device=scale.device).to(torch.float8_e4m3fn)
    right = torch.randn(out, width, device=scale.device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=scale.device)
    scales = (
        (one.expand(scale.rows, 1).contiguous(), one.expand(1, out).contiguous()) if by_row else (one, one)
    )
    multiply = partial(torch._scaled_mm, left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=False)
    return 2 * scale.rows * width * out / median_ms(multiply, scale) / 1e9


def attentions(scale: Scale) -> Iterator[tuple[str, partial[float]]]:
    """Yield each attention and how to measure its rate: the read's, masked or not, and the encoder's."""
    for backend in BACKENDS if scale.device.type == "cuda" else ["flash"]:
        for keys in KEYS:
            for masked in (False, True):
                for count in scale.counts[:3]:
                    shapes = ((count, 1, scale.rows), scale.tokens(keys), READ_WIDTH)
                    what = (
                        f"read, {keys} keys, {'masked' if masked else 'no mask'}, {count} objects, {backend}"
                    )
                    yield what, partial(attention_rate, scale, backend, *shapes, masked)
        for name, (heads, tokens) in HEADS.items():
            shapes = ((1, heads, scale.tokens(tokens)), scale.tokens(tokens), 64)
            yield f"encoder, {name}, {backend}", partial(attention_rate, scale, backend, *shapes, False)


def attention_rate(
    scale: Scale, backend: str, shape: tuple[int, int, int], keys: int, width: int, masked: bool
) -> float:
    """Return the rate of softmax(Q K) V for queries [*shape, width]."""
    query = torch.randn(*shape, width, device=scale.device, dtype=torch.bfloat16)
    key = torch.randn(*shape[:2], keys, width, device=scale.device, dtype=torch.bfloat16)
    mask = torch.ones(shape[0], 1, 1, keys, device=scale.device, dtype=torch.bool) if masked else None
    with sdpa_kernel([BACKENDS[backend], *([SDPBackend.MATH] if scale.dry else [])]):
        ms = median_ms(lambda: F.scaled_dot_product_attention(query, key, key, mask), scale)
    return 4 * query.numel() * keys / ms / 1e9


def count_tests(scale: Scale) -> dict[str, float]:
    """Run the tests that need a GPU; return how many passed, failed and so on.

    A dry run takes a file that has none of them, and counts what it leaves out.
    """
    where = "tests/test_geometry.py" if scale.dry else "tests"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GPU_TESTS_S)
    words = done.stdout.replace(",", " ").split()
    if not scale.dry:
        print(done.stdout[-4000:], file=sys.stderr)
    return {kind: float(words[words.index(kind) - 1]) if kind in words else 0.0 for kind in KINDS}
