"""A node with SAM 3.1's shared memories: names, clicks, a replay as recorded, and a kill with more than one group.

Camera, node, recorder and replay are processes. The weights are small and random.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sam3_node.bags import read_masks
from sam3_node.bags.native.reader import RecordedMasks
from sam3_node.client import PerceptionClient
from sam3_node.errors import UnknownFrameError
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
from sam3_node.replay.run import compare_masks
from sam3_node.transport.tap import StreamTap
from sam3_node.types import MaskFrame
from sam3_node.wire import EVENTS_TOPIC, REGROUPED, Event, unpack_event
from tests.replay.test_as_recorded import is_whole, log_of, replay
from tests.support.node_rig import Rig, ids, masks_where, until
from tests.support.sam31_detector import whole_tensors
from tests.support.tiny_clip import write_tiny_clip
from tools.sam31.__main__ import write

SLOTS = 16
"""Objects of a group."""
OBJECTS = SLOTS + 1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model of `tools.sam31 small`."""
    folder = tmp_path_factory.mktemp("weights") / "small"
    write(folder, random_tensors(small_sizes(112), 0), "Random weights")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the detector, too, and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("weights") / "whole"
    write(folder, whole_tensors(), "Random weights")
    write_tiny_clip(folder)
    return folder


@pytest.fixture
def rig(tmp_path: Path, small: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as rig:
        rig.environment |= {
            "SAM3_MODEL__NAME": str(small),
            "SAM3_TRACKER__MAX_OBJECTS": "24",
            "SAM3_CAMERA__FPS": "4",
        }
        yield rig


def click(client: PerceptionClient, number: int) -> int:
    place = (15 + 17 * number % 290, 15 + 41 * number % 210)
    return client.add_object(points=[place], label=f"thing {number}").id


def masks_with(client: PerceptionClient, wanted: list[int]) -> MaskFrame:
    return masks_where(client, lambda masks: ids(masks) == wanted, f"masks of {wanted}")


def wait_for_moved(tap: StreamTap) -> int:
    """Return the first object whose group has changed from now on, by the event."""

    def find() -> int | None:
        message = tap.take(100)
        if message is None or message.parts[0] != EVENTS_TOPIC:
            return None
        event = unpack_event(message.parts)
        return event.args["id"] if event.op == REGROUPED else None

    return until(find, "groups that are merged")


def test_a_killed_node_goes_on_with_two_groups_and_tells_who_changes_group(rig: Rig) -> None:
    often = {"SNAPSHOT__EVERY_S": "0.2", "SNAPSHOT__PATH": str(rig.folder / "node.snapshot")}
    node = rig.node(**often)
    rig.camera()
    with rig.client() as client:
        masks_where(client, bool, "masks of the camera")
        added = [click(client, number) for number in range(OBJECTS)]
        before = masks_with(client, added)
        saved = client.status()["snapshot"]["saved"]
        until(lambda: client.status()["snapshot"]["saved"] >= saved + 2, "a snapshot of all")
        node.kill()
        rig.node(**often)
        after = masks_where(client, lambda masks: masks.node != before.node, "masks of the new process")
        assert (after.epoch, ids(after)) == (before.epoch, added)
        assert [item.label for item in after.instances] == [item.label for item in before.instances]
        assert all(new.age > old.age for new, old in zip(after.instances, before.instances, strict=True))
        assert any(item.state == "tracked" for item in after.instances)
        with StreamTap([rig.frames[1]], rig.masks, [], 1 << 26) as tap:
            until(lambda: tap.take(100), "the tap is connected")
            # the last one is alone in its group: once two have left, both groups become one
            for object_id in added[:2]:
                client.remove_object(object_id)
            left = added[2:]
            assert wait_for_moved(tap) in left
        masks_with(client, left)
        assert click(client, OBJECTS) > added[-1]


def test_names_and_clicks_replay_as_recorded(rig: Rig, whole: Path) -> None:
    for attempt in range(3):
        path = rig.folder / f"live{attempt}.mcap"
        record(rig, whole, path)
        # on a busy machine the recorder may miss frames
        if is_whole(path):
            break
    log = log_of(path)
    live = [item.masks for item in log if isinstance(item, RecordedMasks)]
    assert {"set_prompts", "add_object", "refine_object", "remove_object"} <= {
        item.op for item in log if isinstance(item, Event)
    }
    assert any(len(masks.instances) > 2 for masks in live)
    done = replay(path, rig.folder / "out", "--as-recorded", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"identical: the masks of all {len(live)} recorded frames" in done.stdout
    replayed = list(read_masks(rig.folder / "out" / "masks.mcap"))
    assert compare_masks(replayed, live).is_identical
    summary = json.loads((rig.folder / "out" / "summary.json").read_text())
    assert summary["notes"] == []


def record(rig: Rig, weights: Path, path: Path) -> None:
    """Record a node that finds a name with SAM 3.1's own detector, and a client that edits."""
    settings = {
        "MODEL__NAME": str(weights),
        "DETECTOR__NAME": str(weights),
        "DETECTOR__KIND": "sam3-concept",
        "DETECTOR__SCORE": "0.02",
        "DETECTOR__EVERY": "2",
        "TRACKER__FEATURE_CACHE_S": "20",
    }
    # the recorder before the node, so that it has each frame that the node steps
    camera = rig.camera()
    recorder = rig.start("record", str(path))
    node = rig.node(**settings)
    with rig.client() as client:
        masks_where(client, bool, "masks of the camera")
        client.set_prompts(["mug"], most={"mug": 2})
        masks_where(client, lambda masks: masks.instances, "something found by name")
        added = [click(client, number) for number in range(3)]
        edit_past(client, added[0])
        seen = masks_where(client, lambda masks: set(added) <= set(ids(masks)), "masks of all")
        client.remove_object(added[1])
        client.set_prompts([])
        masks_where(client, lambda masks: masks.prompts == () and masks.seq > seen.seq, "no names")
        masks_with(client, [added[0], added[2]])
    recorder.terminate()
    camera.kill()
    node.kill()


def edit_past(client: PerceptionClient, object_id: int) -> None:
    """Correct an object on a frame that the node still holds."""

    def correct() -> bool:
        seq = masks_where(client, lambda masks: object_id in ids(masks), "its mask").seq
        try:
            client.refine_object(object_id, points=[(30, 40)], seq=seq)
        except UnknownFrameError:  # the machine is so slow that the frame is no longer held
            return False
        return True

    until(correct, "a correction of a frame")
