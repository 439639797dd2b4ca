"""What the benchmarks share: tiny weights, real processes of the command line, percentiles."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame

PRESENT = 60.0  # presence bias: with random weights objects must stay in view
SEED = 0
RESULTS = Path(__file__).parent / "results"


def save_tiny_checkpoint(folder: Path) -> Path:
    """Save a SAM 3 tracker of some milliseconds a frame, seeded random weights whose masks are smooth regions."""
    import torch
    from transformers import Sam3TrackerVideoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    source = Sam3TrackerVideoModel(sam3_config()).eval().requires_grad_(False)
    decoder = source.mask_decoder
    decoder.pred_obj_score_head.proj_out.bias.fill_(PRESENT)
    for convolution in (decoder.conv_s0, decoder.conv_s1):
        convolution.weight.zero_()
        convolution.bias.zero_()
    for convolution in (decoder.upscale_conv1, decoder.upscale_conv2):
        weight = convolution.weight
        weight.copy_(20 * weight.mean(dim=(2, 3), keepdim=True).expand_as(weight))
    source.save_pretrained(folder)
    return folder


def sam3_config(hidden: int = 64, grid: int = 4, layers: int = 1, heads: int = 2, **backbone: object) -> Any:
    """A small SAM 3 tracker on grid x grid patches; `layers` of the memory read, `backbone` of the ViT."""
    from transformers import Sam3TrackerVideoConfig

    size = 14 * grid
    vit = {
        "model_type": "sam3_vit_model",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "image_size": size,
        "patch_size": 14,
        "window_size": grid // 2,
        "global_attn_indexes": [0],
        "pretrain_image_size": size,
    }
    return Sam3TrackerVideoConfig(
        vision_config={
            "model_type": "sam3_vision_model",
            "fpn_hidden_size": hidden,
            "backbone_feature_sizes": [[4 * grid] * 2, [2 * grid] * 2, [grid] * 2],
            "backbone_config": vit | backbone,
        },
        prompt_encoder_config={"hidden_size": hidden, "image_size": size, "patch_size": 14},
        mask_decoder_config={
            "hidden_size": hidden,
            "mlp_dim": 2 * hidden,
            "iou_head_hidden_dim": hidden,
            "num_attention_heads": heads,
        },
        image_size=size,
        memory_attention_hidden_size=hidden,
        memory_attention_feed_forward_hidden_size=2 * hidden,
        memory_attention_num_layers=layers,
        memory_attention_rope_feat_sizes=[grid, grid],
        memory_encoder_hidden_size=hidden,
        mask_downsampler_embed_dim=hidden,
        memory_fuser_embed_dim=hidden,
        memory_fuser_intermediate_dim=2 * hidden,
    )


class Processes:
    """Verbs of sam3-node as processes on endpoints of their own; all are ended at the end. A context manager."""

    def __init__(self, **settings: str) -> None:
        self.frames, self.masks, self.control = (f"tcp://127.0.0.1:{port}" for port in free_ports(3))
        endpoints = {
            "SAM3_TRANSPORT__FRAMES": self.frames,
            "SAM3_TRANSPORT__MASKS": self.masks,
            "SAM3_TRANSPORT__CONTROL": self.control,
        }
        self._environment = os.environ | endpoints | settings
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """Start a verb and wait for the line that says it is ready."""
        process = subprocess.Popen(
            [sys.executable, "-m", "sam3_node", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment | settings,
        )
        self._started.append(process)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"sam3-node {' '.join(arguments)} did not start: exit code {process.wait()}")
        return process

    def client(self, timeout_ms: int = 30000) -> PerceptionClient:
        return PerceptionClient(self.masks, self.control, timeout_ms=timeout_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._started):
            end(process)


class Saved:
    """Prints lines, and keeps them for a file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def write(self, name: str) -> None:
        path = RESULTS / f"{name}.txt"
        path.write_text("\n".join(self.lines) + "\n")
        print(f"wrote {path}", file=sys.stderr)


def end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, and wait."""
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for holder in sockets:
        holder.bind(("127.0.0.1", 0))
    ports = [holder.getsockname()[1] for holder in sockets]
    for holder in sockets:
        holder.close()
    return ports


def next_masks(client: PerceptionClient, timeout_ms: int = 60000) -> MaskFrame:
    """The next masks; ends the benchmark where none come."""
    masks = client.latest(timeout_ms)
    if masks is None:
        raise SystemExit(f"no masks came within {timeout_ms / 1000:.0f} s")
    return masks


def add_points(client: PerceptionClient, count: int) -> None:
    """Track `count` objects from points along the middle of the picture."""
    masks = next_masks(client)
    for i in range(count):
        client.add_object(points=[(masks.width * (i + 1) / (count + 1), masks.height / 2)])
    while len(next_masks(client).instances) < count:
        pass


def processor() -> str:
    """The CPU's name, and how many of its cores there are for this process."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` (0..1) of all lie."""
    return sorted(values)[int(part * (len(values) - 1))]
