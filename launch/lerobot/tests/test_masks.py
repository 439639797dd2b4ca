"""A pipeline's step and a dataset with masks, by lerobot's own package. It runs in lerobot's environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lerobot.processor as processor
import numpy as np
import pytest
from lerobot.configs.types import FeatureType, PipelineFeatureType, PolicyFeature
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from sam3_node.client.observations import FIELDS, ObjectSlots, as_lerobot, lerobot_features
from sam3_node.client.observations.lerobot_step import ObjectsProcessorStep
from sam3_node.errors import PolicyError
from sam3_node.transport import MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.wire import Reply
from tests.support.observations import T0, Client, fresh, make_frame, make_instance
from tests.support.refuses import refuses

SIZE = (24, 32)
NAMES = ["red mug", "a", "b", "c"]
JOINTS = np.linspace(-1, 1, 6)


@pytest.mark.verifies(
    "policy",
    "lerobot",
    "own package",
    "lerobot 0.4.4 and 0.6.1: a pipeline saved and loaded, a dataset written and read back; 0.6.1: the camera plugin",
)
def test_a_dataset_of_lerobot_keeps_the_masks(tmp_path: Path) -> None:
    slots = ObjectSlots(NAMES, SIZE)
    features = {
        **lerobot_features(slots),
        "observation.state": {"dtype": "float32", "shape": (6,), "names": [f"joint{n}" for n in range(6)]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    }
    folder = tmp_path / "dataset"
    dataset = LeRobotDataset.create("me/masks", 10, features, root=folder, use_videos=False)
    written = []
    for x in range(0, 48, 16):
        objects = slots.observe(make_frame(make_instance(1, "red mug", (x, 32, x + 32, 64))), T0)
        written.append(as_lerobot(objects, state=JOINTS))
        dataset.add_frame({**written[-1], "action": np.zeros(2, np.float32), "task": "pick up the red mug"})
    dataset.save_episode()
    dataset.finalize()
    read = LeRobotDataset("me/masks", root=folder)
    assert len(read) == 3
    for row, observation in zip(read, written, strict=True):
        for key, value in observation.items():
            found = row[key].numpy()
            expected = value.transpose(2, 0, 1) / np.float32(255) if value.ndim == 3 else value
            np.testing.assert_array_equal(found, expected)


def test_the_step_adds_masks_to_a_pipeline(tmp_path: Path) -> None:
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


def test_the_policy_of_the_page_runs() -> None:
    """The sockets are those of a node that has the mug already, and publishes its masks again whenever it is asked."""
    page = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    policy = next(
        code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ObjectsProcessorStep" in code
    )
    batches: list[dict[str, Any]] = []

    class Robot:
        def is_running(self) -> bool:
            masks.send(fresh(make_instance(1, "red mug")))
            return len(batches) < 3

        def joints(self) -> list[float]:
            return [0.0] * 7

        def move(self, action: Any) -> None:
            batches.append(action)

        def hold(self, reason: str) -> None:
            pass

    class Policy:
        def select_action(self, batch: dict[str, Any]) -> Any:
            return batch

    endpoint = "tcp://127.0.0.1:*"
    with (
        ControlServer(
            endpoint, lambda request: Reply(request.id, {"id": 1, "camera": "cam0", "epoch": 7})
        ) as control,
        MaskPublisher(endpoint) as masks,
    ):
        policy = policy.replace(
            "PerceptionClient()", f"PerceptionClient({masks.endpoint!r}, {control.endpoint!r})"
        )
        policy = policy.replace("(240, 320)", "(240, 320), max_age_s=50")
        exec(policy, {"robot": Robot(), "policy": Policy()})
    assert tuple(batches[-1]["observation.images.objects_0"].shape) == (1, 3, 240, 320)
    assert bool(batches[-1]["observation.images.objects_0"].any())
