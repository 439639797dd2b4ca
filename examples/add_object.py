"""Add an object by a box, and wait for its mask.

python examples/add_object.py [MASKS CONTROL]
"""

import sys

from sam3_node.client import PerceptionClient

BOX = (
    211,
    285,
    346,
    427,
)  # x0, y0, x1, y1 in pixels of the camera's frame: the red mug of the bundled recording

with PerceptionClient(*sys.argv[1:3], timeout_ms=60_000) as node:
    node.wait_for_camera(60_000)
    added = node.add_object(box=BOX, label="red mug")
    masks, mug = node.wait_for("red mug", 60_000, most=1)  # AmbiguousError if there are two
    inside = mug.mask.full()  # bool [height, width]
    print(f"object {added.id}: {inside.sum()} pixels on frame {masks.seq}, doubtful: {mug.doubtful}")
