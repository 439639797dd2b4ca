"""Snapshots with a right digest and wrong values: refused as a whole, or the node goes on from them."""

import math
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sam3_node.calibration import Calibration
from sam3_node.errors import ReplayError, SnapshotError
from sam3_node.models import TrackerModel
from sam3_node.node.operations import carry_out
from sam3_node.perception.checkpoint import pack_tensors
from sam3_node.perception.identity import LiveIdentity
from sam3_node.perception.object_memory import PICTURE_PX
from sam3_node.perception.perception import Perception
from sam3_node.perception.saved import check_state
from sam3_node.perception.snapshot import Snapshot, restore_snapshot
from sam3_node.perception.step import StepFrame
from sam3_node.schema.fields import convert
from sam3_node.schema.operations import FindObjects, ReadPicture
from sam3_node.schema.replies import PictureReply, PlacesReply
from sam3_node.settings import DetectorSettings, Settings, SpatialSettings, TrackerSettings
from sam3_node.tracking.appearance import COLOURS
from sam3_node.types import Frame, Intrinsics
from sam3_node.wire import encode_depth, encode_image, pack_masks, unpack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from sam3_node.wire.images import check_photo
from tests.support import coloured_blocks
from tests.support.coloured_blocks import ColourDetector
from tests.support.repeats import repetitions

WRONG = (math.nan, math.inf, -math.inf, 1e300, 2**62, 2**64 - 1, 2**31, -7, 0, True, None, "x", [], {})
"""What stands in the place of a value."""
CALIBRATION = Calibration(
    intrinsics={
        "width_px": 320,
        "height_px": 240,
        "fx_px": 300.0,
        "fy_px": 300.0,
        "cx_px": 160.0,
        "cy_px": 120.0,
    },
    hand_eye={
        "kind": "eye_to_hand",
        "translation_m": (0.0, 0.0, 1.5),
        "rotation_vector_rad": (math.pi, 0.0, 0.0),
    },
)
"""A camera that looks down at a table."""
STEPS = 9
"""Frames before the snapshot."""
DIGESTS: dict[str, str] = {}
"""Those of the files of the weights, which are read once: all perceptions of these tests have the same."""
Place = tuple[Any, ...]
MEMORY: Place = ("cameras", "cam0", "prompting", "registry", "values", "memories", 1)
"""What is remembered of an object."""


def draw(seq: int) -> Frame:
    """Blocks that move on a table, with their depth."""
    frame = coloured_blocks.frame(seq, {(30 + 3 * seq, 40): "red", (130, 90 + seq): "green"})
    depth = np.full((frame.height, frame.width), 1200, np.uint16)
    depth[90 + seq : 140 + seq, 130:180] = 1150
    depth[40:90, 30 + 3 * seq : 80 + 3 * seq] = 1150
    return replace(
        frame,
        depth=encode_depth(depth, "z16", 0.001, True),
        intrinsics=Intrinsics(300.0, 300.0, 160.0, 120.0),
    )


def make(model: TrackerModel) -> Perception:
    """A perception that detects, links, and measures the table."""
    settings = Settings(
        detector=DetectorSettings(every=2),
        tracker=TrackerSettings(max_objects=8, link_distance_m=0.2, window="auto"),
        spatial=SpatialSettings(table=True),
    )
    perception = Perception(settings, model, ColourDetector())
    if not DIGESTS:
        DIGESTS.update(perception.digests)
    perception.digests = DIGESTS
    perception.calibrations = (CALIBRATION,)
    perception.session = LiveIdentity(lambda _: 0.0, 0.0, live=True)
    return perception


def step(perception: Perception, seq: int) -> None:
    """Step a frame as a node does, and read the message as a client does."""
    frame = draw(seq)
    pipeline = perception.serve("cam0")
    masks = perception.link(pipeline.step(StepFrame(frame, frame.capture_ns)))
    pipeline.catch_ups.advance()
    unpack_masks(pack_masks(replace(masks, node="0" * 16, epoch=pipeline.epoch)))


@pytest.fixture(scope="module")
def snapshot(model: TrackerModel) -> Snapshot:
    """A snapshot with detected objects, a pointed one, one that catches up, a table, velocities and links."""
    perception = make(model)
    perception.set_prompts(["red", "green"], {"red": 0.2}, {"red": 3}, {"green": "low"})
    for seq in range(STEPS):
        step(perception, seq)
        if seq == STEPS // 2:
            perception.pipelines["cam0"].add(FramePrompt(points=[(60, 60)]), "pointed", None)
    perception.pipelines["cam0"].add(FramePrompt(box=[110, 70, 170, 130]), "past", STEPS - 4)
    return Snapshot.take(perception, "automatic")


def list_places(value: object, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each plain value of a state with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from list_places(item, (*place, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from list_places(item, (*place, index))
    elif not isinstance(value, torch.Tensor):
        yield place, value


def list_each_kind(state: object, rng: random.Random, most: int) -> Iterator[tuple[Place, Any]]:
    """Yield the places of a state, at most `most` of those that differ in numbers alone, as the rows of a table do."""
    kinds: dict[Place, list[tuple[Place, Any]]] = {}
    for place, value in list_places(state):
        kind = tuple(None if isinstance(part, int) else part for part in place)
        kinds.setdefault(kind, []).append((place, value))
    for places in kinds.values():
        yield from places if len(places) <= most else rng.sample(places, most)


def put(state: Any, place: Place, value: object) -> Any:
    """Return the state with another value at a place."""
    if not place:
        return value
    changed = dict(state) if isinstance(state, dict) else list(state)
    changed[place[0]] = put(state[place[0]], place[1:], value)
    return changed


def go_on(perception: Perception) -> None:
    """Do what a node does after it has restored: steps with a detection and without, replies, its own snapshot."""
    for seq in range(STEPS, STEPS + 2):
        step(perception, seq)
    pipeline = perception.pipelines["cam0"]
    assert not pipeline.stage_failures
    places = carry_out(perception, FindObjects())
    convert(places.to_result(), PlacesReply, "where")
    for place in places.objects:
        if place.has_picture:
            picture = carry_out(perception, ReadPicture(id=place.id))
            convert(picture.to_result(), PictureReply, "picture")
            assert check_photo(picture.jpeg).width <= PICTURE_PX
    perception.status()
    perception.describe()
    Snapshot.take(perception, "automatic").pack()


def attempt(model: TrackerModel, snapshot: Snapshot) -> bool:
    """Return True if the snapshot is restored and the node goes on; False if it is refused and changes nothing."""
    perception = make(model)
    perception.set_prompts(["green"])
    perception.serve("cam0")
    before = pack_tensors(perception.state())
    reason = ""
    try:
        restore_snapshot(perception, Snapshot.unpack(snapshot.pack(), "made up"), "made up")
    except SnapshotError as error:
        reason = str(error)
    if not reason:
        go_on(perception)
        return True
    assert reason.startswith("made up: expected")
    assert pack_tensors(perception.state()) == before
    return False


def test_the_snapshot_itself_goes_on(model: TrackerModel, snapshot: Snapshot) -> None:
    parts = snapshot.state["cameras"]["cam0"]
    assert parts["prompting"]["catch_ups"]["progress"]
    assert parts["prompting"]["registry"]["values"]["velocities"]
    assert parts["stages"]["table"]["plane"]
    assert snapshot.state["links"]["things"]
    assert attempt(model, snapshot)


def test_each_value_is_right_or_refused(model: TrackerModel, snapshot: Snapshot) -> None:
    """In the place of each value of a snapshot stands one of another kind, range or type."""
    rng = random.Random(6)
    outcomes = {True: 0, False: 0}
    for place, right in list_each_kind(snapshot.state, rng, repetitions(2, 8)):
        others = [wrong for wrong in WRONG if type(wrong) is not type(right) or wrong != right]
        for wrong in rng.sample(others, repetitions(1, 2)):
            outcomes[attempt(model, replace(snapshot, state=put(snapshot.state, place, wrong)))] += 1
    # most are refused; an age that is too high, for example, does no harm
    assert outcomes[False] > outcomes[True] > 0


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("prompts", "priorities", "green"), math.nan),
        (("prompts", "thresholds", "red"), math.nan),
        (("cameras", "cam0", "prompting", "registry", "last_id"), 2**64 - 1),
        (("cameras", "cam0", "prompting", "registry", "objects", 1, "age"), -7),
        (("cameras", "cam0", "prompting", "registry", "objects", 1, "id"), 99),
        (("cameras", "cam0", "stages", "table", "plane"), [0.0, 0.0, 1e12, 0.3, 0.0]),
        (("cameras", "cam0", "stages", "detect", "lifecycle", "track_states", 1), None),
        (("cameras", "cam0", "stages", "detect", "lifecycle", "track_states"), {99: {}}),
        (("cameras", "cam0", "prompting", "tracker", "frame_number"), 1),
        (("cameras", "cam0", "prompting", "confidence", "free", 0), 99),
        (
            ("cameras", "cam0", "stages", "detect", "lifecycle", "track_states", 1, "names", "red", "means"),
            [],
        ),
        ((*MEMORY, "gallery", "embeddings"), torch.zeros(1, 0)),
        ((*MEMORY, "gallery", "embeddings"), torch.full((1, 2 * COLOURS), 1e30)),
        ((*MEMORY, "picture", 0), -7),
        ((*MEMORY, "picture", 2, 0), 2**40),
        ((*MEMORY, "picture", 3), b""),
        ((*MEMORY, "picture", 3), b"<html><script>"),
        ((*MEMORY, "picture", 3), b"\xff\xd8" + bytes(1 << 22)),
        ((*MEMORY, "picture", 3), bytes(encode_image(np.zeros((300, 300, 3), np.uint8), "jpeg"))),
        ((*MEMORY, "sighting", 2, 0), -7),
        ((*MEMORY, "sighting", 3), 7.0),
        (("links", "things", 1, "id"), 99),
        (("epochs",), {}),
        (("paused",), "x"),
    ],
)
def test_a_wrong_value_that_each_step_would_stumble_over_is_refused(
    model: TrackerModel, snapshot: Snapshot, place: Place, wrong: object
) -> None:
    assert not attempt(model, replace(snapshot, state=put(snapshot.state, place, wrong)))


@pytest.mark.parametrize(
    "fields",
    [
        {"saved_ns": "x"},
        {"kind": "other"},
        {"counts": {"cam0": {"stepped": "x"}}},
        {"counts": {"cam0": 1}},
        {"hand_over": {"node": 1.5}},
        {"uptime": {"boot": 1, "ns": math.nan}},
    ],
)
def test_wrong_fields_beside_the_state_are_refused(snapshot: Snapshot, fields: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError, match="made up: expected"):
        Snapshot.unpack(replace(snapshot, **fields).pack(), "made up")


def test_a_state_of_very_many_objects_is_refused_at_once(model: TrackerModel, snapshot: Snapshot) -> None:
    place = ("cameras", "cam0", "prompting")
    objects = snapshot.state["cameras"]["cam0"]["prompting"]["registry"]["objects"]
    many = {number: objects[1] | {"id": number} for number in range(1, 20_001)}
    state = put(snapshot.state, (*place, "registry", "last_id"), len(many))
    state = put(state, (*place, "registry", "objects"), many)
    state = put(state, (*place, "tracker", "rows", "rows"), dict.fromkeys(many, 0))
    begin_s = time.process_time()
    with pytest.raises(ReplayError, match="objects"):
        check_state(state)
    assert time.process_time() - begin_s < 5


def test_a_deep_state_is_refused(model: TrackerModel, snapshot: Snapshot) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert not attempt(model, replace(snapshot, state=snapshot.state | {"deep": deep}))
