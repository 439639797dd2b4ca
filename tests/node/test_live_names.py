"""Names change while the node runs: camera, node and command line are processes, the bundled models do the work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame
from tests.support.node_rig import Rig, masks_where

EVERY = 4


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Play the bundled recording to a node that detects the red mug. Every frame is stepped and published."""
    rig = Rig(tmp_path_factory.mktemp("live"))
    rig.environment |= {
        "SAM3_MODEL__NAME": "nano",
        "SAM3_DETECTOR__KIND": "yolo-world",
        "SAM3_DETECTOR__EVERY": str(EVERY),
        "SAM3_DETECTOR__PROMPTS": "red mug",
        "SAM3_CAMERA__FPS": "6",
    }
    rig.node()
    rig.start("camera", "scene:tabletop", "--camera.loop")
    yield rig
    rig.close()


@pytest.fixture
def client(rig: Rig) -> Iterator[PerceptionClient]:
    with PerceptionClient(rig.masks, rig.control, timeout_ms=10000) as client:
        yield client


def prompt(rig: Rig, *names: str) -> None:
    command = [sys.executable, "-m", "sam3_node", "prompt", *names, "--transport.control", rig.control]
    subprocess.run(command, check=True, timeout=60)


def of(masks: MaskFrame, label: str) -> set[int]:
    return {i.id for i in masks.instances if i.label == label and i.state == "tracked"}


def test_a_name_more_is_tracked_and_the_others_keep_their_ids(rig: Rig, client: PerceptionClient) -> None:
    mug = of(masks_where(client, lambda masks: of(masks, "red mug"), "the mug"), "red mug")
    prompt(rig, "red mug", "green bottle")
    asked = masks_where(client, lambda masks: len(masks.prompts) == 2, "the new names")
    assert mug <= {i.id for i in asked.instances}
    found = masks_where(client, lambda masks: any(i.label == "green bottle" for i in masks.instances), "it")
    assert found.seq - asked.seq <= 2 * EVERY, "a bottle is there within two periods of the detector"
    assert mug <= {i.id for i in found.instances}
    prompt(rig, "green bottle")
    left = masks_where(client, lambda masks: masks.prompts == ("green bottle",), "one name")
    assert {i.label for i in left.instances} <= {"green bottle"}
    assert not mug & {i.id for i in left.instances}


def test_the_status_has_the_limits_of_the_names(client: PerceptionClient) -> None:
    client.set_prompts(
        ["red mug"], scores={"red mug": 0.4}, most={"red mug": 2}, priorities={"red mug": "low"}
    )
    limits = {"scores": {"red mug": 0.4}, "most": {"red mug": 2}, "priorities": {"red mug": "low"}}
    assert client.status()["prompt_limits"] == limits
