"""Objects that left the view: known again by appearance, never by guess, remembered for a while, asked for by name."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from sam3_node.detection.detectors import prepare_prompts
from sam3_node.errors import RequestError, UnknownObjectError
from sam3_node.geometry import DepthMap, RayMap, Scaling
from sam3_node.models import TrackerModel
from sam3_node.models.sam.stages import Decoded
from sam3_node.perception.object_memory import (
    HIDDEN_FRAMES,
    MAX_WAIT,
    MIN_MISMATCHES,
    TURNED_MISMATCHES,
    Candidate,
    IdentityVerdict,
    LastSighting,
    Memory,
    ObjectMemory,
    Return,
    may_be,
)
from sam3_node.perception.objects import Objects
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.reidentification import AppearanceFrame, report
from sam3_node.perception.stages.reidentify import RECENT_FRAMES
from sam3_node.perception.step import StepFrame
from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.tracking.appearance import Gallery
from sam3_node.types import NANOSECONDS, FramePose, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import AMBIGUOUS, RECALLED, pack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.coloured_blocks import PERIOD_NS, ColourDetector, frame
from tests.support.leaving import make_frame
from tests.support.refuses import refuses
from tests.support.saving import reload

EVERY = 3
LOST_S = 1.0
GONE = int(LOST_S * NANOSECONDS / PERIOD_NS) + 2 * EVERY
"""Frames after which an object that is gone is lost."""
A = (30, 40)
B = (130, 90)
C = (230, 150)
RED = {"red": (80, 80), "blue": (220, 90)}
BLUE = {"blue": (220, 90)}


class Table:
    """Frames of blocks that a detector finds by colour, one after another, with the events of each."""

    def __init__(self, model: TrackerModel, **settings: object) -> None:
        self.detector = ColourDetector()
        detection = DetectorSettings(kind="yolo-world", every=EVERY, max_lost_s=LOST_S)
        tracker = TrackerSettings.model_validate({"max_objects": 4, **settings})
        self.pipeline = Pipeline(model, tracker, "cam0", self.detector, detection)
        self.pipeline.set_prompts(prepare_prompts(self.detector, ("red", "green"), 0.5))
        self.events: list[tuple[str, int, dict[str, object]]] = []
        self.seq = 0
        self.published: list[bytes] = []
        self.finishes_late = False

    def steps(self, count: int, placed: dict[tuple[int, int], str]) -> MaskFrame:
        for _ in range(count):
            self.seq += 1
            step = StepFrame(frame(self.seq, placed), finishes=not self.finishes_late)
            masks = self.pipeline.step(step)
            self.published.append(pack_masks(replace(masks, stages_us={}), "rle")[1])
            if self.finishes_late:
                self.pipeline.finish(step)
            self.events += [(event.op, event.id, dict(event.details)) for event in step.events]
        return masks

    def lost(self) -> list[int]:
        return [place.id for place in self.pipeline.where(None, None) if place.state == "lost"]


def in_view(masks: MaskFrame) -> list[int]:
    return [each.id for each in masks.instances if each.state == "tracked"]


def test_a_lost_object_comes_back_under_its_id(nano: TrackerModel) -> None:
    table = Table(nano)
    (first,) = in_view(table.steps(3 * EVERY, {A: "red"}))
    assert not table.steps(GONE, {}).instances
    assert table.lost() == [first]
    masks = table.steps(2 * EVERY, {C: "red"})
    assert in_view(masks) == [first]
    ((op, object_id, details),) = table.events
    assert (op, object_id) == (RECALLED, first)
    assert table.pipeline.memory.reidentifications == 1
    assert details["absent_s"] == pytest.approx(GONE * PERIOD_NS / NANOSECONDS, abs=0.4)
    assert table.lost() == []
    # ids count on behind it
    masks = table.steps(2 * EVERY, {C: "red", A: "green"})
    assert in_view(masks) == [first, first + 1]


@pytest.mark.parametrize("settings", [{"recall": False}, {"remember": 0}, {"remember_s": 0.1}])
def test_it_gets_a_new_id_where_nothing_is_remembered(
    nano: TrackerModel, settings: dict[str, object]
) -> None:
    table = Table(nano, **settings)
    (first,) = in_view(table.steps(3 * EVERY, {A: "red"}))
    table.steps(GONE + 2, {})
    assert in_view(table.steps(2 * EVERY, {C: "red"})) == [first + 1]
    assert table.events == []


def test_masks_are_the_same_if_they_are_published_before_looks_are_compared(nano: TrackerModel) -> None:
    published = []
    for finishes_late in (False, True):
        table = Table(nano)
        table.finishes_late = finishes_late
        table.steps(3 * EVERY, {A: "red"})
        table.steps(GONE, {})
        table.steps(2 * EVERY, {C: "red"})
        assert [op for op, *_ in table.events] == [RECALLED]
        published.append(table.published)
    assert published[0] == published[1]


def test_of_two_alike_none_comes_back_by_guess(nano: TrackerModel) -> None:
    table = Table(nano)
    both = in_view(table.steps(3 * EVERY, {A: "red", C: "red"}))
    table.steps(GONE, {})
    assert table.lost() == both
    assert in_view(table.steps(2 * EVERY, {B: "red"})) == [3]
    assert {op for op, _, _ in table.events} == {AMBIGUOUS}
    assert sorted(table.events[0][2]["ids"]) == both


def test_one_that_looks_different_is_new(nano: TrackerModel) -> None:
    table = Table(nano)
    table.steps(3 * EVERY, {A: "red"})
    table.steps(GONE, {})
    assert in_view(table.steps(2 * EVERY, {A: "green"})) == [2]
    assert table.lost() == [1]


def test_a_lost_object_is_forgotten_by_request_and_by_time(nano: TrackerModel) -> None:
    table = Table(nano, remember_s=3.0)
    table.steps(3 * EVERY, {A: "red"})
    table.steps(GONE, {})
    assert table.pipeline.memory.forget(1)
    assert not table.pipeline.memory.forget(1)
    assert table.lost() == []
    table.steps(3 * EVERY, {A: "red"})
    table.steps(GONE, {})
    assert table.lost() == [2]
    table.steps(int(3.0 * NANOSECONDS / PERIOD_NS), {})
    assert table.lost() == []


def test_the_number_of_lost_objects_is_bounded(nano: TrackerModel) -> None:
    table = Table(nano, remember=1, recall=False)
    for _ in range(2):
        table.steps(3 * EVERY, {A: "red"})
        table.steps(GONE, {})
    assert table.lost() == [2]


def test_a_restored_state_goes_on_with_the_same_masks_and_recalls(nano: TrackerModel) -> None:
    one = Table(nano)
    one.steps(3 * EVERY, {A: "red", B: "green"})
    one.steps(GONE, {B: "green"})
    other = Table(nano)
    other.pipeline.restore(reload(one.pipeline.state()))
    other.seq = one.seq
    assert other.lost() == one.lost() == [1]
    assert other.pipeline.memory.require(1).picture == one.pipeline.memory.require(1).picture
    for _ in range(2 * EVERY):
        ours, theirs = (table.steps(1, {C: "red", B: "green"}) for table in (one, other))
        assert [(each.id, each.box, each.score) for each in ours.instances] == [
            (each.id, each.box, each.score) for each in theirs.instances
        ]
    assert one.events == other.events
    assert [op for op, _, _ in one.events] == [RECALLED]


class Desk:
    """Frames of things that a user has added, one after another."""

    def __init__(self, model: TrackerModel, **settings: object) -> None:
        self.pipeline = Pipeline(model, TrackerSettings.model_validate(settings), "cam0")
        self.seq = 0
        self.step(RED)
        self.pipeline.add(FramePrompt(box=(56, 56, 104, 104)), "cup", seq=0)
        self.pipeline.add(FramePrompt(box=(200, 62, 240, 118)), "box", seq=0)

    def step(self, places: dict[str, tuple[int, int]], count: int = 1) -> list[Instance]:
        for _ in range(count):
            masks = self.pipeline.step(make_frame(self.seq, places))
            self.seq += 1
        return list(masks.instances)


def test_another_thing_in_its_place_is_doubtful(nano: TrackerModel) -> None:
    desk = Desk(nano)
    assert not any(each.doubtful for each in desk.step(RED, 6))
    assert desk.step(BLUE, 8)[0].state == "occluded"
    cup, box = desk.step(BLUE | {"yellow": (150, 180)}, 4 + 2 * MIN_MISMATCHES)
    assert cup.state == "occluded" or cup.doubtful
    assert not box.doubtful
    # without the check, the tracker takes the one thing for the other
    cup, _ = trust = desk_without_recall(nano)
    assert trust[0].state == "tracked"
    assert not cup.doubtful
    (place,) = desk.pipeline.where(None, "cup")
    assert not place.in_view
    assert place.seq == 6
    # unless a user says that it is the object
    desk.pipeline.refine(1, FramePrompt(points=[(150, 185)]))
    assert not desk.step(BLUE | {"yellow": (150, 180)})[0].doubtful


def desk_without_recall(nano: TrackerModel) -> list[Instance]:
    desk = Desk(nano, recall=False)
    desk.step(RED, 6)
    desk.step(BLUE, 8)
    return desk.step(BLUE | {"yellow": (150, 180)}, 4 + 2 * MIN_MISMATCHES)


def test_where_says_what_is_in_view_and_what_was(nano: TrackerModel) -> None:
    desk = Desk(nano)
    desk.step(RED, 6)
    cup, box = desk.pipeline.where(None, None)
    assert (cup.label, cup.in_view, cup.age_s, cup.has_picture) == ("cup", True, 0.0, True)
    desk.step(BLUE, 10)
    cup, box = desk.pipeline.where(None, None)
    assert (cup.in_view, cup.state, cup.age_s, cup.seq) == (False, "occluded", 1.0, 6)
    assert (box.in_view, box.age_s) == (True, 0.0)
    # without depth there is no position
    assert (cup.position_m, cup.frame, cup.camera_pose) == (None, None, None)
    assert desk.pipeline.where(2, None) == [box]
    assert desk.pipeline.where(None, "BOX") == [box]
    assert desk.pipeline.where(None, "nothing") == []
    desk.pipeline.reset()
    assert desk.pipeline.where(None, None) == []


def test_the_picture_shows_the_object(nano: TrackerModel) -> None:
    desk = Desk(nano)
    desk.step(RED, 6)
    picture = desk.pipeline.memory.require(1).picture
    assert picture is not None
    x0, y0, x1, y1 = picture.box
    assert x0 < 58
    assert y0 < 58
    assert x1 > 102
    assert y1 > 102
    image = cv2.imdecode(np.frombuffer(picture.jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape[:2] == (y1 - y0, x1 - x0)
    blue, _, red = image[len(image) // 4, len(image) // 2]
    assert int(red) > int(blue) + 60
    assert Desk(nano, pictures=False).pipeline.memory.get(1) is None


def test_a_gallery_starts_the_object_on_another_camera(nano: TrackerModel) -> None:
    desk = Desk(nano)
    desk.step(RED, 8)
    gallery = desk.pipeline.memory.require(1).gallery
    other = Pipeline(nano, TrackerSettings(), "cam1")
    other.step(make_frame(0, {"red": (200, 150), "yellow": (70, 60)}))
    added = other.add_like(gallery, "cup")
    assert added.result is not None
    x0, y0, x1, y1 = added.result.mask.box
    assert abs((x0 + x1) / 2 - 200) < 10
    assert abs((y0 + y1) / 2 - 150) < 10
    assert [each.label for each in other.step(make_frame(1, {"red": (200, 150)})).instances] == ["cup"]

    empty = Pipeline(nano, TrackerSettings(), "cam2")
    empty.step(make_frame(0, {"yellow": (70, 60)}))
    with refuses(RequestError, field="likeness"):
        empty.add_like(gallery, "cup")
    assert empty.objects == []
    twins = Pipeline(nano, TrackerSettings(), "cam3")
    twins.step(make_frame(0, {"red": (60, 60), "red too": (240, 180)}))
    with refuses(RequestError, field="several"):
        twins.add_like(gallery, "cup")
    with refuses(RequestError, field="appearance"):
        twins.add_like(Gallery(), "cup")


# what is remembered, without a tracker


def make_memory(**settings: object) -> tuple[Objects, ObjectMemory]:
    objects = Objects(8)
    return objects, ObjectMemory(objects, "nano", TrackerSettings.model_validate(settings))


def direction(*weights: float) -> torch.Tensor:
    """Return an embedding whose halves both lie between given axes."""
    half = torch.zeros(8)
    half[: len(weights)] = torch.tensor(weights)
    half /= half.norm()
    return torch.cat([half, half])


def make_candidate(
    embedding: torch.Tensor, box: tuple[int, int, int, int] = (0, 0, 10, 10), **known: float
) -> Candidate:
    sighting = None
    if known:
        position = (known.get("x", 0.0), 0.0, 0.5)
        sighting = LastSighting(9, 9 * NANOSECONDS, box, 0.9, "base", position, size_m=known.get("size", 0.1))
    return Candidate(embedding, 9 * NANOSECONDS, box, sighting=sighting)


def remember(
    objects: Objects, memory: ObjectMemory, object_id: int, embedding: torch.Tensor, label: str = "mug"
) -> Memory:
    objects.add(object_id, label)
    memory.begin(object_id, Gallery(embedding[None]))
    kept = memory.require(object_id)
    kept.sighting = LastSighting(1, NANOSECONDS, (0, 0, 10, 10), 0.9, "base", (0.0, 0.0, 0.5), size_m=0.1)
    return kept


def test_something_is_known_unsure_or_new_by_its_likeness() -> None:
    objects, memory = make_memory()
    remember(objects, memory, 1, direction(1))
    far = (500, 500, 510, 510)
    assert memory.judge(make_candidate(direction(1, 0.2), far), [1]).kind == "known"
    unsure = memory.judge(make_candidate(direction(1, 0.75), far), [1])
    assert (unsure.kind, unsure.ids) == ("unsure", (1,))
    assert memory.judge(make_candidate(direction(1, 2), far), [1]).kind == "new"
    assert memory.judge(make_candidate(direction(1), far), []).kind == "new"
    # where it was seen last, less is enough
    assert memory.judge(make_candidate(direction(1, 0.6)), [1]).kind == "known"


def test_what_looks_like_two_objects_is_ambiguous_also_if_one_is_in_view() -> None:
    objects, memory = make_memory()
    remember(objects, memory, 1, direction(1))
    remember(objects, memory, 2, direction(1, 0.1))
    for out_of_view in ([1, 2], [1]):
        verdict = memory.judge(make_candidate(direction(1, 0.05)), out_of_view)
        assert verdict.kind == "ambiguous"
        assert set(verdict.ids) == {1, 2}


def test_size_and_way_must_fit() -> None:
    sighting = LastSighting(1, NANOSECONDS, (0, 0, 10, 10), 0.9, "base", (0.0, 0.0, 0.5), size_m=0.1)
    assert may_be(sighting, make_candidate(direction(1), size=0.12, x=2.0))
    assert not may_be(sighting, make_candidate(direction(1), size=0.15))
    # eight seconds are not enough for 100 m
    assert not may_be(sighting, make_candidate(direction(1), x=100.0))
    # without depth, the sides in the picture
    assert may_be(sighting, make_candidate(direction(1), (0, 0, 15, 15)))
    assert not may_be(sighting, make_candidate(direction(1), (0, 0, 30, 30)))
    assert may_be(None, make_candidate(direction(1), (0, 0, 30, 30)))


def show(memory: ObjectMemory, side: int, frames: int = 1, doubtful: bool = False) -> None:
    """Let object 1 be in view with a square mask, or hidden for a side of 0."""
    image = np.zeros((60, 60), bool)
    image[:side, :side] = True
    state = "tracked" if side else "occluded"
    seen = Instance(1, "mug", 0.9, state, 1, 0, Mask.from_full(image), doubtful=doubtful)
    for _ in range(frames):
        memory.observe([seen], 1, 1, None)


def test_what_was_partly_hidden_at_last_is_as_large_as_before() -> None:
    objects, memory = make_memory()
    objects.add(1, "mug")
    for side in (30, 20, 10):
        show(memory, side)
    kept = memory.require(1)
    assert kept.sighting is not None
    assert kept.sighting.box == (0, 0, 10, 10)
    assert may_be(kept.sighting, make_candidate(direction(1), (0, 0, 30, 30)))
    # what has been smaller for some seconds is farther away
    show(memory, 10, frames=100)
    assert not may_be(kept.sighting, make_candidate(direction(1), (0, 0, 30, 30)))


def test_what_is_back_is_searched_for_until_its_mask_is_sure() -> None:
    objects, memory = make_memory()
    objects.add(1, "mug")
    show(memory, 10)
    kept = memory.require(1)
    show(memory, 0, frames=HIDDEN_FRAMES)
    assert kept.needs_reidentification
    show(memory, 10, doubtful=True)
    assert kept.needs_reidentification
    show(memory, 10)
    assert not kept.needs_reidentification
    # what never left is not
    show(memory, 10, doubtful=True)
    assert not kept.needs_reidentification


def test_a_detection_waits_some_rounds_for_another_embedding() -> None:
    objects, memory = make_memory()
    remember(objects, memory, 1, direction(1))
    waits = [memory.may_wait(1) for _ in range(MAX_WAIT + 1)]
    assert waits == [True] * MAX_WAIT + [False]
    memory.confirm(1)
    assert memory.may_wait(1)


def see(memory: ObjectMemory, embedding: torch.Tensor, times: int = 1, doubtful: bool = False) -> None:
    """Let object 1 be in view, and compare its appearance."""
    seen = Instance(
        1, "mug", 0.9, "tracked", 1, 0, Mask.from_full(np.ones((20, 20), bool)), doubtful=doubtful
    )
    for _ in range(times):
        memory.observe([seen], 1, 1, None)
        memory.compare_appearance(seen, embedding, np.zeros((20, 20, 3), np.uint8), 1, 1)


def hide(memory: ObjectMemory) -> None:
    hidden = Instance(1, "mug", 0.9, "occluded", 1, 1, Mask.empty((20, 20)))
    for _ in range(HIDDEN_FRAMES):
        memory.observe([hidden], 1, 1, None)


def test_an_object_that_never_left_may_be_turned() -> None:
    objects, memory = make_memory()
    objects.add(1, "mug")
    see(memory, direction(1))
    see(memory, direction(0, 1), TURNED_MISMATCHES)
    assert not memory.has_identity_mismatch(1)
    assert len(memory.require(1).gallery) == 1
    see(memory, direction(0, 1))
    assert len(memory.require(1).gallery) == 2


def test_what_comes_back_with_another_appearance_stays_a_mismatch() -> None:
    objects, memory = make_memory()
    objects.add(1, "mug")
    see(memory, direction(1))
    hide(memory)
    see(memory, direction(0, 1), MIN_MISMATCHES)
    assert memory.has_identity_mismatch(1)
    see(memory, direction(0, 1), 2 * TURNED_MISMATCHES)
    assert memory.has_identity_mismatch(1)
    assert len(memory.require(1).gallery) == 1
    see(memory, direction(1))
    assert not memory.has_identity_mismatch(1)


def test_doubtful_masks_teach_nothing() -> None:
    objects, memory = make_memory()
    objects.add(1, "mug")
    see(memory, direction(1), doubtful=True)
    assert not len(memory.require(1).gallery)
    assert memory.require(1).sighting is None
    assert memory.require(1).picture is None


def test_a_return_is_told_once_it_is_sure_and_a_doubtful_one_is_searched_for_less() -> None:
    objects, memory = make_memory()
    objects.add(1, "mug")
    see(memory, direction(1))
    hide(memory)
    see(memory, direction(1), RECENT_FRAMES, doubtful=True)
    own = memory.require(1)
    assert own.needs_reidentification
    assert own.sought_frames >= RECENT_FRAMES
    step = StepFrame(replace(frame(0, {}), capture_ns=NANOSECONDS))
    known = IdentityVerdict("known", (1,))
    mask = Mask.from_full(np.ones((20, 20), bool))
    sure = Instance(1, "mug", 0.9, "tracked", 1, 0, mask)
    for _ in range(2):
        report(step, known, memory)
        memory.confirm(1)
        assert memory.observe([replace(sure, doubtful=True)], 1, 1, None) == []
    assert not step.events
    assert memory.reidentifications == 0
    # the mask by which it was found is not that of the tracker
    assert memory.observe([sure], 1, NANOSECONDS, None) == []
    assert memory.observe([sure], 1, NANOSECONDS + 1, None) == [Return(1, NANOSECONDS - 1)]
    assert memory.observe([sure], 1, NANOSECONDS + 2, None) == []
    assert not own.needs_reidentification
    assert memory.reidentifications == 1


def test_unknown_ids_are_refused() -> None:
    _, memory = make_memory()
    with refuses(UnknownObjectError, field="5"):
        memory.require(5)
    with refuses(UnknownObjectError, field="5"):
        memory.label(5)


def test_depth_tells_size_and_place_of_what_comes_into_view(nano: TrackerModel) -> None:
    height = 240
    width = 320
    mask = np.zeros((height, width), bool)
    mask[60:120, 100:180] = True
    rays = RayMap().rays(Intrinsics(300.0, 300.0, 159.5, 119.5), (height, width))
    depth = DepthMap(np.full((height, width), 600, np.uint16), 0.001, rays, 300.0)
    features = nano.encode(nano.preprocess(np.zeros((height, width, 3), np.uint8)))
    side = nano.mask_size[0]
    low = cv2.resize(mask.astype(np.float32), (side, side), interpolation=cv2.INTER_AREA) - 0.5
    decoded = Decoded(torch.from_numpy(low)[None], torch.ones(1), torch.ones(1), torch.zeros(1, nano.hidden))
    pose = FramePose("camera", "base", 5, (1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))
    scene = AppearanceFrame(
        features,
        np.zeros((height, width, 3), np.uint8),
        Scaling((height, width), nano.image_size),
        5,
        torch.zeros(side, side, dtype=torch.bool),
    )
    (without,) = scene.describe(decoded)
    assert without is not None
    assert without.sighting is None
    (candidate,) = scene._replace(depth=depth, camera_pose=pose).describe(decoded)
    assert candidate is not None
    assert candidate.sighting is not None
    # 80 by 60 pixels at 0.6 m, 20 px to the left of the middle and 30 px above it
    assert candidate.sighting.position_m == pytest.approx((1.0 - 0.04, -0.06, 0.6), abs=0.005)
    assert candidate.sighting.size_m == pytest.approx(0.16, rel=0.15)
    assert candidate.sighting.frame == "base"
