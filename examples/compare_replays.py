"""Replay a recording with two settings, and compare the masks of each object.

python examples/compare_replays.py RECORDING X0,Y0,X1,Y1 OUT [FRAMES]
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

from sam3_node.bags import read_masks

SETTINGS = {"long": ["--tracker.bank_size", "7"], "short": ["--tracker.bank_size", "2"]}


def replay(recording: str, box: str, out: Path, options: list[str]) -> dict[tuple[int, int], np.ndarray]:
    """Return the masks of a replay, bool [height, width], by the frame's number and the object's id."""
    command = [sys.executable, "-m", "sam3_node", "replay", recording, "-o", str(out), "--box", box, *options]
    subprocess.run(command, check=True)
    return {
        (masks.seq, instance.id): instance.mask.full()
        for masks in read_masks(out / "masks.mcap")
        for instance in masks.instances
    }


recording, box, out, *frames = sys.argv[1:]
limit = ["--frames", frames[0]] if frames else []
first, second = (
    replay(recording, box, Path(out) / name, [*options, *limit]) for name, options in SETTINGS.items()
)
for id in sorted({id for _, id in first.keys() | second.keys()}):
    seqs = sorted({seq for seq, other in first.keys() | second.keys() if other == id})
    ious = []
    for seq in seqs:
        one = first.get((seq, id))
        other = second.get((seq, id))
        if one is None or other is None:
            ious.append(0.0)  # only one of the two tracks it
        else:
            ious.append(
                float((one & other).sum() / max((one | other).sum(), 1)) if (one | other).any() else 1.0
            )
    worst = seqs[int(np.argmin(ious))]
    print(
        f"object {id}: mean IoU {np.mean(ious):.3f} over {len(ious)} frames, least {min(ious):.3f} on frame {worst}"
    )
