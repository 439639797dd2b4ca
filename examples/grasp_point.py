"""Print where a parallel gripper takes an object, in the frame of the robot's base, and how wide the object is there.

    sam3-node run --spatial.calibration examples/table.toml --spatial.table true
    python examples/grasp_point.py LABEL [MASKS CONTROL]

The object must be tracked already, such as after add_object.py. Nothing moves.
"""

import sys

from sam3_node.client import PerceptionClient
from sam3_node.errors import NodeRestarted

OPENING_M = 0.12
"""Widest object that the gripper takes."""

label, *endpoints = sys.argv[1:]
with PerceptionClient(*endpoints) as node:
    while True:
        # once for each frame
        try:
            masks = node.latest(timeout_ms=60_000)
        except NodeRestarted as restart:
            sys.exit(f"the ids of {restart.camera} are void: add the object again")
        if masks is None:
            sys.exit(node.diagnosis())
        found = node.next_pick(label, opening_m=OPENING_M, max_age_ms=5000, camera=masks.camera)
        for other in found.refused:
            print(f"object {other.id}: {other.reason}", file=sys.stderr)
        grips = [(pick, pick.grip) for pick in found.picks if pick.grip is not None]
        if not grips or found.frame != "base":
            continue  # hidden, doubtful, old, under something, or without a place in the base: hold still
        pick, grip = grips[0]
        x, y, z = grip.position_m
        print(f"{label}: grasp at x {x:.3f} y {y:.3f} z {z:.3f} m in the base, {pick.reason}")
        print(f"open wider than {grip.width_m:.3f} m")
        break
