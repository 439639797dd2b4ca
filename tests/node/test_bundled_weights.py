"""Names of objects and their places: one node with the bundled weights, which plays the bundled recording."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.client import AddedObject, ObjectPlace, PerceptionClient
from sam3_node.errors import RequestError, UnknownObjectError
from sam3_node.types import MaskFrame
from tests.support.node_rig import Rig, masks_where, until
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.processes import run_command
from tests.support.refuses import refuses
from tests.support.tabletop import iou, true_instance

LABEL = "red mug"
CLIP_FRAMES = 225


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A camera that plays the recording again and again, and a node that detects the red mug from its start."""
    with Rig(tmp_path_factory.mktemp("bundled")) as rig:
        rig.environment |= {
            "SAM3_MODEL__NAME": "nano",
            "SAM3_DETECTOR__KIND": "yolo-world",
            "SAM3_DETECTOR__EVERY": "4",
            "SAM3_DETECTOR__PROMPTS": LABEL,
            "SAM3_CAMERA__FPS": "6",
            "SAM3_CAMERA__LOOP": "true",
            "SAM3_TRACKER__FEATURE_CACHE_S": "20",  # a busy machine is slow to ask
        }
        rig.node()
        rig.start("camera", "scene:tabletop", TRANSPORT__FRAMES=rig.frames[0])
        yield rig


@pytest.fixture
def named(rig: Rig) -> Iterator[PerceptionClient]:
    """A client of the node as the last test has left it."""
    with rig.client() as client:
        yield client


@pytest.fixture
def client(named: PerceptionClient) -> PerceptionClient:
    """A client of the node, which has neither names nor objects."""
    named.wait_for_camera(PATIENCE_MS)
    named.set_prompts([])
    named.reset()
    return named


def prompt(rig: Rig, *names: str) -> None:
    done = run_command(["prompt", *names, "--transport.control", rig.control])
    assert done.returncode == 0, done.stderr


def of(masks: MaskFrame, label: str, state: str = "tracked") -> set[int]:
    return {i.id for i in masks.instances if i.label == label and state in ("", i.state)}


def test_a_name_more_is_tracked_and_the_others_keep_their_ids(rig: Rig, named: PerceptionClient) -> None:
    mug = of(masks_where(named, lambda masks: of(masks, "red mug"), "the mug"), "red mug")
    prompt(rig, "red mug", "green bottle")
    asked = masks_where(named, lambda masks: len(masks.prompts) == 2, "the new names")
    assert mug <= {i.id for i in asked.instances}
    seen: list[MaskFrame] = []
    found = masks_where(named, lambda masks: seen.append(masks) or of(masks, "green bottle", ""), "it")
    detections = sum("detect" in masks.stages_us for masks in seen)
    assert detections <= 2, "a bottle is there within two periods of the detector"
    assert mug <= {i.id for i in found.instances}
    prompt(rig, "green bottle")
    left = masks_where(named, lambda masks: masks.prompts == ("green bottle",), "one name")
    assert {i.label for i in left.instances} <= {"green bottle"}
    assert not mug & {i.id for i in left.instances}


def test_the_status_has_the_limits_of_the_names(named: PerceptionClient) -> None:
    limits = {"scores": {"red mug": 0.4}, "most": {"red mug": 2}, "priorities": {"red mug": "low"}}
    named.set_prompts(["red mug"], **limits)
    assert named.status()["prompt_limits"] == limits


def add_mug(client: PerceptionClient) -> int:
    """Track the mug of camera cam0, and wait until the node has seen it by a sure mask."""
    masks = masks_where(client, lambda masks: masks.camera == "cam0", "masks of cam0")
    box = true_instance(masks.seq % CLIP_FRAMES, LABEL).box
    added = client.add_object(box=box, label=LABEL, seq=masks.seq, camera="cam0")
    client.wait_until_seen(added.id, PATIENCE_MS, camera="cam0")
    return added.id


def find_place(client: PerceptionClient, object_id: int) -> ObjectPlace:
    """Return the place of an object that the node has seen."""

    def look() -> ObjectPlace | None:
        (place,) = client.where(object_id, camera="cam0")
        return place if place.has_picture else None

    return until(look, "a place with a picture")


def test_a_tracked_object_is_where_its_mask_is(client: PerceptionClient) -> None:
    object_id = add_mug(client)
    place = find_place(client, object_id)
    assert (place.id, place.label, place.camera, place.state) == (object_id, LABEL, "cam0", "tracked")
    assert place.age_s is not None
    assert place.age_s < PATIENCE_S
    assert place.seq is not None
    true_box = true_instance(place.seq % CLIP_FRAMES, LABEL).box
    assert place.box is not None
    assert np.abs(np.subtract(place.box, true_box)).max() < 60
    assert [each.id for each in client.where(LABEL)] == [object_id]
    assert client.where("no such thing") == []
    assert client.where(object_id + 1000) == []


def test_a_picture_shows_the_object(client: PerceptionClient) -> None:
    object_id = add_mug(client)
    find_place(client, object_id)
    picture = client.picture(object_id)
    pixels = cv2.imdecode(np.frombuffer(picture.jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    assert max(pixels.shape[:2]) <= 128
    x0, y0, x1, y1 = picture.box
    assert pixels.shape[1] / pixels.shape[0] == pytest.approx((x1 - x0) / (y1 - y0), rel=0.1)
    # it is the red one
    blue, _, red = pixels.reshape(-1, 3).mean(axis=0)
    assert red > blue
    with refuses(UnknownObjectError):
        client.picture(object_id + 1000)


def test_an_object_that_was_removed_is_unknown(client: PerceptionClient) -> None:
    object_id = add_mug(client)
    find_place(client, object_id)
    client.remove_object(object_id)
    assert client.where(object_id) == []
    with refuses(UnknownObjectError):
        client.picture(object_id)


def test_an_object_is_not_looked_for_on_its_own_camera(client: PerceptionClient) -> None:
    object_id = add_mug(client)
    with refuses(RequestError, field=("cam0", "another camera")):
        client.add_object(like=object_id, like_camera="cam0", camera="cam0")


def test_the_shell_prints_the_place_and_writes_the_picture(
    rig: Rig, client: PerceptionClient, tmp_path: Path
) -> None:
    object_id = add_mug(client)
    find_place(client, object_id)
    command = ["where", "--transport.control", rig.control]
    command += ["--transport.masks", rig.masks, "--timeout", str(PATIENCE_S)]
    printed = _run(*command, LABEL, "--picture", str(tmp_path / "mug.jpg"))
    assert printed.split()[:4] == ["cam0", str(object_id), *LABEL.split()]
    assert (tmp_path / "mug.jpg").read_bytes()[:2] == b"\xff\xd8"
    (place,) = json.loads(_run(*command, str(object_id), "--json"))
    assert (place["id"], place["label"]) == (object_id, LABEL)
    assert _run(*command, "no such thing") == "unknown\n"


def _run(*command: str) -> str:
    done = run_command(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_object_begins_on_a_second_camera_by_its_looks(rig: Rig, client: PerceptionClient) -> None:
    """The last test of this file: the node keeps the second camera."""
    rig.start("camera", "scene:tabletop", TRANSPORT__FRAMES=rig.frames[1], CAMERA__NAME="side")
    masks_where(client, lambda masks: masks.camera == "side", "masks of the second camera")
    object_id = add_mug(client)
    find_place(client, object_id)

    def begin() -> AddedObject | None:
        # a frame on which it is hidden does not show it for sure
        with suppress(RequestError):
            return client.add_object(like=object_id, like_camera="cam0", camera="side")
        return None

    added = until(begin, "the mug on the second camera")
    assert added.camera == "side"
    assert added.segmentation is not None
    true_mask = true_instance(added.segmentation.seq % CLIP_FRAMES, LABEL).mask
    assert iou(added.segmentation.mask.full(), true_mask.full()) > 0.3
    assert [place.label for place in client.where(added.id, camera="side")] == [LABEL]
    assert {place.camera for place in client.where(LABEL)} == {"cam0", "side"}
