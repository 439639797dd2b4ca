"""Observations, a pipeline's step and a dataset's features for lerobot, checked by its own package where installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.client.observations import FIELDS, ObjectSlots, as_lerobot, lerobot_features
from sam3_node.errors import PolicyError
from tests.support.observations import T0, Client, fresh, make_frame, make_instance
from tests.support.refuses import refuses

SIZE = (24, 32)
NAMES = ["red mug", "a", "b", "c"]
RGB = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
JOINTS = np.linspace(-1, 1, 6)


def test_an_observation_has_the_keys_of_lerobot() -> None:
    slots = ObjectSlots(NAMES, SIZE)
    objects = slots.observe(make_frame(make_instance(1, "red mug")), T0)
    observation = as_lerobot(objects, images={"front": RGB}, state=JOINTS)
    assert {key: (value.dtype.name, value.shape) for key, value in observation.items()} == {
        "observation.images.front": ("uint8", (*SIZE, 3)),
        "observation.images.objects_0": ("uint8", (*SIZE, 3)),
        "observation.images.objects_1": ("uint8", (*SIZE, 3)),
        "observation.state": ("float32", (6,)),
        "observation.environment_state": ("float32", (4 * len(FIELDS),)),
    }
    np.testing.assert_array_equal(observation["observation.images.objects_0"][..., 0] > 0, objects.masks[0])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"images": {"front": RGB / 255}}, "uint8"),
        ({"images": {"objects_0": RGB}}, ("images", "objects_0")),
        ({"state": np.zeros((1, 6))}, "state"),
    ],
)
def test_wrong_inputs_are_named(inputs: dict[str, Any], message: str | tuple[str, ...]) -> None:
    with refuses(PolicyError, field=message):
        as_lerobot(ObjectSlots(NAMES, SIZE).observe(), **inputs)


def test_features_describe_the_observation() -> None:
    slots = ObjectSlots(NAMES, SIZE)
    features = lerobot_features(slots)
    observation = as_lerobot(slots.observe())
    assert {key: feature["shape"] for key, feature in features.items()} == {
        key: value.shape for key, value in observation.items()
    }
    names = features["observation.environment_state"]["names"]
    assert len(set(names)) == len(names)
    assert names[0] == "0.red mug.usable"
    assert {feature["dtype"] for feature in lerobot_features(slots, dtype="video").values()} == {
        "video",
        "float32",
    }


@pytest.mark.verifies(
    "policy",
    "lerobot",
    "own package",
    "lerobot 0.4.4: a pipeline saved and loaded, a dataset written and read back",
)
def test_a_dataset_of_lerobot_keeps_the_masks(tmp_path: Path) -> None:
    module = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    slots = ObjectSlots(NAMES, SIZE)
    features = {
        **lerobot_features(slots),
        "observation.state": {"dtype": "float32", "shape": (6,), "names": [f"joint{n}" for n in range(6)]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    }
    folder = tmp_path / "dataset"
    dataset = module.LeRobotDataset.create("me/masks", 10, features, root=folder, use_videos=False)
    written = []
    for x in range(0, 48, 16):
        objects = slots.observe(make_frame(make_instance(1, "red mug", (x, 32, x + 32, 64))), T0)
        written.append(as_lerobot(objects, state=JOINTS))
        dataset.add_frame({**written[-1], "action": np.zeros(2, np.float32), "task": "pick up the red mug"})
    dataset.save_episode()
    dataset.finalize()
    read = module.LeRobotDataset("me/masks", root=folder)
    assert len(read) == 3
    for row, observation in zip(read, written, strict=True):
        for key, value in observation.items():
            found = row[key].numpy()
            expected = value.transpose(2, 0, 1) / np.float32(255) if value.ndim == 3 else value
            np.testing.assert_array_equal(found, expected)


def test_the_step_adds_masks_to_a_pipeline(tmp_path: Path) -> None:
    processor = pytest.importorskip("lerobot.processor")
    from lerobot.configs.types import FeatureType, PipelineFeatureType, PolicyFeature

    from sam3_node.client.observations.lerobot_step import ObjectsProcessorStep

    mug = make_instance(1, "red mug")
    step = ObjectsProcessorStep(NAMES, SIZE, max_age_s=50, client=Client(fresh(mug)))
    batch = {"observation.state": processor.converters.to_tensor(JOINTS)}
    pipeline = processor.PolicyProcessorPipeline(
        [step, processor.AddBatchDimensionProcessorStep()], name="masks"
    )
    result = pipeline(batch)
    assert step.objects is not None
    assert step.objects.refusal("red mug") is None
    picture = result["observation.images.objects_0"]
    assert (tuple(picture.shape), picture.dtype.is_floating_point) == ((1, 3, *SIZE), True)
    np.testing.assert_array_equal(picture[0, 0].numpy(), step.objects.masks[0].astype(np.float32))
    np.testing.assert_array_equal(result["observation.environment_state"].numpy(), [step.objects.vector()])
    assert tuple(result["observation.state"].shape) == (1, 6)

    given = {PipelineFeatureType.OBSERVATION: {"observation.state": PolicyFeature(FeatureType.STATE, (6,))}}
    features = pipeline.transform_features(given)[PipelineFeatureType.OBSERVATION]
    assert {key: (feature.type.name, tuple(feature.shape)) for key, feature in features.items()} == {
        "observation.state": ("STATE", (6,)),
        "observation.images.objects_0": ("VISUAL", (3, *SIZE)),
        "observation.images.objects_1": ("VISUAL", (3, *SIZE)),
        "observation.environment_state": ("ENV", (4 * len(FIELDS),)),
    }
    for key, feature in features.items():
        assert tuple(result[key].shape[1:]) == tuple(feature.shape)

    pipeline.save_pretrained(tmp_path)
    loaded = processor.PolicyProcessorPipeline.from_pretrained(tmp_path, config_filename="masks.json")
    with refuses(PolicyError, field="client"):
        loaded(batch)
    overrides = {"sam3_node_objects": {"client": Client(fresh(mug))}}
    loaded = processor.PolicyProcessorPipeline.from_pretrained(
        tmp_path, config_filename="masks.json", overrides=overrides
    )
    again = loaded(batch)
    recorded = {**batch, **{key: again[key] for key in features}}
    np.testing.assert_array_equal(
        loaded(recorded)["observation.images.objects_1"], again["observation.images.objects_1"]
    )
    assert loaded.steps[0].objects is None
    with refuses(PolicyError, field="observation.environment_state"):
        loaded({**batch, "observation.environment_state": again["observation.environment_state"]})
    np.testing.assert_array_equal(again["observation.images.objects_0"], picture)
