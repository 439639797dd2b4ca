"""The half that runs in lerobot's own environment: writes a dataset with its tools, opens one with its loader.

It imports nothing of this project. `peer.py ANSWER write FRAMES.npz ROOT` and `peer.py ANSWER read ROOT` write what
they found to the file ANSWER, as JSON.
"""

import inspect
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

FPS = 10
TASK = "put the blocks into the bin"
DEPTH = "observation.images.front_depth"
HAS_DEPTH = find_spec("lerobot.datasets.depth_utils") is not None
STATE_NAMES = ["shoulder_pan.pos", "elbow_flex.pos", "gripper.pos"]


def write(source: str, root: str) -> dict[str, Any]:
    """Write episodes of two cameras, one stored as video, one as images in the table."""
    frames = np.load(source)
    episodes = sorted({int(name.split("-")[0]) for name in frames.files})
    shapes = {camera: frames[f"{episodes[0]}-{camera}"].shape[1:] for camera in ("front", "wrist")}
    names = ["height", "width", "channels"]
    features = {
        "observation.images.front": {"dtype": "video", "shape": shapes["front"], "names": names},
        "observation.images.wrist": {"dtype": "image", "shape": shapes["wrist"], "names": names},
        "observation.state": {"dtype": "float32", "shape": (3,), "names": STATE_NAMES},
        "action": {"dtype": "float32", "shape": (3,), "names": STATE_NAMES},
    }
    if HAS_DEPTH:
        depth = {"dtype": "video", "info": {"is_depth_map": True}, "names": names}
        features[DEPTH] = {**depth, "shape": (*shapes["front"][:2], 1)}
    dataset = LeRobotDataset.create("local/blocks", FPS, features, root=root)
    takes_task = "task" in inspect.signature(dataset.add_frame).parameters
    for episode in episodes:
        views = zip(*(frames[f"{episode}-{name}"] for name in ("front", "wrist", "depth")), strict=True)
        for number, (front, wrist, depth) in enumerate(views):
            state = np.array([episode, number, 0.5], np.float32)
            row = {"observation.images.front": front, "observation.images.wrist": wrist}
            row |= {"observation.state": state, "action": state} | ({DEPTH: depth} if HAS_DEPTH else {})
            if takes_task:
                dataset.add_frame(row, task=TASK)
            else:
                dataset.add_frame({**row, "task": TASK})
        dataset.save_episode()
    if hasattr(dataset, "finalize"):
        dataset.finalize()
    return {"lerobot": version("lerobot"), "episodes": len(episodes), "frames": dataset.meta.total_frames}


def read(root: str, source: str) -> dict[str, Any]:
    """Open a dataset as a policy's training does, and describe every item that a mask is in, and the error of depth."""
    from torch.utils.data import DataLoader

    dataset = LeRobotDataset("local/blocks", root=root, video_backend="pyav")
    masks = [key for key in dataset.meta.camera_keys if ".masks." in key]
    items = [dataset[index] for index in range(len(dataset))]
    batch = next(iter(DataLoader(dataset, batch_size=4)))
    return {
        "lerobot": version("lerobot"),
        "codebase_version": str(dataset.meta.info["codebase_version"]),
        "episodes": dataset.num_episodes,
        "frames": len(dataset),
        "features": {key: list(value["shape"]) for key, value in dataset.features.items()},
        "tasks": sorted({item["task"] for item in items}),
        "batch": {key: list(batch[key].shape) for key in dataset.meta.camera_keys},
        "masks": {key: _describe(dataset, items, key) for key in masks},
        "depth_error_mm": _measure_depth(items, np.load(source)) if HAS_DEPTH else None,
    }


def _measure_depth(items: list[Any], source: Any) -> float:
    """Return the largest difference of depth in mm from what was written."""
    written = np.concatenate([source[name] for name in sorted(source.files) if name.endswith("depth")])
    found = np.stack([item[DEPTH].numpy().squeeze() for item in items])
    return float(np.abs(found - written[..., 0].astype(float)).max())


def _describe(dataset: LeRobotDataset, items: list[Any], key: str) -> dict[str, Any]:
    labels = [np.round(item[key].numpy() * 255).astype(int) for item in items]
    return {
        "dtype": str(items[0][key].dtype),
        "labels_by_frame": [sorted(set(image[0].ravel().tolist()) - {0}) for image in labels],
        "objects_by_frame": [sorted(set(image[1].ravel().tolist()) - {0}) for image in labels],
        "pixels_by_frame": [int((image[1] > 0).sum()) for image in labels],
        "mean": float(np.mean([item[key].numpy().mean(axis=(1, 2))[0] for item in items])),
        "stats": {name: np.ravel(value).tolist() for name, value in dataset.meta.stats[key].items()},
    }


if __name__ == "__main__":
    function = write if sys.argv[2] == "write" else read
    outcome = function(*sys.argv[3:])
    Path(sys.argv[1]).write_text(json.dumps(outcome))
