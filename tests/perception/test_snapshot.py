"""Snapshots: a node that continues from one makes the same masks; damaged and foreign ones are refused."""

import hashlib
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save

from sam3_node.errors import CapacityError, SnapshotError
from sam3_node.models import TrackerModel
from sam3_node.perception import snapshot as snapshots
from sam3_node.perception.checkpoint import pack_tensors
from sam3_node.perception.identity import LiveIdentity
from sam3_node.perception.perception import Perception
from sam3_node.perception.snapshot import ID_BLOCK, IdReserve, Snapshot, restore_snapshot
from sam3_node.perception.step import StepFrame
from sam3_node.settings import DetectorSettings, Settings, TrackerSettings
from sam3_node.types import Frame, FramePose, Intrinsics, RobotState
from sam3_node.wire import encode_depth, pack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support import coloured_blocks
from tests.support.coloured_blocks import ColourDetector
from tests.support.refuses import refuses
from tests.support.repeats import repetitions
from tests.support.tiny import tiny_model

Action = Callable[[Perception], object]
FRAMES = repetitions(14, 30)
GOES_ON = 5
POINT = FramePrompt(points=[(60, 60)])
BOX = FramePrompt(box=[110, 70, 170, 130])


def live(perception: Perception) -> Perception:
    perception.session = LiveIdentity(lambda _: 0.0, 0.0, live=True)
    return perception


def named(nano: TrackerModel) -> Perception:
    """A perception that detects by name, measures in 3-D and links."""
    settings = Settings(
        detector=DetectorSettings(every=3), tracker=TrackerSettings(max_objects=8, link_distance_m=0.2)
    )
    return live(Perception(settings, nano, ColourDetector()))


def moving_arm(frame: Frame) -> RobotState:
    place = (0.1 * frame.seq, 0.0, 0.5)
    return RobotState(FramePose("gripper", "base", frame.capture_ns, place, (0.0, 0.0, 0.0, 1.0)))


def step(frame: Frame) -> Action:
    def act(perception: Perception) -> bytes:
        pipeline = perception.serve(frame.camera)
        step = StepFrame(frame, frame.capture_ns, robot_state=moving_arm(frame))
        masks = perception.link(pipeline.step(step))
        joined = [pipeline.catch_ups.advance() for _ in range(2)]
        return pack_masks(replace(masks, stages_us={}))[1] + repr(joined).encode()

    return act


def edits(frames: Sequence[Frame]) -> dict[int, list[Action]]:
    """Return what users do after the n-th frame."""
    camera = frames[0].camera

    def add(prompt: FramePrompt, seq: int | None) -> Action:
        return lambda perception: perception.serve(camera).add(prompt, "pointed", seq).id

    def refine(object_id: int, prompt: FramePrompt, seq: int | None) -> Action:
        return lambda perception: perception.serve(camera).refine(object_id, prompt, seq).seq

    return {
        0: [lambda perception: perception.set_prompts(["red", "green"], {"red": 0.2})],
        2: [add(POINT, None)],
        5: [add(BOX, frames[2].seq)],
        6: [refine(1, POINT, None)],
        8: [refine(1, POINT, frames[6].seq)],
        10: [lambda perception: perception.set_prompts(["blue", "red"], None, {"red": 1})],
    }


PAST = ((2, 5), (6, 8))
"""Frames of prompts, and frames after which the prompts come. A snapshot in between would not keep the first."""


class Story(NamedTuple):
    """Frames with depth, poses and names, and what users do between them; and moments at which it may be cut."""

    actions: list[Action]
    places: list[int]


@pytest.fixture(scope="module")
def story() -> Story:
    frames = [draw(seq) for seq in range(FRAMES)]
    actions = list[Action]()
    after = edits(frames)
    starts = list[int]()
    for index, frame in enumerate(frames):
        starts.append(len(actions))
        actions += [step(frame), *after.get(index, [])]
    apart = {place for first, last in PAST for place in range(starts[first] + 2, starts[last] + 2)}
    places = sorted(set(range(1, len(actions))) - apart)
    random.Random(18).shuffle(places)
    return Story(actions, places)


def draw(seq: int) -> Frame:
    """Blocks that move, with the depth of a slope under them."""
    placed = {(30 + 3 * seq, 40): "red", (130, 90 + seq): "green"} | ({(230, 150): "blue"} if seq > 4 else {})
    frame = coloured_blocks.frame(seq, placed)
    slope = np.tile(np.arange(frame.width, dtype=np.uint16) + 1000, (frame.height, 1))
    return replace(
        frame,
        depth=encode_depth(slope, "z16", 0.001, True),
        intrinsics=Intrinsics(300.0, 300.0, 160.0, 120.0),
    )


def test_masks_after_a_restore_are_those_of_a_node_that_was_never_killed(
    nano: TrackerModel, story: Story
) -> None:
    whole = named(nano)
    expected = list[object]()
    saved = dict[int, bytes]()
    actions = story.actions
    chosen = story.places[: repetitions(2, 20)]
    for index, action in enumerate(actions):
        if index in chosen:
            saved[index] = Snapshot.take(whole, "hand_over").pack()
        expected.append(action(whole))
    labels = {status.label for status in whole.pipelines["cam0"].objects}
    assert labels == {"pointed", "red", "blue"}
    for index, data in saved.items():
        other = named(nano)
        end = index + GOES_ON
        restore_snapshot(other, Snapshot.unpack(data, "test"), "test")
        assert [action(other) for action in actions[index:end]] == expected[index:end], f"before {index}"
        assert other.pipelines["cam0"].epoch == whole.pipelines["cam0"].epoch


@pytest.fixture
def small() -> Perception:
    """A perception of a tiny model with two objects."""
    return with_objects(tiny())


def tiny(**tracker: Any) -> Perception:
    settings = Settings(tracker=TrackerSettings(max_objects=4, link_distance_m=0.1, **tracker))
    return live(Perception(settings, tiny_model("sam3"), ColourDetector()))


def with_objects(perception: Perception) -> Perception:
    perception.set_prompts(["red"])
    pipeline = perception.serve("cam0")
    pipeline.step(coloured_blocks.frame(0, {(30, 40): "red"}))
    pipeline.add(FramePrompt(points=[(40, 40)]), "pointed", 0)
    return perception


def packed(perception: Perception) -> bytes:
    return pack_tensors(perception.state())


def test_every_cut_and_flipped_byte_is_refused(small: Perception) -> None:
    data = Snapshot.take(small, "automatic").pack()
    rng = random.Random(1)
    for length in [*range(64), *rng.sample(range(len(data)), 100)]:
        with pytest.raises(SnapshotError, match="expected"):
            Snapshot.unpack(data[:length], "cut")
    for place in [*range(200), *rng.sample(range(len(data)), 200)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(SnapshotError, match="expected"):
            Snapshot.unpack(bytes(damaged), "flipped")


def sign(body: bytes, version: int = snapshots.VERSION) -> bytes:
    """Return a file with a right digest, as someone who means harm would write it."""
    return snapshots.MAGIC + struct.pack("<I", version) + hashlib.sha256(body).digest() + body


def test_signed_nonsense_is_refused_and_changes_nothing(small: Perception) -> None:
    """Bytes that are flipped before they are signed either give a state of the right form, or are refused."""
    body = Snapshot.take(small, "automatic").pack()[44:]
    rng = random.Random(2)
    state = small.state()
    before = packed(small)
    errors = list[str]()
    for _ in range(repetitions(60, 150)):
        damaged = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(body)) if rng.random() < 0.3 else -rng.randrange(1, 6000)
            damaged[place] ^= 1 << rng.randrange(8)
        try:
            restore_snapshot(small, Snapshot.unpack(sign(bytes(damaged)), "made up"), "made up")
            small.restore(state)
        except SnapshotError as error:
            errors.append(str(error))
        assert packed(small) == before
    assert len(errors) > 10
    assert all("made up: expected" in error for error in errors)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": 1, "saved_ns": 0, "identity": {}, "state": {}, "counts": {}},
        {"kind": "automatic", "saved_ns": 0, "identity": [], "state": {}, "counts": {}},
        {"kind": "automatic", "saved_ns": 0, "identity": {}, "state": {}, "counts": {}, "more": 1},
    ],
)
def test_other_content_is_refused(fields: dict[str, Any]) -> None:
    with refuses(SnapshotError, field=("content", "snapshot")):
        Snapshot.unpack(sign(pack_tensors(fields)), "other")


def test_strides_and_repeated_tensors_take_no_more_memory_than_the_file() -> None:
    plain = msgpack.packb({"t": msgpack.ExtType(1, msgpack.packb(["0", [1 << 40]]))})
    twice = msgpack.packb({"t": [msgpack.ExtType(1, msgpack.packb(["0", [1]]))] * 2})
    for content in (plain, twice):
        tensors = {"0": torch.zeros(2), "plain": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
        with refuses(SnapshotError, field="content"):
            Snapshot.unpack(sign(save(tensors)), "large")


def test_a_state_that_misses_a_part_is_refused_whole(small: Perception) -> None:
    before = packed(small)
    epochs = small.pipelines["cam0"].epoch
    for name in [name for name in small.state() if name != "nameless_owner"]:
        taken = Snapshot.take(small, "automatic")
        broken = replace(taken, state={key: value for key, value in taken.state.items() if key != name})
        with refuses(SnapshotError, field="restored"):
            restore_snapshot(small, broken, "broken")
        assert packed(small) == before
        assert small.pipelines["cam0"].epoch == epochs


def test_another_version_names_both(small: Perception) -> None:
    body = Snapshot.take(small, "automatic").pack()[44:]
    with refuses(SnapshotError, field=("3", "4", "restore")):
        Snapshot.unpack(sign(body, snapshots.VERSION + 1), "newer")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"selection": "confident"}, ("tracker.selection", "confident")),
        ({"bank_size": 9}, ("tracker.bank_size", "9")),
    ],
)
def test_other_tracker_settings_are_refused(change: dict[str, Any], names: str | tuple[str, ...]) -> None:
    other = Snapshot.take(with_objects(tiny(**change)), "automatic")
    with refuses(SnapshotError, field=names):
        restore_snapshot(tiny(), other, "other")


def test_other_weights_of_the_same_name_are_refused(small: Perception) -> None:
    taken = Snapshot.take(small, "automatic")
    other = replace(taken, identity={**taken.identity, "model_digest": "ab" * 32})
    with refuses(SnapshotError, field="model_digest"):
        restore_snapshot(small, other, "other")


def test_ids_go_on_after_those_that_were_given_since(small: Perception) -> None:
    """The node gives at most a block of ids after a snapshot, and a node that restores it none of them."""
    reserve = IdReserve(small)
    pipeline = small.pipelines["cam0"]
    data = Snapshot.take(small, "automatic").pack()
    plan = reserve.plan()
    reserve.allow(plan, durable=True)
    last = pipeline.registry.last_id
    prompt = FramePrompt(points=[(40, 40)])
    for _ in range(ID_BLOCK):
        pipeline.remove(pipeline.add(prompt, "more").id)
    with refuses(CapacityError, field=("snapshot", "allows")):
        pipeline.add(prompt, "one more")
    assert pipeline.registry.last_id == last + ID_BLOCK
    assert reserve.run_low
    other = tiny()
    restore_snapshot(other, Snapshot.unpack(data, "test"), "test")
    assert other.pipelines["cam0"].epoch == pipeline.epoch
    assert other.pipelines["cam0"].add(FramePrompt(points=[(9, 9)]), "new").id == last + ID_BLOCK + 1
    reserve.free()
    assert pipeline.add(FramePrompt(points=[(9, 9)]), "again").id == last + ID_BLOCK + 1


def test_detections_are_turned_away_while_no_id_is_left(nano: TrackerModel) -> None:
    perception = Perception(Settings(), nano, ColourDetector())
    perception.set_prompts(["red"])
    pipeline = perception.serve("cam0")
    pipeline.registry.id_limit = 1
    pipeline.step(coloured_blocks.frame(0, {(30, 40): "red", (200, 150): "red"}))
    assert [status.id for status in pipeline.objects] == [1]
    assert pipeline.turned_away == 1


def test_a_named_snapshot_begins_new_epochs(small: Perception) -> None:
    pipeline = small.pipelines["cam0"]
    epoch = pipeline.epoch
    objects = pipeline.objects
    restore_snapshot(small, Snapshot.take(small, "named"), "test")
    assert small.pipelines["cam0"].objects == objects
    assert small.pipelines["cam0"].epoch != epoch


def test_a_snapshot_keeps_the_frames_that_objects_need_and_the_newest(small: Perception) -> None:
    pipeline = small.pipelines["cam0"]
    for seq in range(1, 12):
        pipeline.step(coloured_blocks.frame(seq, {}))
    frames = Snapshot.take(small, "automatic").state["cameras"]["cam0"]["prompting"]["frame_cache"]["frames"]
    assert [frame["seq"] for frame in frames] == [11]
    pipeline.add(FramePrompt(points=[(40, 40)]), "past", 8)
    frames = Snapshot.take(small, "automatic").state["cameras"]["cam0"]["prompting"]["frame_cache"]["frames"]
    assert [frame["seq"] for frame in frames] == [9, 10, 11]
