"""Count what the masks of a frame cost beside a GPU: copied bytes, operations of the device, CPU time of the host.

    python -m tools.bench.latency.masks                      SAM 3's logits, 1920x1080, 1 to 128 objects

Each object covers 5 % of the frame. "logits" is the way without masks on the device: float32 logits are copied, and the
host rasterises them. "bits" is the way of `perception.output_masks` on a GPU: a table with boxes and level sets, then
the bits of the regions. The operations of the device run on the CPU here; they are counted, and their time is left
out. Times are process CPU time of one thread, medians of interleaved runs.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple
from unittest.mock import patch

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sam3_node.perception import output_masks
from sam3_node.perception.output_masks import PackedMasks, copy_masks, rasterize
from sam3_node.tracking.host_copy import HostCopy
from sam3_node.tracking.track_history import compare_levels, find_level_sets
from sam3_node.types import Instance, Mask, MaskFrame
from sam3_node.wire import pack_masks
from tools.bench.common import RUNS, Figures, make_parser, objects_text, time_cpu
from tools.bench.counting import Counts, count

SIDE = 288
CHANNELS = 256
SHARE = 0.05
FRAME = (1080, 1920)
OBJECTS = (1, 4, 16, 64, 128)


class Scene(NamedTuple):
    """Tracks of N objects on one frame."""

    logits: Tensor
    """bfloat16 [N, SIDE, SIDE]"""
    columns: list[Tensor]
    """float32 [N] or [N, C]: scores, visibility, presence, pointers"""


def make_scene(objects: int) -> Scene:
    """Make tracks of discs anywhere in the frame."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    radius = SIDE * (SHARE / np.pi) ** 0.5
    places = random.uniform(radius, SIDE - radius, (objects, 2))
    discs = [np.clip(radius - np.hypot(x - left, y - top), -20, 20) for left, top in places]
    zeros = torch.zeros(objects)
    columns = [zeros, torch.ones(objects), zeros, torch.zeros(objects, CHANNELS)]
    return Scene(torch.from_numpy(np.stack(discs)).bfloat16(), columns)


class DeviceCost(NamedTuple):
    """Cost of the masks of one frame on a device, and what is left for the host."""

    copies: list[int]
    """bytes of each copy to the host"""
    counts: Counts
    bits: npt.NDArray[np.uint8]
    """level sets"""
    masks: PackedMasks


def count_device(scene: Scene) -> DeviceCost:
    """Make the masks of a scene as on a GPU, and count."""
    copies: list[int] = []
    made: list[PackedMasks] = []

    def copy(values: Tensor) -> HostCopy:
        copies.append(values.numel() * values.element_size())
        return HostCopy(values)

    def make() -> None:
        low, _ = copy_masks(scene.logits, scene.columns)
        assert low.boxes is not None
        made.append(output_masks.rasterize_on_device(low.logits, low.boxes, FRAME))

    with patch.multiple(output_masks, HostCopy=copy, rasterizes=lambda device: True):
        counts = count(make)
    levels = torch.stack(compare_levels(scene.logits), dim=1).flatten(2)
    return DeviceCost(copies, counts, output_masks.pack_bits(levels).numpy(), made[0])


def time_host(ways: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Return the CPU time of each way in ms, the median of interleaved runs."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, run in ways.items():
            spent[name].append(time_cpu(run))
    return {name: float(np.median(found)) for name, found in spent.items()}


def measure(objects: int, runs: int, figures: Figures) -> None:
    """Print and keep the figures for N objects."""
    scene = make_scene(objects)
    device = count_device(scene)
    logits = scene.logits.float().numpy()
    cells = len(compare_levels(scene.logits)[0][0].flatten())

    def from_bits() -> list[Mask]:
        output_masks.unpack_bits(device.bits, cells)
        return device.masks.read()

    def from_logits() -> list[Mask]:
        find_level_sets(logits)
        return [rasterize(one, FRAME) for one in logits]

    masks = from_bits()
    for mask, other in zip(masks, from_logits(), strict=True):
        assert mask.box == other.box
        assert np.array_equal(mask.crop, other.crop)
    instances = tuple(Instance(i, "", 1.0, "tracked", 0, 0, mask) for i, mask in enumerate(masks))
    frame = MaskFrame("cam0", 0, 0, FRAME[1], FRAME[0], instances=instances)
    spent = time_host({"logits": from_logits, "bits": from_bits, "packing": lambda: pack_masks(frame)}, runs)
    before = sum(column.numel() * 4 for column in (scene.logits, *scene.columns))
    what = f"masks of {objects_text(objects)}, SAM 3, 1920x1080"
    for name, value, unit in (
        ("copied as logits / as bits", before / sum(device.copies), "x"),
        ("host time for logits / for bits", spent["logits"] / spent["bits"], "x"),
        ("copied as logits", before / 1e6, "MB"),
        ("copied as bits", sum(device.copies) / 1e6, "MB"),
        ("kernels on the device", device.counts.kernels, "kernels"),
        ("memory traffic on the device", device.counts.traffic / 1e9, "GB"),
        ("CPU time of the host from logits", spent["logits"], "ms"),
        ("CPU time of the host from bits", spent["bits"], "ms"),
        ("CPU time of packing the message", spent["packing"], "ms"),
    ):
        figures.add(f"{what}, {name}", value, unit)


def main() -> None:
    args = make_parser(__doc__, RUNS).parse_args()
    figures = Figures("latency.masks")
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    with torch.inference_mode():
        for objects in OBJECTS:
            measure(objects, args.runs, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
