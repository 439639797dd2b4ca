"""A picture that is sent is segmented by prompts or names, as a frame is, and nothing of it is kept."""

from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.bags import LabelledClip
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.errors import RequestError, Sam3NodeError
from sam3_node.node.operations import carry_out
from sam3_node.perception.perception import Perception
from sam3_node.schema.fields import convert
from sam3_node.schema.operations import SegmentFrame, SegmentPhoto
from sam3_node.schema.replies import LabelledMask
from sam3_node.settings import DetectorSettings, ModelSettings, Settings
from sam3_node.wire import decode_mask
from sam3_node.wire.images import MAX_PHOTO_FILE
from sam3_node.wire.requests import read_operation
from tests.support.refuses import refuses

LABEL = "red mug"
Ask = Callable[..., Sequence[LabelledMask]]


@pytest.fixture(scope="module")
def clip() -> LabelledClip:
    return LabelledClip.load(TABLETOP)


@pytest.fixture(scope="module")
def perception() -> Perception:
    detector = DetectorSettings(kind="yolo-world")
    return Perception.load(Settings(model=ModelSettings(name="nano", device="cpu"), detector=detector))


@pytest.fixture
def ask(perception: Perception, clip: LabelledClip) -> Ask:
    photo = cv2.imencode(".png", clip.image(0))[1].tobytes()

    def ask(**args: Any) -> Sequence[LabelledMask]:
        request = read_operation("segment_photo", {"photo": photo} | args)
        assert isinstance(request, SegmentPhoto)
        return carry_out(perception, request).masks

    return ask


def find_box(clip: LabelledClip, label: str) -> list[float]:
    mug = next(id for id, name in clip.labels.items() if name == label)
    rows, columns = np.nonzero(clip.truth(0)[mug])
    return [float(side) for side in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)]


def test_the_masks_of_a_picture_are_those_of_the_same_frame(
    perception: Perception, clip: LabelledClip, ask: Ask
) -> None:
    perception.serve("cam0").step(clip.frames[0])
    box = find_box(clip, LABEL)
    point = [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2]
    prompts = [{"box": box}, {"points": [point], "labels": [1]}]
    before = perception.pipelines["cam0"].prompting.cache_usage
    found = ask(objects=prompts)
    assert [one.label for one in found] == ["", ""]
    for prompt, one in zip(prompts, found, strict=True):
        shown = carry_out(perception, convert(prompt, SegmentFrame, "segment"))
        assert np.array_equal(decode_mask(one.mask).full(), decode_mask(shown.mask).full())
        assert one.score == shown.score
    assert perception.pipelines["cam0"].prompting.cache_usage == before
    assert len(perception.pipelines["cam0"].objects) == 0
    (only,) = ask(objects=prompts[:1], multimask=True)  # nano was trained for one mask
    assert only.score == found[0].score


def test_names_find_their_things_and_change_no_prompts(
    perception: Perception, clip: LabelledClip, ask: Ask
) -> None:
    found = ask(names=[LABEL, "screwdriver"], scores={LABEL: 0.3})
    best = found[0]
    assert best.label == LABEL
    assert best.score >= 0.3
    mug = next(id for id, name in clip.labels.items() if name == LABEL)
    truth = clip.truth(0)[mug]
    mask = decode_mask(best.mask).full()
    assert (mask & truth).sum() / (mask | truth).sum() > 0.7
    assert perception.prompts == ()
    assert ask(names=[LABEL], scores={LABEL: 1.0}) == ()


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({}, ("objects", "names", "neither")),
        ({"names": [LABEL], "objects": [{"box": [1, 1, 9, 9]}]}, ("objects", "names", "both")),
        ({"objects": []}, "objects"),
        ({"objects": [{"box": [1, 1, 9, 9]}] * 65}, ("objects", "64", "65")),
        ({"objects": [{}]}, ("points", "box")),
        ({"objects": [{"mask": {}}]}, "mask"),
        ({"objects": [{"points": [[9999, 1]]}]}, "points"),
        ({"objects": [{"box": [1, 1, 9, 9]}] * 2, "multimask": True}, "multimask"),
        ({"names": [LABEL], "multimask": True}, "multimask"),
        ({"names": [LABEL], "scores": {"cup": 0.5}}, "cup"),
        ({"names": ["x" * 201]}, "phrase"),
        ({"names": [LABEL], "photo": bytes(MAX_PHOTO_FILE + 1)}, "photo"),
    ],
)
def test_what_cannot_be_meant_is_refused(ask: Ask, args: dict[str, Any], field: Any) -> None:
    with refuses(RequestError, field=field):
        ask(**args)


@pytest.mark.parametrize("args", [{"objects": [5]}, {"objects": 5}, {"photo": b"no picture"}, {"photo": b""}])
def test_what_cannot_be_read_is_refused(ask: Ask, args: dict[str, Any]) -> None:
    with pytest.raises(Sam3NodeError):
        ask(**{"objects": [{"box": [1, 1, 9, 9]}]} | args)


def test_without_a_detector_names_are_refused(perception: Perception, clip: LabelledClip) -> None:
    without = Perception(perception.settings, perception.model, None)
    request = SegmentPhoto(photo=b"", names=(LABEL,))
    with refuses(RequestError, field=("names", "detector.kind")):
        carry_out(without, request)
