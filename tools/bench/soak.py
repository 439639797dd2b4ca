"""Memory over a long run: resident memory, and live tensors, after the first steps must not grow.

    python tools/bench/soak.py                  the tracker alone: 5,000 steps with 4 objects
    python tools/bench/soak.py --minutes 10     a camera and a node as processes besides, with 4 objects

Tiny random weights: the memory bank, the bookkeeping and the messages are the same as with large ones, only sooner.
The first 200 steps fill the bank and warm the allocators up. On a CPU tensor memory is what the garbage
collector's live tensors hold, storages counted once; on a GPU it is what torch has allocated there.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from _common import Processes, add_points, next_masks, save_tiny_checkpoint

from sam3_node.client import PerceptionClient
from sam3_node.models import load_tracker
from sam3_node.node.stats import rss_bytes
from sam3_node.tracking import ObjectPrompt, Tracker

WARM_STEPS = 200
OBJECTS = 4
FPS = 60
CLIP = 16  # frames, again and again


def tensor_bytes(device: torch.device) -> int:
    """Memory of all live tensors on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    storages = [
        found.untyped_storage() for found in gc.get_objects() if issubclass(type(found), torch.Tensor)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run_tracker(weights: Path, device: str, steps: int) -> Iterator[tuple[int, int, int]]:
    """Step number, resident bytes and tensor bytes, at the end of the warm-up and ten times from then on."""
    model = load_tracker(weights, device=device)
    tracker = Tracker(model, max_objects=OBJECTS)
    size = model.image_size
    clip = torch.randn(CLIP, 1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(model.device)
    prompts = [ObjectPrompt(i, points=[[size * (i + 1) / (OBJECTS + 1), size / 2]]) for i in range(OBJECTS)]
    for step in range(1, steps + 1):
        tracker.step(clip[step % CLIP], prompts if step == 1 else ())
        if step == WARM_STEPS or (step > WARM_STEPS and step % max(1, steps // 10) == 0):
            yield step, rss_bytes(), tensor_bytes(model.device)


def run_node(weights: Path, minutes: float) -> Iterator[tuple[int, int, int]]:
    """Frames stepped, resident bytes and frames skipped, after the warm-up and ten times from then on.

    One of the objects is replaced every second, which must cost nothing.
    """
    with Processes(SAM3_MODEL__NAME=str(weights), SAM3_MODEL__THREADS="1") as processes:
        processes.start("run")
        processes.start("camera", "scene:shapes", SAM3_CAMERA__FPS=str(FPS))
        with processes.client() as client:
            add_points(client, OBJECTS)
            while _stepped(client)[0] < WARM_STEPS:
                replace_oldest(client)
            yield _stepped(client)
            for _ in range(10):
                end_s = time.monotonic() + 6 * minutes
                while time.monotonic() < end_s:
                    replace_oldest(client)
                yield _stepped(client)


def _stepped(client: PerceptionClient) -> tuple[int, int, int]:
    status = client.status()
    camera = status["cameras"]["cam0"]
    return camera["stepped"], status["rss_bytes"], camera["skipped"]


def replace_oldest(client: PerceptionClient) -> None:
    """Remove an object and add another, then wait a second."""
    client.remove_object(client.list_objects()[0].id)
    masks = next_masks(client)
    client.add_object(points=[(masks.width / 2, masks.height / 2)])
    time.sleep(1)


def print_growth(rows: Iterator[tuple[int, int, int]], last: str) -> None:
    """Rows of (step, resident bytes, other) with what the first two have grown by since the first row."""
    print(f"   step    RSS MB   grown MB   {last}")
    first: tuple[int, int, int] | None = None
    for step, rss, other in rows:
        first = first or (step, rss, other)
        print(f"{step:7d} {rss / 1e6:9.1f} {(rss - first[1]) / 1e6:10.2f}   {other}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=0.0, help="of the whole node; 0 leaves it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        weights = save_tiny_checkpoint(Path(folder) / "tiny")
        print(f"tracker alone on {args.device}, {OBJECTS} objects")
        print_growth(run_tracker(weights, args.device, args.steps), "bytes in tensors")
        if args.minutes:
            print(f"\ncamera at {FPS} Hz and node, {OBJECTS} objects, one of them replaced every second")
            print_growth(run_node(weights, args.minutes), "frames skipped")


if __name__ == "__main__":
    main()
