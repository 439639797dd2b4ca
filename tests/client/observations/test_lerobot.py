"""Observations and a dataset's features for lerobot. launch/lerobot/tests has what needs its own package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sam3_node.client.observations import FIELDS, ObjectSlots, as_lerobot, lerobot_features
from sam3_node.errors import PolicyError
from tests.support.observations import T0, make_frame, make_instance
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
