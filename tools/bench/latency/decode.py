"""Time the decoding of messages: masks of 1 and 16 instances, and the header of a frame.

    python -m tools.bench.latency.decode                     no GPU needed

Each figure is the least of many short runs on one core, in microseconds. "lazy" is what a client does: the pixels of a
mask are decoded when they are first used.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np

from sam3_node.types import Frame, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import pack_frame, pack_masks, unpack_frame, unpack_masks

WIDTH, HEIGHT = 640, 480
RUNS, CALLS = 150, 5


def make_masks(count: int) -> MaskFrame:
    """Return masks of `count` objects, each a rectangle."""
    instances = []
    for index in range(count):
        full = np.zeros((HEIGHT, WIDTH), dtype=np.bool_)
        full[100:200, 20 + 30 * index : 80 + 30 * index] = True
        mask = Mask.from_full(full)
        instances.append(Instance(index + 1, "red mug", 0.9, "tracked", 5, 0, mask, confidence=0.9))
    return MaskFrame(
        *("cam0", 7, 123_456_789, WIDTH, HEIGHT),
        model="nano",
        stages_us={"decode": 10, "encode": 20, "track": 30, "masks": 4},
        prompts=("red mug",),
        instances=tuple(instances),
        node="a" * 16,
        epoch=5,
    )


def measure(call: Callable[[], object]) -> str:
    """Return the time of a call."""
    return f"{min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6:.1f} us"


def main() -> None:
    """Print the figures."""
    for count in (1, 16):
        parts = pack_masks(make_masks(count))
        lazy = measure(lambda parts=parts: unpack_masks(parts, lazy=True))  # type: ignore[misc]
        whole = measure(lambda parts=parts: unpack_masks(parts))  # type: ignore[misc]
        print(f"masks of {count}: {lazy} lazy, {whole} with pixels")
    intrinsics = Intrinsics(600, 600, 320, 240, "brown_conrady", (0.0,) * 5)
    frame = Frame("cam0", 7, 1, WIDTH, HEIGHT, "bgr8", bytes(WIDTH * HEIGHT * 3), intrinsics=intrinsics)
    message = pack_frame(frame)
    print(f"header of a frame: {measure(lambda: unpack_frame(message))}")


if __name__ == "__main__":
    main()
