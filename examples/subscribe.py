"""Print the masks of ten frames.

python examples/subscribe.py [MASKS CONTROL]
"""

import sys

from sam3_node.client import PerceptionClient

with PerceptionClient(*sys.argv[1:3]) as node:
    for _ in range(10):
        masks = node.latest(timeout_ms=60_000)
        if masks is None:
            sys.exit(node.diagnosis())
        print(f"{masks.camera} frame {masks.seq}, {masks.age_ms:.0f} ms old, {len(masks.instances)} objects")
        for instance in masks.instances:
            doubt = ", doubtful" if instance.doubtful else ""
            print(
                f"  {instance.id} {instance.label} {instance.state}{doubt}: {instance.area} pixels at {instance.box}"
            )
