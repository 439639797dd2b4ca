"""Print a point to grasp an object at, in the frame of the robot's base, and how wide the object is there.

    sam3-node run --spatial.calibration examples/table.toml --spatial.table true
    python examples/grasp_point.py LABEL [MASKS CONTROL]

The object must be tracked already, such as after add_object.py. Nothing moves.
"""

import sys

from sam3_node.client import PerceptionClient
from sam3_node.errors import NodeRestarted

label, *endpoints = sys.argv[1:]
with PerceptionClient(*endpoints, sure_only=True) as node:  # without masks that the node doubts
    while True:
        try:
            masks = node.latest(timeout_ms=60_000)
        except NodeRestarted as restart:
            sys.exit(f"the ids of {restart.camera} are void: add the object again")
        if masks is None:
            sys.exit(node.diagnosis())
        sure = [found for found in masks.instances if found.label == label]
        if len(sure) > 1:
            sys.exit(f"{len(sure)} objects are a {label}: remove or rename the wrong one")
        if not sure or masks.is_stale(max_age_ms=5000):
            continue  # hidden, doubtful or old: hold still
        found = sure[0]
        if found.frame != "base" or (found.depth_share or 0) < 0.5:
            continue  # without a place in the base, or most of the mask has no depth
        # the box on the table, because the axes of the visible surface are often diagonal
        if found.upright_centre_m is None or found.upright_size_m is None:
            sys.exit(
                "the table is not known: start the node with --spatial.table true; sam3-node status says more"
            )
        x, y, z = found.upright_centre_m
        width_m = min(found.upright_size_m[:2])
        print(f"{label}: grasp at x {x:.3f} y {y:.3f} z {z:.3f} m in the base, {masks.age_ms:.0f} ms ago")
        print(f"open wider than {width_m:.3f} m")
        break
