"""Show the way of a LeRobot dataset from lerobot's own tools through `sam3-node replay` to lerobot's own loader.

    python -m tools.lerobot_roundtrip --work /tmp/roundtrip --json tests/data/lerobot/outcome.json

For each release of lerobot it makes a virtual environment, because lerobot's pins conflict with this package's (4 GB to
download and 8 GB of disk each), writes a small dataset there (0.6.1: version 3.0 with depth, 0.4.4: version 3.0, 0.3.3:
version 2.1), replays it here with the bundled weights, and opens the result with that release's loader. It prints what
the loader saw, and fails if these are not the masks of the replay and the depth that was written. With 0.6.1 it also
runs the tests of launch/lerobot. `--fixture FOLDER` keeps the datasets that lerobot wrote, for the tests.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from sam3_node.bags import open_bag, read_masks
from sam3_node.types import Depth, MaskFrame
from sam3_node.wire.images import decode_depth, decode_image

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "sam3_node" / "assets" / "tabletop.mcap"
RELEASES = {"0.6.1": "python3.12", "0.4.4": sys.executable, "0.3.3": sys.executable}
"""Releases of lerobot, each with the interpreter that it needs."""
PLUGIN = ROOT / "launch" / "lerobot"
MAX_DEPTH_ERROR_MM = 4.0
"""Half a step of lerobot's 12 bits at the depths of the recording, and the codec's loss."""
PROMPTS = ("red mug", "green bottle")
EPISODES = ((0, 4), (80, 5), (160, 6))
"""First frame in the bundled recording, and number of frames, of each episode."""
STEP = 3
SIZES = {"front": (160, 120), "wrist": (96, 72)}


def main() -> int:
    """Run the round trip. Returns 1 if a loader did not see the masks of the replay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for environments and datasets")
    parser.add_argument("--release", nargs="+", default=RELEASES, help="releases of lerobot")
    parser.add_argument("--json", type=Path, help="file for the outcome")
    parser.add_argument("--fixture", type=Path, help="folder to keep the datasets in, for the tests")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    save_frames(args.work / "frames.npz")
    outcome = {release: run_release(release, args.work, args.fixture) for release in args.release}
    text = json.dumps(outcome, indent=1) + "\n"
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)
    return 0 if all(found["equals_replay"] and found["depth_fits"] for found in outcome.values()) else 1


def save_frames(path: Path) -> None:
    """Save frames of the bundled recording as two cameras, RGB uint8 [frames, height, width, 3] by episode.

    The depth of the first is uint16 [frames, height, width, 1] in millimetres.
    """
    frames = list(open_bag(RECORDING))
    episodes = {}
    for number, (first, count) in enumerate(EPISODES):
        shown = [frames[first + STEP * index] for index in range(count)]
        depths = [read_millimetres(frame.depth, SIZES["front"]) for frame in shown]
        episodes[f"{number}-depth"] = np.stack(depths)[..., np.newaxis]
        for camera, size in SIZES.items():
            views = [decode_image(frame) for frame in shown]
            if camera == "wrist":
                views = [view[:, ::-1] for view in views]
            small = [cv2.resize(view, size, interpolation=cv2.INTER_AREA)[..., ::-1] for view in views]
            episodes[f"{number}-{camera}"] = np.stack(small)
    np.savez(path, **episodes)  # type: ignore[arg-type]  # names of arrays are no options


def read_millimetres(depth: Depth | None, size: tuple[int, int]) -> Any:
    """Return depth in millimetres, uint16 [height, width] of `size` (width, height)."""
    assert depth is not None
    millimetres = np.rint(decode_depth(depth) * (depth.scale_m * 1000)).astype(np.uint16)
    return cv2.resize(millimetres, size, interpolation=cv2.INTER_NEAREST)


def run_release(release: str, work: Path, fixture: Path | None) -> dict[str, Any]:
    """Run the round trip with one release, and return what was written and what the loader saw."""
    python = make_environment(release, work)
    written = work / f"written-{release}"
    out = work / f"out-{release}"
    for folder in (written, out):
        shutil.rmtree(folder, ignore_errors=True)
    dataset = run_peer(python, work, "write", str(work / "frames.npz"), str(written))
    if fixture is not None:
        keep = fixture / {"0.6.1": "v3.0-depth", "0.4.4": "v3.0", "0.3.3": "v2.1"}[release]
        shutil.rmtree(keep, ignore_errors=True)
        shutil.copytree(written, keep, ignore=shutil.ignore_patterns("images"))  # the tables hold them
    prompts = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    command = [sys.executable, "-m", "sam3_node", "replay", str(written), "-o", str(out), *prompts]
    subprocess.run([*command, "--outputs", "mcap,lerobot"], check=True, cwd=ROOT)
    seen = run_peer(python, work, "read", str(out / "lerobot"), str(work / "frames.npz"))
    if release == "0.6.1":
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests")]
        subprocess.run(command, check=True, cwd=ROOT, env=peer_environment(work))
    expected = count_pixels(out)
    found = {key: value["pixels_by_frame"] for key, value in seen["masks"].items()}
    fits = (
        seen["depth_error_mm"] is None
        or max(seen["depth_error_mm"], *measure_depth(written, work)) < MAX_DEPTH_ERROR_MM
    )
    return {"written": dataset, "seen": seen, "equals_replay": found == expected, "depth_fits": fits}


def measure_depth(written: Path, work: Path) -> list[float]:
    """Return the largest error of each frame's depth, in mm, as this package reads it."""
    source = np.load(work / "frames.npz")
    depths = np.concatenate([source[f"{number}-depth"][..., 0] for number in range(len(EPISODES))]).astype(
        float
    )
    frames = [frame for frame in open_bag(written) if frame.camera == "front"]
    found = np.stack([read_millimetres(frame.depth, SIZES["front"]) for frame in frames]).astype(float)
    return [float(np.abs(error[near > 0]).max()) for error, near in zip(found - depths, found, strict=True)]


def make_environment(release: str, work: Path) -> Path:
    """Make a virtual environment with a release of lerobot, unless there is one; return its interpreter."""
    folder = work / f"venv-{release}"
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        subprocess.run([RELEASES[release], "-m", "venv", "--clear", str(folder)], check=True)
        packages = [f"lerobot=={release}"]
        if release == "0.6.1":
            packages = [f"lerobot[dataset]=={release}", "pytest", str(ROOT), str(PLUGIN)]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return python


def run_peer(python: Path, work: Path, *arguments: str) -> dict[str, Any]:
    """Run peer.py of launch/lerobot in lerobot's environment, without a network, and return its JSON."""
    peer = str(PLUGIN / "tests" / "peer.py")
    answer = work / "answer.json"
    subprocess.run([str(python), peer, str(answer), *arguments], check=True, env=peer_environment(work))
    return json.loads(answer.read_text())


def peer_environment(work: Path) -> dict[str, str]:
    """Return the environment of lerobot's processes: no network, and packages of their own."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1"}


def count_pixels(out: Path) -> dict[str, list[int]]:
    """Return the number of pixels in the masks of each frame, by feature, from the replay's own masks.mcap."""
    counts: dict[str, list[int]] = {}
    for frame in read_masks(out / "masks.mcap"):
        counts.setdefault(f"observation.masks.{frame.camera}", []).append(count_covered(frame))
    return dict(sorted(counts.items()))


def count_covered(frame: MaskFrame) -> int:
    """Return the number of pixels in any mask of a frame."""
    covered = np.zeros((frame.height, frame.width), np.bool_)
    for instance in frame.instances:
        x0, y0, x1, y1 = instance.mask.box
        covered[y0:y1, x0:x1] |= instance.mask.crop
    return int(covered.sum())


if __name__ == "__main__":
    sys.exit(main())
