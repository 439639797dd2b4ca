"""Show that a converted recording is a dataset that lerobot's own code opens and trains on.

    python -m tools.lerobot_recorded --work /tmp/lerobot

For each release of lerobot it uses a virtual environment in the folder, and makes it where there is none (8 GB each).
It writes a recording of two cameras, masks, joints, actions and marked episodes, converts it here, opens the dataset
with that release's LeRobotDataset, compares all that the loader gives with what was recorded, and trains an ACT policy
for ten steps. It fails if a value differs or a loss is no number.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tools.lerobot_roundtrip.__main__ import PLUGIN, ROOT, make_environment, peer_environment

from .recording import FPS, MARKS, draw, joint_positions, masks_of, time_of, write_recording

RELEASES = ("0.6.1", "0.4.4")
"""Releases of lerobot."""
PEER = PLUGIN / "tests" / "recorded_peer.py"
"""The half that runs in lerobot's environment."""
MAX_BRIGHTNESS_ERROR = 0.01
"""Largest difference of a frame's mean brightness, 0..1, that the video may cost."""


def main() -> int:
    """Convert, open and train with each release. Returns 1 if what a loader gave is not what was recorded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for environments and datasets")
    parser.add_argument("--release", nargs="+", default=RELEASES, help="releases of lerobot")
    parser.add_argument("--json", type=Path, help="file for the outcome")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    dataset = convert(args.work)
    outcome = {}
    faults = []
    for release in args.release:
        python = make_environment(release, args.work)
        seen = run_peer(python, args.work, "read", dataset)
        trained = run_peer(python, args.work, "train", dataset)
        found = [*compare(seen), *check_training(trained)]
        faults += [f"lerobot {release}: {fault}" for fault in found]
        kept = ("lerobot", "episodes", "frames", "fps", "features", "names", "batch")
        outcome[release] = {name: seen[name] for name in kept} | {"act": trained, "faults": found}
    text = json.dumps(outcome, indent=1) + "\n"
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def convert(work: Path) -> Path:
    """Write the recording and convert it by the command. Return the dataset."""
    recording = work / "recorded.mcap"
    dataset = work / "recorded"
    recording.unlink(missing_ok=True)
    shutil.rmtree(dataset, ignore_errors=True)
    write_recording(recording)
    command = [sys.executable, "-m", "sam3_node", "convert", str(recording), "--lerobot", str(dataset)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return dataset


def run_peer(python: Path, work: Path, *arguments: object) -> dict[str, Any]:
    """Run the peer in lerobot's environment, without a network, and return its JSON."""
    answer = work / "recorded.json"
    command = [str(python), str(PEER), str(answer), *map(str, arguments)]
    subprocess.run(command, check=True, env=peer_environment(work))
    return json.loads(answer.read_text())


def compare(seen: dict[str, Any]) -> list[str]:
    """Return what of the loader's items is not what was recorded."""
    kept = [mark for mark in MARKS if mark.keep]
    rows = [frame for mark in kept for frame in range(mark.first, mark.end)]
    faults = []

    def expect(name: str, found: Any, expected: Any) -> None:
        if found != expected:
            faults.append(f"{name}: expected {expected!r:.200}, found {found!r:.200}")

    expect("episodes", seen["episodes"], len(kept))
    expect("frames", seen["frames"], len(rows))
    expect("fps", seen["fps"], FPS)
    tasks = [mark.task or "mug, bowl" for mark in kept for _ in range(mark.first, mark.end)]
    expect("tasks", seen["tasks"], tasks)
    times = [round(index / FPS, 4) for mark in kept for index in range(mark.end - mark.first)]
    expect("timestamps", seen["timestamps"], times)

    # joints and actions with the names of the URDF
    states = [list(joint_positions(time_of(frame)).values()) for frame in rows]
    ahead = [list(joint_positions(time_of(frame + 1)).values()) for frame in rows]
    for key, values in (("observation.state", states), ("action", ahead)):
        expect(f"names of {key}", seen["names"][key], list(joint_positions(0)))
        if not np.allclose(seen["numbers"][key], values, atol=1e-3):
            faults.append(f"{key}: expected the recorded values, found others")

    # masks by their pixels, objects by their numbers
    pixels = []
    for frame in rows:
        covered = np.zeros((120, 160), np.bool_)
        for instance in masks_of(frame, "front").instances:
            instance.mask.paint(covered, True)
        pixels.append(int(covered.sum()))
    expect("pixels of masks", seen["pixels"]["observation.masks.front"], pixels)
    for frame, numbers in zip(rows, seen["numbers"]["observation.objects.front"], strict=True):
        mug, bowl = masks_of(frame, "front").instances
        expected = [1, bowl.score, bowl.confidence, float(bowl.doubtful), 2, mug.score, mug.confidence, 0]
        if not np.allclose(numbers[:8], np.array(expected, float), atol=1e-3) or any(numbers[8:]):
            faults.append(f"objects of frame {frame}: expected {expected}, found {numbers[:10]}")
            break
    for camera in ("front", "wrist"):
        bright = [draw(frame, camera).mean() / 255 for frame in rows]
        errors = np.abs(np.array(seen["brightness"][f"observation.images.{camera}"]) - bright)
        if errors.max() > MAX_BRIGHTNESS_ERROR:
            faults.append(
                f"camera {camera}: expected the recorded frames, found a brightness {errors.max()} off"
            )
    return faults


def check_training(trained: dict[str, Any]) -> list[str]:
    """Return what is wrong with the losses of the training."""
    losses = trained["losses"]
    if len(losses) != 10 or not all(math.isfinite(loss) for loss in losses):
        return [f"ACT: expected ten losses, found {losses}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
