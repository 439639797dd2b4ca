"""Identities against ground truth: who is counted, what is an error, and the figures of the library."""

from pathlib import Path

import numpy as np
import pytest

from sam3_node.errors import CameraError
from sam3_node.types import Instance, Mask, TrackState
from tools.mot import MotFrame, MotScore, MotScorer, TrueClip, open_clips, total
from tools.scenes.clips import Clip, write_clip

HEIGHT = 40
WIDTH = 60
IMAGE = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
# columns
LEFT = (5, 25)
RIGHT = (40, 55)
NAMED = {1: "mug", 2: "can"}


def area(columns: tuple[int, int]) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[10:30, columns[0] : columns[1]] = True
    return mask


def seen(
    object_id: int, columns: tuple[int, int], label: str = "mug", state: TrackState = "tracked"
) -> Instance:
    return Instance(object_id, label, 0.9, state, 1, 0, Mask.from_full(area(columns)))


def frame() -> MotFrame:
    return MotFrame(IMAGE, {1: area(LEFT), 2: area(RIGHT)}, {})


def score(*frames: list[Instance]) -> MotScore:
    scorer = MotScorer(NAMED)
    for instances in frames:
        scorer.add(frame(), instances)
    return total([scorer], len(frames), 12.0)


def test_all_right_is_one() -> None:
    found = score(*[[seen(7, LEFT), seen(9, RIGHT, "can")]] * 4)
    assert (found.idf1, found.mota) == (1.0, 1.0)
    assert (found.switches, found.misses, found.false_masks, found.false_starts) == (0, 0, 0, 0)
    assert (found.objects, found.minutes) == (8, 4 / 12 / 60)


def test_a_new_id_on_the_same_object_is_a_switch() -> None:
    found = score(*[[seen(7, LEFT)]] * 2, *[[seen(8, LEFT)]] * 2)
    assert found.switches == 1
    assert found.idf1 < 0.5


def false(found: MotScore) -> tuple[int, int, int]:
    return found.false_masks, found.misses, found.false_starts


@pytest.mark.parametrize("other", [seen(7, LEFT, "can"), seen(7, (25, 35)), seen(7, (14, 34))])
def test_another_name_or_place_is_false_and_the_object_is_missed(other: Instance) -> None:
    assert false(score([other])) == (1, 2, 1)


@pytest.mark.parametrize("state", ["tentative", "occluded"])
def test_tentative_or_hidden_instances_do_not_count(state: TrackState) -> None:
    assert false(score([seen(7, (25, 35), state=state)])) == (0, 2, 0)


def test_a_barely_visible_object_counts_neither_way() -> None:
    scorer = MotScorer(NAMED)
    scorer.add(MotFrame(IMAGE, {}, {1: area((5, 6))}), [seen(7, LEFT)])
    assert false(total([scorer], 1, 12.0)) == (0, 0, 0)


def test_an_id_is_a_false_start_when_it_was_mostly_nothing() -> None:
    assert score([seen(7, LEFT)], [seen(7, (26, 36))], [seen(7, (26, 36))]).false_starts == 1
    assert score([seen(7, LEFT)], [seen(7, LEFT)], [seen(7, (26, 36))]).false_starts == 0


def write(root: Path, meta: dict) -> Path:
    labels = np.zeros((HEIGHT, WIDTH), np.uint8)
    labels[10:30, 5:25] = 1
    labels[0, 0] = 2
    write_clip(root, "a", Clip("a", [IMAGE], [labels], meta={"fps": 12, **meta}))
    return root


def test_objects_whose_names_the_detector_lacks_are_left_out(tmp_path: Path) -> None:
    objects = [{"id": 1, "name": "red mug", "kind": "mug"}, {"id": 2, "name": "blue vase", "kind": "vase"}]
    root = write(tmp_path, {"objects": objects})
    (clip,) = open_clips(root, {"mug"}.__contains__, "kind")
    assert (clip.prompts, clip.fps) == (("mug",), 12.0)
    (both,) = open_clips(root, lambda name: True, "name")
    assert both.prompts == ("blue vase", "red mug")
    (true_frame,) = both.frames()
    assert (list(true_frame.counted), list(true_frame.slivers)) == ([1], [2])


def test_clips_without_names_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="names"):
        open_clips(write(tmp_path, {}), lambda name: True, "kind")


def test_a_clip_is_read_up_to_a_limit() -> None:
    clip = Clip("a", [IMAGE] * 3, [np.zeros((HEIGHT, WIDTH), np.uint8)] * 3)
    assert len(list(TrueClip(clip, {}).frames(2))) == 2
