"""A pipeline killed at any moment and gone on with elsewhere: as if it had never stopped, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.bags.bag import open_bag
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.detection.detectors import Detector, prepare_prompts
from sam3_node.detection.loading import load_detector
from sam3_node.errors import ReplayError, RequestError, UnknownFrameError
from sam3_node.models import TrackerModel
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.prompts import PromptOutcome, PromptResult
from sam3_node.perception.saved import CameraState
from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.types import Frame, Mask, MaskFrame
from sam3_node.wire import encode_image, encode_mask, pack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support import coloured_blocks
from tests.support.coloured_blocks import ColourDetector
from tests.support.refuses import refuses
from tests.support.saving import pack, reload, unpack
from tests.support.tiny import tiny_model

WIDTH = 120
HEIGHT = 90
BOX = FramePrompt(box=[20, 20, 80, 70])
CENTRE = FramePrompt(points=[(60.0, 45.0), (10.0, 10.0)], labels=[1, 0])

Action = Callable[[Pipeline], object]


def frame(seq: int) -> Frame:
    """Coarse noise."""
    coarse = np.random.default_rng(seq).integers(0, 255, (6, 8, 3), np.uint8)
    image = np.kron(coarse, np.ones((15, 15, 1), np.uint8))
    return Frame("cam0", seq, 1000 + seq, WIDTH, HEIGHT, "bgr8", encode_image(image, "bgr8"))


def mask_prompt() -> FramePrompt:
    full = np.zeros((HEIGHT, WIDTH), np.bool_)
    full[30:60, 40:90] = True
    return FramePrompt(mask=Mask.from_full(full))


def exactly(result: object) -> object:
    """Return a result without its times, comparable bit for bit."""
    if isinstance(result, MaskFrame):
        return pack_masks(replace(result, stages_us={}))
    if isinstance(result, PromptOutcome):
        return result.id, exactly(result.result)
    if isinstance(result, PromptResult):
        return result.seq, result.score, encode_mask(result.mask, "rle")
    return result


def do(pipeline: Pipeline, actions: Sequence[Action]) -> list[object]:
    return [exactly(action(pipeline)) for action in actions]


def step(frame: Frame) -> Action:
    return lambda pipeline: pipeline.step(frame)


def add(prompt: FramePrompt, seq: int | None = None, choice: int | None = None) -> Action:
    return lambda pipeline: pipeline.add(prompt, f"thing on {seq}", seq, choice=choice)


def refine(object_id: int, prompt: FramePrompt, seq: int | None = None) -> Action:
    return lambda pipeline: pipeline.refine(object_id, prompt, seq)


def remove(object_id: int) -> Action:
    return lambda pipeline: pipeline.remove(object_id)


def fresh(family: str = "sam3", dtype: torch.dtype = torch.float32, **settings: Any) -> Pipeline:
    chosen = TrackerSettings(**{"max_objects": 4} | settings)
    return Pipeline(tiny_model(family).to(dtype), chosen, "cam0")


def objects(pipeline: Pipeline) -> list[str]:
    return [str(known) for known in pipeline.objects]


def goes_on(make: Callable[[], Pipeline], actions: Sequence[Action], at: Sequence[int]) -> list[object]:
    """Assert that a pipeline which is replaced before any of the actions `at` does as one that is not; -> results."""
    pipeline = make()
    expected = list[object]()
    saved = dict[int, bytes]()
    for index, action in enumerate(actions):
        if index in at:
            saved[index] = pack(pipeline.state())
        expected += do(pipeline, [action])
    ends = pack(pipeline.state())
    for index, data in saved.items():
        other = make()
        other.restore(unpack(pipeline.state(), data))
        assert pack(other.state()) == data
        assert do(other, actions[index:]) == expected[index:], f"gone on before action {index}"
        assert pack(other.state()) == ends
    return expected


EDITS: list[Action] = [
    step(frame(0)),
    add(BOX),
    add(mask_prompt()),
    step(frame(1)),
    add(CENTRE, seq=0),
    step(frame(2)),
    refine(1, CENTRE),
    remove(2),
    step(frame(3)),
    refine(3, CENTRE, seq=1),
    add(CENTRE, choice=2),
    add(BOX, seq=2, choice=1),
    remove(1),
    objects,
    *(step(frame(seq)) for seq in range(4, 7)),
    refine(4, BOX, seq=4),
    lambda pipeline: pipeline.prompting.segment(BOX, seq=5),
    *(step(frame(seq)) for seq in range(7, 10)),
    lambda pipeline: pipeline.reset(),
    add(BOX),
    step(frame(10)),
    objects,
]


def test_edited_objects_go_on_from_anywhere() -> None:
    settings = TrackerSettings(max_objects=4, bank_size=5, feature_cache=3)
    goes_on(partial(Pipeline, tiny_model("sam3"), settings, "cam0"), EDITS, range(len(EDITS)))


@pytest.mark.parametrize(
    ("family", "selection"), [("sam2", "recent"), ("sam3", "confident"), ("sam3", "distractor")]
)
def test_every_kind_of_model_and_selection_goes_on(family: str, selection: Any) -> None:
    settings = TrackerSettings(max_objects=4, selection=selection)
    goes_on(partial(Pipeline, tiny_model(family), settings, "cam0"), EDITS, range(2, len(EDITS), 7))


def test_stages_of_static_shapes_and_a_shared_trunk_go_on() -> None:
    model = tiny_model("sam3")
    model.static_shapes = True
    model.share_trunk()
    goes_on(partial(Pipeline, model, TrackerSettings(max_objects=4), "cam0"), EDITS, range(5, len(EDITS), 7))


@pytest.fixture(scope="module")
def detector() -> Detector:
    return load_detector("yolo-world")


def test_what_is_found_by_name_goes_on_beside_what_is_pointed_at(
    nano: TrackerModel, detector: Detector
) -> None:
    """The bundled models on the bundled recording."""
    frames = list(islice(open_bag(TABLETOP), 10))
    names = prepare_prompts(
        detector, ["red mug", "green bottle", "blue can"], 0.2, max_counts={"green bottle": 1}
    )
    others = prepare_prompts(detector, ["blue can", "yellow box"], 0.2, {"yellow box": 0.1})
    point = FramePrompt(points=[(320, 240)])
    middle = FramePrompt(box=[280, 200, 360, 280])
    actions: list[Action] = [
        lambda pipeline: pipeline.set_prompts(names),
        *map(step, frames[:4]),
        add(point),  # still entering when it is saved
        step(frames[4]),
        refine(1, point, seq=frames[2].seq),
        add(middle, seq=frames[3].seq),
        *map(step, frames[5:7]),
        lambda pipeline: pipeline.set_prompts(others),
        *map(step, frames[7:]),
        objects,
    ]

    def make() -> Pipeline:
        settings = DetectorSettings(kind="yolo-world", every=3)
        return Pipeline(nano, TrackerSettings(feature_cache=3), "tabletop", detector, settings)

    results = goes_on(make, actions, at=(1, 6, 8, 12))
    assert "label='blue can', state='tracked'" in str(results[-1])


class Blocks:
    """Frames of coloured blocks, found by a detector that is sure of them but for some frames."""

    def __init__(self, nano: TrackerModel) -> None:
        self.nano = nano
        self.settings = DetectorSettings(kind="yolo-world", every=2, max_lost_s=0.2)

    def make(self) -> Pipeline:
        settings = TrackerSettings(max_objects=2, feature_cache=2)
        return Pipeline(self.nano, settings, "cam0", ColourDetector(), self.settings)

    def set_prompts(self, *names: str) -> Action:
        return lambda pipeline: pipeline.set_prompts(prepare_prompts(ColourDetector(), names, 0.5))


def test_births_deaths_and_what_was_turned_away_go_on(nano: TrackerModel) -> None:
    blocks = Blocks(nano)
    two = {(30, 40): "red", (130, 90): "green"}
    three = {(230, 150): "blue"}
    shown = [two, two, two | three, two | three, three, three, three, three, {}, {}]
    actions = [blocks.set_prompts("red", "green", "blue")]
    actions += [step(coloured_blocks.frame(seq, placed)) for seq, placed in enumerate(shown)]
    actions += [objects, lambda pipeline: pipeline.turned_away]
    results = goes_on(blocks.make, actions, (1, 3, 4, 7))
    assert results[-1], "one of three finds no room among two"


def test_a_state_may_be_restored_into_a_pipeline_that_has_lived() -> None:
    first = fresh()
    second = fresh()
    do(first, EDITS[:7])
    do(second, EDITS[:16])
    second.restore(reload(first.state()))
    assert do(second, EDITS[7:]) == do(first, EDITS[7:])
    assert pack(second.state()) == pack(first.state())


def test_a_state_stays_as_it_is() -> None:
    first = fresh()
    second = fresh()
    do(first, EDITS[:11])
    state = reload(first.state())
    before = pack(state)
    second.restore(reload(state))
    do(first, EDITS[11:])
    do(second, EDITS[11:])
    assert pack(state) == before


def test_asking_for_the_state_changes_nothing() -> None:
    """A tracked mask's score is fetched late. The score of its correction must win, whatever happens in between."""
    asked, left = (fresh(selection="confident") for _ in range(2))
    for action in EDITS[:7]:
        asked.state()
        do(asked, [action])
    do(left, EDITS[:7])
    assert pack(asked.state()) == pack(left.state())


def test_frames_that_are_no_longer_held_stay_so() -> None:
    first, second = (fresh(feature_cache=2, feature_cache_s=0) for _ in range(2))
    do(first, [step(frame(seq)) for seq in range(4)])
    second.restore(reload(first.state()))
    for pipeline in (first, second):
        with refuses(UnknownFrameError, field=("2", "3", "1")):
            pipeline.prompting.segment(BOX, seq=1)


def refused(pipeline: Pipeline, state: CameraState, error: type[Exception], match: str) -> None:
    """Assert that it cannot be restored, and that nothing has changed then."""
    do(pipeline, [step(frame(0)), add(BOX, seq=0), step(frame(1)), add(BOX)])
    before = pack(pipeline.state())
    with pytest.raises(error, match=match):
        pipeline.restore(state)
    assert pack(pipeline.state()) == before
    assert isinstance(pipeline.step(frame(2)), MaskFrame)


@pytest.mark.parametrize("changes", [{"max_objects": 5}, {"bank_size": 9}])
def test_a_state_of_another_bank_is_refused(changes: dict[str, Any]) -> None:
    refused(fresh(**changes), fresh().state(), ReplayError, "expected a state")


def test_a_state_of_another_model_or_arithmetic_is_refused() -> None:
    for family, dtype in (("sam2", torch.float32), ("sam3", torch.bfloat16)):
        refused(fresh(), fresh(family, dtype).state(), ReplayError, "expected a state of")


def test_a_state_with_names_needs_a_detector_that_knows_them(
    nano: TrackerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(nano)
    named = blocks.make()
    named.set_prompts(prepare_prompts(ColourDetector(), ["red"], 0.5))
    state = reload(named.state())
    refused(Pipeline(nano, TrackerSettings(max_objects=2), "cam0"), state, ReplayError, "detector=None")
    monkeypatch.delitem(coloured_blocks.COLOURS, "red")
    refused(blocks.make(), state, RequestError, "'red'")
