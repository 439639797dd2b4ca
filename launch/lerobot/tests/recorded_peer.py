"""The half of tools/lerobot_recorded that runs in lerobot's own environment: opens a dataset, and trains ACT on it.

It imports nothing of this project. `recorded_peer.py ANSWER read ROOT` and `recorded_peer.py ANSWER train ROOT` write
what they found to the file ANSWER, as JSON.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

STEPS = 10
"""Steps of training."""
CHUNK = 8
"""Actions that ACT predicts at once."""
BATCH = 2


def open_dataset(root: str, **options: Any) -> LeRobotDataset:
    """Open the dataset without a network."""
    return LeRobotDataset("local/recorded", root=root, video_backend="pyav", **options)


def read(root: str) -> dict[str, Any]:
    """Open a dataset as a policy's training does, and describe its items."""
    dataset = open_dataset(root)
    items = [dataset[index] for index in range(len(dataset))]
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4)))
    masks = [key for key in dataset.meta.camera_keys if ".masks." in key]
    numbers = [
        key for key in items[0] if key.startswith(("observation.objects.", "observation.state", "action"))
    ]
    return {
        "lerobot": version("lerobot"),
        "episodes": dataset.num_episodes,
        "frames": len(dataset),
        "fps": dataset.fps,
        "features": {key: list(value["shape"]) for key, value in dataset.features.items()},
        "names": {key: list(dataset.features[key]["names"]) for key in numbers},
        "tasks": [item["task"] for item in items],
        "timestamps": [round(float(item["timestamp"]), 4) for item in items],
        "episode_index": [int(item["episode_index"]) for item in items],
        "batch": {key: list(batch[key].shape) for key in dataset.meta.camera_keys},
        "brightness": {
            key: [round(float(item[key].mean()), 4) for item in items]
            for key in dataset.meta.camera_keys
            if key not in masks
        },
        "pixels": {
            key: [int((np.round(item[key].numpy()[1] * 255) > 0).sum()) for item in items] for key in masks
        },
        "numbers": {key: [np.round(item[key].numpy(), 4).tolist() for item in items] for key in numbers},
        "stats": {key: sorted(dataset.meta.stats.get(key, ())) for key in dataset.features},
    }


def train(root: str) -> dict[str, Any]:
    """Train an ACT policy of lerobot for STEPS steps, and return its losses."""
    from lerobot.configs.types import FeatureType
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    try:
        from lerobot.utils.feature_utils import dataset_to_policy_features
    except ImportError:
        from lerobot.datasets.utils import dataset_to_policy_features

    torch.manual_seed(0)
    fps = open_dataset(root).fps
    dataset = open_dataset(root, delta_timestamps={"action": [step / fps for step in range(CHUNK)]})
    features = dataset_to_policy_features(dataset.features)
    outputs = {key: value for key, value in features.items() if value.type is FeatureType.ACTION}
    config = ACTConfig(
        input_features={key: value for key, value in features.items() if key not in outputs},
        output_features=outputs,
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        dim_model=64,
        n_heads=4,
        dim_feedforward=128,
        n_encoder_layers=1,
        pretrained_backbone_weights=None,
        device="cpu",
    )
    policy = ACTPolicy(config)
    prepare, _ = make_pre_post_processors(config, dataset_stats=dataset.meta.stats)
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in loader:
            loss, _ = policy.forward(prepare(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    return {
        "lerobot": version("lerobot"),
        "losses": losses,
        "images": sorted(config.image_features),
        "inputs": sorted(config.input_features),
    }


if __name__ == "__main__":
    function = {"read": read, "train": train}[sys.argv[2]]
    Path(sys.argv[1]).write_text(json.dumps(function(*sys.argv[3:])))
