"""A recorded robot arm through camera, node and watcher as three processes."""

import itertools
import re
from collections.abc import Iterator

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame
from tests.support.node_rig import Process, Rig, ids, masks_where
from tests.support.paths import SHARED

VIDEO = SHARED / "data/video/16_robotarm.mp4"
STAGES = {"decode", "preprocess", "encode", "track", "masks", "remember", "pack"}
GRIPPER = (640, 360)
FRAMES = 25

pytestmark = pytest.mark.skipif(not VIDEO.is_file(), reason="no real video here")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A camera that plays the video faster than the node can follow, and the node."""
    with Rig(tmp_path_factory.mktemp("rig")) as rig:
        rig.node()
        rig.start("camera", f"video:{VIDEO}", CAMERA__FPS="120", CAMERA__LOOP="true")
        yield rig


@pytest.fixture(scope="module")
def watcher(rig: Rig) -> Process:
    return rig.start("watch")


@pytest.fixture
def client(rig: Rig) -> Iterator[PerceptionClient]:
    with rig.client() as client:
        masks_where(client, bool, "masks of the video")
        yield client


def successive(client: PerceptionClient, count: int) -> list[MaskFrame]:
    """The masks of the next frames that the node processes."""
    return [masks_where(client, bool, "masks") for _ in range(count)]


def test_every_processed_frame_comes_out_with_its_times(client: PerceptionClient) -> None:
    for masks in successive(client, FRAMES):
        assert (masks.camera, masks.width, masks.height) == ("cam0", 1280, 720)
        # an object that is away is searched for on some frames
        assert set(masks.stages_us) - {"recall"} == STAGES
        assert masks.capture_ns <= masks.received_ns <= masks.published_ns
        assert (
            sum(masks.stages_us.values()) - masks.stages_us["pack"]
            <= (masks.published_ns - masks.received_ns) / 1e3
        )


def test_the_newest_frame_wins_and_those_passed_over_are_counted(client: PerceptionClient) -> None:
    client.reset()
    objects = [
        client.add_object(points=[(160 * i, 360)]).id for i in range(1, 8)
    ]  # which makes the node slow
    masks_where(client, lambda masks: ids(masks) == objects, "the objects")
    found = successive(client, FRAMES)
    pairs = list(itertools.pairwise(found))
    assert all(before.seq < after.seq and before.capture_ns < after.capture_ns for before, after in pairs)
    assert all(after.seq - before.seq >= after.skipped + 1 for before, after in pairs)
    assert sum(masks.skipped for masks in found) > 0


def test_an_object_added_live_by_a_point_is_tracked(client: PerceptionClient) -> None:
    client.reset()
    object_id = client.add_object(points=[GRIPPER], label="gripper").id
    masks_where(client, lambda masks: ids(masks) == [object_id], "the object")
    for masks in successive(client, FRAMES):
        assert [instance.label for instance in masks.instances] == ["gripper"]
        assert masks.instances[0].mask.size == (720, 1280)


def test_the_watcher_shows_the_object(watcher: Process, client: PerceptionClient) -> None:
    client.reset()
    object_id = client.add_object(points=[GRIPPER], label="gripper").id
    lines = (watcher.next_line() for _ in range(2000))
    assert any(re.search(rf"\b{object_id}\b.*gripper", line) for line in lines)
