"""Objects found by name, on the real tracker: born, confirmed, corrected, hidden, taken back, and let go."""

import numpy as np
import pytest
import torch

from sam3_node.bags import LabelledClip
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.detection.detectors import prepare_prompts
from sam3_node.detection.loading import load_detector
from sam3_node.errors import RequestError, UnknownObjectError
from sam3_node.geometry import Scaling
from sam3_node.models import TrackerModel
from sam3_node.perception.objects import Objects
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.stages.detect import DetectObjects, SideStream
from sam3_node.perception.step import StepFrame
from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.tracking import Tracker, Tracks
from sam3_node.tracking.confidence import ConfidenceEstimator
from sam3_node.types import Instance, Mask, MaskFrame
from sam3_node.wire import decode_image
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.coloured_blocks import HEIGHT, PERIOD_NS, WIDTH, ColourDetector, frame
from tests.support.refuses import refuses
from tests.support.tiny import random_source

EVERY = 3
LOST_S = 1.0
LOST_FRAMES = int(LOST_S * 1e9 / PERIOD_NS)
A = (30, 40)
B = (130, 90)
C = (230, 150)


class World:
    """Frames of blocks through a pipeline, one after another."""

    def __init__(
        self, model: TrackerModel, places: int = 8, association: bool = True, detector: str = "colours"
    ) -> None:
        self.detector = ColourDetector()
        self.detector.name = detector
        settings = DetectorSettings(
            kind="yolo-world", every=EVERY, max_lost_s=LOST_S, association=association
        )
        self.pipeline = Pipeline(model, TrackerSettings(max_objects=places), "cam0", self.detector, settings)
        self._seq = 0

    def ask(
        self, *names: str, scores: dict[str, float] | None = None, max_counts: dict[str, int] | None = None
    ) -> None:
        self.pipeline.set_prompts(prepare_prompts(self.detector, names, 0.5, scores, max_counts))

    def step(self, placed: dict[tuple[int, int], str]) -> MaskFrame:
        self._seq += 1
        return self.pipeline.step(frame(self._seq, placed))

    def steps(self, count: int, placed: dict[tuple[int, int], str]) -> MaskFrame:
        for _ in range(count):
            masks = self.step(placed)
        return masks


@pytest.fixture
def world(nano: TrackerModel) -> World:
    return World(nano)


def labels(masks: MaskFrame) -> dict[int, str]:
    return {instance.id: instance.label for instance in masks.instances}


def only(masks: MaskFrame) -> Instance:
    (instance,) = masks.instances
    return instance


def test_nothing_is_looked_for_until_it_is_named(world: World) -> None:
    masks = world.steps(2 * EVERY, {A: "red"})
    assert masks.instances == ()
    assert masks.prompts == ()
    assert world.detector.calls == 0


def test_a_name_is_found_on_the_next_frame_with_its_mask(world: World) -> None:
    world.step({A: "red", B: "green"})
    world.ask("red")
    masks = world.step({A: "red", B: "green"})
    found = only(masks)
    assert (found.label, found.state, masks.prompts) == ("red", "tentative", ("red",))
    x0, _, _, y1 = found.box
    assert abs(x0 - A[0]) < 15
    assert abs(y1 - A[1] - 50) < 15
    assert "detect" in masks.stages_us


def test_it_is_believed_once_seen_again(world: World) -> None:
    world.ask("red")
    states = [only(world.step({A: "red"})).state for _ in range(EVERY + 1)]
    assert states == ["tentative"] * EVERY + ["tracked"]


def test_a_label_that_a_person_gave_stays(world: World) -> None:
    world.ask("red")
    found = only(world.steps(2 * EVERY, {A: "red"})).id
    world.pipeline.rename(found, "my block")
    for _ in range(3 * EVERY):
        assert labels(world.step({A: "red"}))[found] == "my block"
    world.ask("green")  # a person's object does not go with the name by which it was found
    assert found in labels(world.steps(2 * EVERY, {A: "red"}))
    with refuses(UnknownObjectError, field=("99", "object")):
        world.pipeline.rename(99, "nothing")


def test_names_of_detections_have_a_confidence_and_those_of_persons_none(world: World) -> None:
    world.ask("red")
    found = only(world.steps(2 * EVERY, {A: "red"}))
    assert 0.9 < found.name_confidence < 1
    assert not found.doubtful
    world.pipeline.rename(found.id, "my block")
    assert only(world.step({A: "red"})).name_confidence is None
    assert only(world.steps(20, {})).name_confidence is None  # out of view


def test_a_sure_mask_whose_name_is_not_is_doubtful(world: World, nano: TrackerModel) -> None:
    world.detector.score = 0.5
    world.ask("red", "green")
    assert not contradict(world).doubtful  # not calibrated for this detector
    world = World(nano, detector="nano")
    world.detector.score = 0.5
    world.ask("red", "green")
    found = contradict(world)
    assert (found.confidence or 0) >= TrackerSettings().min_confidence
    assert (found.name_confidence or 0) < DetectorSettings().min_name_confidence
    assert found.doubtful
    assert world.step({A: "red"}).without_doubtful().instances == ()


def contradict(world: World) -> Instance:
    """Return a block to which the detector has given two names."""
    world.detector.mistakes = {"green": "red"}
    world.steps(EVERY + 1, {A: "red"})
    world.detector.mistakes = {"red": "green"}  # the names contradict each other
    return only(world.steps(EVERY, {A: "red"}))


def test_the_ball_that_the_detector_takes_for_the_mug_is_doubtful(nano: TrackerModel) -> None:
    """The bundled scene has one red mug, and an orange ball that the bundled detector calls so now and then."""
    clip = LabelledClip.load(TABLETOP)
    detector = load_detector("yolo-world", "nano")
    pipeline = Pipeline(nano, TrackerSettings(), "cam0", detector, DetectorSettings())
    pipeline.set_prompts(prepare_prompts(detector, ["red mug"], 0.2))
    ball = next(id for id, name in clip.labels.items() if name == "orange ball")
    on_ball = []
    mug = []
    for index in range(110, 140):
        masks = pipeline.step(clip.frames[index])
        truth = clip.truth(index)[ball]
        for instance in masks.instances:
            is_ball = (instance.mask.full() & truth).sum() > 0.5 * instance.area
            (on_ball if is_ball else mug).append(instance)
    assert all(instance.label == "red mug" for instance in on_ball)
    confirmed = [instance for instance in on_ball if instance.state == "tracked"]
    assert any((instance.confidence or 0) >= TrackerSettings().min_confidence for instance in confirmed)
    assert all(instance.doubtful for instance in on_ball)
    assert sum(not instance.doubtful for instance in mug) >= 0.8 * len(mug)


def test_one_sighting_alone_is_dropped(world: World) -> None:
    world.ask("red")
    world.step({A: "red"})
    world.detector.blind = True
    assert world.steps(2 * EVERY, {A: "red"}).instances == ()


def test_detection_is_every_k_frames(world: World) -> None:
    world.ask("red")
    world.steps(4 * EVERY + 1, {A: "red"})
    assert world.detector.calls == 5


def test_several_names_and_several_of_one(world: World) -> None:
    world.ask("red", "green")
    masks = world.steps(EVERY + 1, {A: "red", B: "green", C: "red"})
    assert sorted(labels(masks).values()) == ["green", "red", "red"]
    assert len(labels(masks)) == 3


def test_other_names_leave_the_ids_of_the_rest(world: World) -> None:
    world.ask("red", "green")
    before = labels(world.steps(EVERY + 1, {A: "red", B: "green", C: "blue"}))
    world.ask("green", "blue")
    after = labels(world.step({A: "red", B: "green", C: "blue"}))
    green = next(i for i, label in before.items() if label == "green")
    assert after[green] == "green"
    assert sorted(after.values()) == ["blue", "green"]
    assert min(set(after) - {green}) > max(before), "a new object has a new id"


def test_no_names_forget_what_was_found_by_name_alone(world: World) -> None:
    world.step({A: "red", B: "green"})
    by_hand = world.pipeline.add(FramePrompt(box=(*B, B[0] + 50, B[1] + 50)), "mine").id
    world.ask("red")
    world.steps(EVERY + 1, {A: "red", B: "green"})
    world.ask()
    assert labels(world.step({A: "red", B: "green"})) == {by_hand: "mine"}


def test_a_detection_on_an_object_added_by_hand_is_nothing_new(world: World) -> None:
    world.step({A: "red"})
    by_hand = world.pipeline.add(FramePrompt(box=(*A, A[0] + 50, A[1] + 50)), "mine").id
    world.step({A: "red"})
    world.ask("red")
    assert labels(world.steps(2 * EVERY, {A: "red"})) == {by_hand: "mine"}


def test_what_is_gone_is_let_go_after_a_time(world: World) -> None:
    world.ask("red")
    world.steps(2 * EVERY, {A: "red"})
    assert world.step({}).instances
    assert world.steps(LOST_FRAMES + EVERY, {}).instances == ()


def test_what_comes_back_elsewhere_has_its_id(world: World) -> None:
    world.ask("red", "green")
    before = labels(world.steps(2 * EVERY, {A: "red", B: "green"}))
    world.steps(3 * EVERY, {B: "green"})
    after = labels(world.steps(2 * EVERY, {C: "red", B: "green"}))
    assert after == before


def test_what_comes_back_elsewhere_has_the_name_confidence_of_its_new_detections(world: World) -> None:
    world.ask("red")
    world.detector.score = 0.6
    found = only(world.steps(2 * EVERY + 1, {A: "red"})).id  # the last round was on the last frame
    world.step({})  # out of view, and no round has missed it
    world.detector.score = 0.9
    assert only(world.step({C: "red"})).id == found
    score, *_ = world.pipeline.name_features(found) or [0]
    assert score == pytest.approx(np.log(9))  # the logit of 0.9 alone


def correction(world: World) -> tuple[Instance, Instance]:
    """Return an object as it was detected, and as it is at the next detection after its mask was damaged."""
    world.ask("red")
    first = only(world.steps(2 * EVERY, {A: "red"}))
    twice = np.zeros((HEIGHT, WIDTH), np.bool_)
    twice[A[1] : A[1] + 50, A[0] : A[0] + 100] = True
    world.pipeline.refine(first.id, FramePrompt(mask=Mask.from_full(twice)))
    rounds = [
        masks for masks in (world.step({A: "red"}) for _ in range(EVERY)) if "detect" in masks.stages_us
    ]
    return first, only(rounds[0])


def test_a_mask_that_drifted_is_corrected_without_a_new_id(world: World) -> None:
    first, corrected = correction(world)
    assert corrected.id == first.id
    before = first.mask.full()
    after = corrected.mask.full()
    assert (before & after).sum() > 0.85 * (before | after).sum(), "the damaged mask had an IoU of 0.5"


@pytest.mark.parametrize("association", [True, False])
def test_without_association_a_mask_that_drifted_is_left_as_it_is(
    nano: TrackerModel, association: bool
) -> None:
    detector = ColourDetector()
    tracker = Tracker(nano, 4)
    objects = Objects(4)
    settings = DetectorSettings(kind="yolo-world", association=association)
    confidence = ConfidenceEstimator(4, nano.mask_size[0], nano.hidden)
    search = DetectObjects("cam0", detector, tracker, objects, confidence, settings)
    step = StepFrame(frame(0, {A: "red"}))
    step.image = decode_image(step.frame)
    step.features = nano.encode(nano.preprocess(step.image))
    step.scaling = Scaling((HEIGHT, WIDTH), nano.image_size)
    step.frame_number = 0
    search.set_prompts(prepare_prompts(detector, ("red",), 0.5))
    step.tracks = tracker.step_features(step.features)
    (born,) = search.detect(step).values()
    (object_id,) = tracker.ids
    drifted = born.logits.roll(3, dims=1)  # overlaps still
    step.tracks = Tracks([object_id], drifted[None], *(column[None] for column in born[1:]))
    changed = search.detect(step)
    assert set(changed) == ({object_id} if association else set())
    assert tracker.ids == [object_id]


def test_names_are_limited_in_number_and_by_score(world: World) -> None:
    world.ask("red", "green", max_counts={"red": 1}, scores={"green": 0.95})
    masks = world.steps(EVERY + 1, {A: "red", B: "green", C: "red"})
    assert list(labels(masks).values()) == ["red"]


@pytest.mark.parametrize(
    ("max_counts", "called"), [(None, ["green", "green"]), ({"green": 1}, ["green", "red"])]
)
def test_what_looks_like_another_is_called_so_within_the_limit(
    world: World, max_counts: dict[str, int] | None, called: list[str]
) -> None:
    world.ask("red", "green", max_counts=max_counts)
    before = labels(world.steps(EVERY + 1, {A: "red", B: "green"}))
    world.detector.mistakes = {"red": "green"}
    after = labels(world.steps(6 * EVERY, {A: "red", B: "green"}))
    assert set(after) == set(before)
    assert sorted(after.values()) == called


def test_a_limit_of_something_else_is_refused(world: World) -> None:
    with pytest.raises(RequestError, match="'mug'"):
        world.ask("red", max_counts={"mug": 1})


def test_without_room_those_in_view_stay_and_the_newcomer_is_counted(nano: TrackerModel) -> None:
    world = World(nano, places=2)
    world.ask("red", "green")
    before = labels(world.steps(EVERY + 1, {A: "red", B: "green"}))
    assert labels(world.steps(EVERY, {A: "red", B: "green", C: "red"})) == before
    assert world.pipeline.turned_away >= 1


def test_without_room_the_hidden_one_gives_way(nano: TrackerModel) -> None:
    world = World(nano, places=2)
    world.ask("red", "green", "blue")
    before = labels(world.steps(2 * EVERY, {A: "red", B: "green"}))
    after = labels(world.steps(3 * EVERY, {B: "green", C: "blue"}))
    assert sorted(after.values()) == ["blue", "green"]
    assert set(after) & set(before) == {i for i, label in before.items() if label == "green"}


def test_a_detector_that_fails_costs_no_frame(world: World) -> None:
    world.ask("red")
    before = labels(world.steps(2 * EVERY, {A: "red"}))
    world.detector.broken = True
    assert labels(world.steps(EVERY, {A: "red"})) == before


def test_the_same_frames_give_the_same_masks(nano: TrackerModel) -> None:
    def play() -> list[tuple[int, str, int]]:
        world = World(nano)
        world.ask("red", "green")
        for x in range(0, 120, 10):
            masks = world.step({(30 + x, 40): "red", B: "green"})
        return [(i.id, i.label, i.area) for i in masks.instances]

    assert play() == play()


def test_objects_are_found_by_name_with_weights_without_memory() -> None:
    source = random_source("sam2", presence=60.0)
    still = TrackerModel(source, name="still", mean=[0.5] * 3, std=[0.5] * 3, has_memory=False)
    world = World(still, association=False)
    world.ask("red")
    assert [instance.label for instance in world.steps(EVERY + 2, {A: "red"}).instances] == ["red"]


def test_without_a_detector_names_are_refused() -> None:
    for names in (["red"], []):
        with pytest.raises(RequestError, match="detector"):
            prepare_prompts(None, names, 0.5)


def test_on_a_cpu_work_is_just_done() -> None:
    beside = SideStream(torch.device("cpu"))
    beside.mark()
    with beside.run():
        total = int(torch.ones(8).sum())
    assert total == 8


@pytest.mark.gpu
def test_on_a_gpu_it_waits_for_what_was_marked_and_not_for_what_came_later() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    beside = SideStream(device)
    marked = torch.ones(1 << 20, device=device) * 3
    beside.mark()
    float(marked.sum())  # loads the kernel now: the first use of one may wait for all streams
    torch.cuda._sleep(1 << 30)  # keeps the main stream busy
    later = torch.cuda.Event()
    later.record()
    with beside.run():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        total = float(marked.sum())
    assert total == 3 * (1 << 20)
    assert not later.query(), "the main stream is still busy"
