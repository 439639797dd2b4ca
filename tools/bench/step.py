"""The frame step against transformers' own streaming inference: same weights, same frames, in one run.

    python tools/bench/step.py                     nano, 1, 4 and 16 objects, and what compile and bf16 add
    python tools/bench/step.py --model small       the same of SAM 3's class, 4.5 M parameters
    python tools/bench/step.py --model full        Sam3TrackerVideoConfig() defaults, with parity

Weights are random, as neither time nor parity minds. Threads wait passively, as in the node. Steps of both alternate,
so that a noisy machine is noisy for both; ratios are of medians. Parity is checked on the way: the largest difference
of the logits of the first object, which both see alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

import torch
from _common import sam3_config
from transformers import (
    AutoConfig,
    Sam2VideoInferenceSession,
    Sam2VideoModel,
    Sam3TrackerVideoConfig,
    Sam3TrackerVideoInferenceSession,
    Sam3TrackerVideoModel,
)

from sam3_node.models import TrackerModel
from sam3_node.models.checkpoints import CLASSES, NANO
from sam3_node.tracking import ObjectPrompt, Tracker

PRESENT = 4.0  # random weights must not call every object absent
SESSIONS = {
    Sam2VideoModel: Sam2VideoInferenceSession,
    Sam3TrackerVideoModel: Sam3TrackerVideoInferenceSession,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "nano": lambda: AutoConfig.from_pretrained(NANO),
    "small": lambda: sam3_config(
        128, 18, 2, 4, hidden_size=192, intermediate_size=512, num_hidden_layers=6, global_attn_indexes=[2, 5]
    ),
    "full": Sam3TrackerVideoConfig,
}


def random_source(name: str, device: str) -> Any:
    """A tracker of transformers, seeded random weights."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    source = CLASSES[config.model_type](config).eval().requires_grad_(False)
    source.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(PRESENT)
    return source.to(device)


def points(count: int, size: int) -> list[list[float]]:
    return [[size * (0.2 + 0.6 * i / max(1, count)), size * 0.5] for i in range(count)]


class Ours:
    def __init__(self, model: TrackerModel, objects: int) -> None:
        self.tracker = Tracker(model, max_objects=objects)
        self.prompts = [
            ObjectPrompt(i, points=[xy]) for i, xy in enumerate(points(objects, model.image_size))
        ]

    def step(self, pixels: torch.Tensor) -> torch.Tensor:
        prompts, self.prompts = self.prompts, []
        return self.tracker.step(pixels, prompts).logits[0]


class Theirs:
    """transformers' streaming inference, all objects in one session."""

    def __init__(self, source: Any, objects: int) -> None:
        self.source, device = source, source.no_memory_embedding.device
        size = source.prompt_encoder.input_image_size
        self.session = SESSIONS[type(source)](
            video_height=size,
            video_width=size,
            inference_device=device,
            inference_state_device=device,
            video_storage_device=device,
            dtype=source.dtype,
        )
        for i, xy in enumerate(points(objects, size)):
            index = self.session.obj_id_to_idx(i)
            prompt = {
                "point_coords": torch.tensor([[[xy]]]),
                "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
            }
            self.session.add_point_inputs(index, 0, prompt)
            self.session.obj_with_new_inputs.append(i)

    def step(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.source(inference_session=self.session, frame=pixels).pred_masks[0, 0]


def timed(step: Callable[[torch.Tensor], torch.Tensor], pixels: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Milliseconds of one step, the device's work included, and its logits."""
    start = time.perf_counter()
    logits = step(pixels)
    if pixels.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, logits.float()


def clip(source: Any, frames: int) -> list[torch.Tensor]:
    size, device = source.prompt_encoder.input_image_size, source.no_memory_embedding.device
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(1, 3, size, size, generator=generator)
    return [
        (0.9 * image + 0.4 * torch.randn(image.shape, generator=generator)).to(device, source.dtype)
        for _ in range(frames)
    ]


def compare(source: Any, model: TrackerModel, objects: int, frames: int, warm: int) -> str:
    """One row of the table."""
    ours, theirs = Ours(model, objects), Theirs(source, objects)
    mine, peers, error = [], [], 0.0
    for i, pixels in enumerate(clip(source, frames)):
        a, logits = timed(ours.step, pixels)
        b, truth = timed(theirs.step, pixels)
        error = max(error, (logits - truth).abs().max().item())
        if i >= warm:
            mine.append(a)
            peers.append(b)
    median, peer = statistics.median(mine), statistics.median(peers)
    return f"{objects:7d} {median:10.1f} {peer:14.1f} {peer / median:8.2f}x {error:14.1e}"


def variants(source: Any, objects: int, frames: int, warm: int) -> None:
    """What bf16 and compile add, each against the float32 eager step in the same run."""
    print(f"\nvariants, {objects} objects       ms   of float32 eager")
    for name, dtype, compiled in (("bf16", torch.bfloat16, False), ("compile", torch.float32, True)):
        plain, other = Ours(stages(source), objects), Ours(stages(source, dtype, compiled), objects)
        times: dict[str, list[float]] = {"plain": [], "other": []}
        for i, pixels in enumerate(clip(source, frames)):
            a, b = timed(plain.step, pixels)[0], timed(other.step, pixels)[0]
            if i >= warm:
                times["plain"].append(a)
                times["other"].append(b)
        a, b = statistics.median(times["plain"]), statistics.median(times["other"])
        print(f"  {name:22s} {b:10.1f} {a / b:8.2f}x", flush=True)


def stages(source: Any, dtype: torch.dtype = torch.float32, compiled: bool = False) -> TrackerModel:
    copy = type(source)(source.config).eval()
    copy.load_state_dict(source.state_dict())
    model = TrackerModel(
        copy.to(source.device, dtype), name="bench", mean=[0.5] * 3, std=[0.5] * 3, can_track=True
    )
    if compiled:
        model.compile()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(CONFIGS), default="nano")
    parser.add_argument("--objects", type=int, nargs="+", default=None)
    parser.add_argument("--frames", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-variants", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    full = args.model == "full"
    frames = args.frames or (4 if full else 40)
    warm = 1 if full else 10
    source = random_source(args.model, args.device)
    parameters = sum(p.numel() for p in source.parameters()) / 1e6
    device = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {args.threads} threads"
    )
    print(f"{args.model}, {parameters:.1f} M parameters, float32, {device}, torch {torch.__version__}")
    print("objects    ours ms   transformers ms   ratio   largest logit difference")
    model = stages(source)
    for objects in args.objects or ([1] if full else [1, 4, 16]):
        print(compare(source, model, objects, frames, warm), flush=True)
    if not full and not args.no_variants:
        variants(source, 4, frames, warm)


if __name__ == "__main__":
    main()
