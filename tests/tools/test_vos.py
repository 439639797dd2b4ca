"""Evaluation of video object segmentation: sequences, prompts, whole runs; J, F and occlusions against other ways."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco

from sam3_node.errors import BagError, CameraError, SettingsError
from sam3_node.models.sam.tracker_model import TrackerModel
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.types import Frame, Mask
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.tiny import tiny_model
from tools.bench.accuracy import vos
from tools.scenes.clips import Clip, write_clip
from tools.scenes.recording import write_recording
from tools.vos import metrics, report
from tools.vos.evaluate import SequenceResult, evaluate
from tools.vos.followers import COMPARED, Masks, Setting, interior_point, make_prompt, parse_settings
from tools.vos.metrics import Bools, MaskScore, OcclusionCount, count, hidden_runs, is_recovered, occlusions
from tools.vos.sequences import UNKNOWN, LabelledSequence, TrueFrame, open_sequences

HEIGHT = 60
WIDTH = 80
SIDE = 20
IN_VIEW = 6
LARGE = 8
FRAMES = 40
OUT_OF_VIEW = range(12, 24)


def square(y: int, x: int, side: int = SIDE) -> Bools:
    mask = np.zeros((HEIGHT, WIDTH), np.bool_)
    mask[y : y + side, x : x + side] = True
    return mask


def labels_at(index: int) -> np.ndarray:
    """Object 1 moves and is gone for a while; of object 4 a pixel comes into view first, then all."""
    labels = np.zeros((HEIGHT, WIDTH), np.uint8)
    if index not in OUT_OF_VIEW:
        labels[square(5, 20 + index % 10)] = 1
    if index >= IN_VIEW:
        labels[square(35, 0, side=SIDE if index >= LARGE else 1)] = 4
    return labels


def drawn(labels: np.ndarray, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(0, 40, (*labels.shape, 3))
    return (noise + 50 * labels[..., None]).astype(np.uint8)


def drawn_clip(name: str = "drawn", frames: int = FRAMES, **meta: object) -> Clip:
    labels = [labels_at(index) for index in range(frames)]
    return Clip(name, [drawn(each, n) for n, each in enumerate(labels)], labels, meta=meta)


def about(sequence: LabelledSequence) -> tuple[object, ...]:
    return sequence.name, sequence.length, sequence.ids, sequence.min_area


OBJECTS = [{"id": 1, "name": "red mug"}, {"id": 4, "name": "box"}, {"id": 9, "name": "never seen"}]


def test_a_rendered_clips_objects_enter_once_they_are_large_enough(tmp_path: Path) -> None:
    write_clip(tmp_path, "drawn", drawn_clip(objects=OBJECTS))
    (sequence,) = open_sequences(tmp_path)
    assert about(sequence) == ("drawn", 40, (1, 4, 9), 0.001)
    frames = list(sequence.frames())
    assert set(frames[0].masks) == {1}
    assert set(frames[OUT_OF_VIEW[0]].masks) == {4}
    assert (frames[3].truth(1) == (labels_at(3) == 1)).all()
    assert not frames[3].truth(4).any()
    assert len(list(open_sequences(tmp_path, max_frames=7)[0].frames())) == 7


def test_frames_on_which_an_objects_truth_is_unknown_are_not_scored(
    tmp_path: Path, model: TrackerModel
) -> None:
    write_clip(tmp_path, "drawn", drawn_clip(objects=OBJECTS))
    told = {"drawn": [[3, 1], [3, 4], [5, 1], [8, 4]], "other": [[0, 1]]}
    (tmp_path / UNKNOWN).write_text(json.dumps(told))
    (sequence,) = open_sequences(tmp_path)
    unknown = {n: sorted(frame.unknown) for n, frame in enumerate(sequence.frames()) if frame.unknown}
    assert unknown == {3: [1, 4], 5: [1], 8: [4]}
    (halved,) = open_sequences(tmp_path, every=2)
    assert [n for n, frame in enumerate(halved.frames()) if frame.unknown] == [4]

    def wrong_where_unknown() -> Iterator[TrueFrame]:
        for frame in sequence.frames():
            yield frame._replace(masks={1: square(0, 0, 1)} if 1 in frame.unknown else frame.masks)

    spoiled = replace(sequence, frames=wrong_where_unknown)
    copy = Setting(method="copy-first")
    both = [evaluate(each, [copy], {copy.model: model}, lambda *_: None)[0] for each in (sequence, spoiled)]
    assert both[0].scores[1] == both[1].scores[1]


def test_a_recording_is_its_clip(tmp_path: Path) -> None:
    clip = drawn_clip(frames=OUT_OF_VIEW[0] + 1, objects=OBJECTS)
    write_recording(clip, tmp_path / "drawn.mcap")
    (sequence,) = open_sequences(tmp_path / "drawn.mcap", max_frames=5)
    assert about(sequence) == ("drawn", 5, (1, 4, 9), 0.001)
    assert all((frame.truth(1) == (labels_at(n) == 1)).all() for n, frame in enumerate(sequence.frames()))
    *_, last = open_sequences(tmp_path / "drawn.mcap")[0].frames()
    assert set(last.masks) == {4}
    assert np.abs(last.image.astype(int) - clip.image(len(clip) - 1)).mean() < 20


def benchmark_folder(root: Path, *annotations: np.ndarray) -> Path:
    """A folder as DAVIS has them, with its level of folders and grey annotations."""
    for kind in ("JPEGImages", "Annotations"):
        (root / kind / "480p" / "dog").mkdir(parents=True)
    for index, labels in enumerate(annotations):
        cv2.imwrite(str(root / f"JPEGImages/480p/dog/{index:05d}.jpg"), drawn(labels, index))
        cv2.imwrite(str(root / f"Annotations/480p/dog/{index:05d}.png"), labels)
    return root


def test_255_alone_is_an_object_and_beside_others_void(tmp_path: Path) -> None:
    one = np.where(square(5, 5), 255, 0).astype(np.uint8)
    both = np.where(square(30, 30), 2, one).astype(np.uint8)
    (alone,) = open_sequences(benchmark_folder(tmp_path / "alone", one, one))
    assert (alone.ids, alone.min_area) == ((1,), 0.0)
    assert next(alone.frames()).void is None
    (beside,) = open_sequences(benchmark_folder(tmp_path / "beside", both, both))
    assert beside.ids == (2,)
    assert (np.asarray(next(beside.frames()).void) == square(5, 5)).all()


def test_folders_of_mose_and_lvos_are_read(tmp_path: Path) -> None:
    """They have DAVIS' layout without its level 480p, and not each frame of them need have its truth."""
    for kind in ("JPEGImages", "Annotations"):
        (tmp_path / kind / "5d8b8c").mkdir(parents=True)
    for index in range(3):
        labels = labels_at(index)
        cv2.imwrite(str(tmp_path / f"JPEGImages/5d8b8c/{index:05}.jpg"), drawn(labels, index))
        cv2.imwrite(str(tmp_path / f"Annotations/5d8b8c/{index:05}.png"), labels)
    (sequence,) = open_sequences(tmp_path)
    assert about(sequence)[:3] == ("5d8b8c", 3, (1,))
    assert [list(frame.masks) for frame in sequence.frames()] == [[1]] * 3


def test_a_path_without_sequences_is_an_error(tmp_path: Path) -> None:
    with refuses(CameraError, field="folder"):
        open_sequences(tmp_path)
    (tmp_path / "bag.mcap").write_bytes(b"no bag")
    with pytest.raises(BagError, match="MCAP"):
        open_sequences(tmp_path / "bag.mcap")
    folder = benchmark_folder(tmp_path / "davis", labels_at(0), np.zeros((9, 9), np.uint8))
    with refuses(CameraError, field=("cat", "dog")):
        open_sequences(folder, ["cat"])
    assert [found.name for found in open_sequences(folder, ["d?g", "dog"])] == ["dog"]
    cv2.imwrite(str(folder / "JPEGImages/480p/dog/00001.jpg"), drawn(labels_at(1), 1))
    with refuses(CameraError, field=("1", "size")):
        list(open_sequences(folder)[0].frames())


def test_the_most_interior_point() -> None:
    mask = square(10, 10) | square(29, 29, 2)
    x, y = interior_point(mask)
    assert (abs(x - 20) <= 1, abs(y - 20) <= 1) == (True, True)
    assert interior_point(square(0, 0, 9)) == (4.5, 4.5)  # the image's border is outside, too


def test_prompts_show_the_truth() -> None:
    truth = Mask.from_full(square(10, 10))
    assert make_prompt("mask", truth).mask is truth
    assert np.asarray(make_prompt("box", truth).box).tolist() == [10, 10, 30, 30]
    assert np.asarray(make_prompt("point", truth).points).shape == (1, 2)


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    return tiny_model(presence=60.0)


def sequence_of(clip: Clip, min_area: float = 0.001) -> LabelledSequence:
    def frames() -> list[TrueFrame]:
        labels = [clip.labels(index) for index in range(len(clip))]
        return [
            TrueFrame(clip.image(n), {int(i): each == i for i in np.unique(each[each > 0])})
            for n, each in enumerate(labels)
        ]

    return LabelledSequence(clip.name, len(clip), (1, 4), min_area, lambda: iter(frames()))


def follow(model: TrackerModel, setting: str, clip: Clip) -> tuple[SequenceResult, list[Masks]]:
    """The result under one setting, and the masks that it gave by frame."""
    masks: list[Masks] = []
    settings = parse_settings(setting, Setting())
    models = {Setting().model: model}
    (result,) = evaluate(sequence_of(clip), settings, models, lambda index, frame, now: masks.append(now))
    return result, masks


def pipeline_masks(model: TrackerModel, clip: Clip, kind: str) -> list[Masks]:
    """Return the masks that a user gets by prompting object 1 on the first frame and object 4 once it is large."""
    pipeline = Pipeline(model, TrackerSettings(), "cam0")
    found: list[Masks] = []
    ids: dict[int, int] = {}
    for index in range(len(clip)):
        image = clip.image(index)
        masks = pipeline.step(Frame("cam0", index, index, WIDTH, HEIGHT, "bgr8", image.tobytes()))
        found.append({ids[instance.id]: instance.mask for instance in masks.instances})
        for truth_id, entry in ((1, 0), (4, LARGE)):
            if entry == index:
                truth = Mask.from_full(clip.labels(index) == truth_id)
                ids[pipeline.add(make_prompt(kind, truth), seq=index).id] = truth_id
    return found


@pytest.mark.parametrize("kind", ["mask", "box", "point"])
def test_the_default_equals_the_pipeline(model: TrackerModel, kind: str) -> None:
    clip = drawn_clip(frames=12)
    result, found = follow(model, f"prompt={kind}", clip)
    expected = pipeline_masks(model, clip, kind)
    assert [set(masks) for masks in found] == [set(masks) for masks in expected]
    assert set(found[-1]) == {1, 4}
    assert all(mask.area for mask in found[-1].values())
    for mine, theirs in zip(found, expected, strict=True):
        assert all((mine[key].full() == theirs[key].full()).all() for key in mine)
    inner = range(1, 11)  # neither the first nor the last
    scores = [metrics.score(expected[n][1].full(), clip.labels(n) == 1) for n in inner]
    assert result.scores[1] == pytest.approx(np.mean(scores, axis=0))


def test_settings_side_by_side_equal_each_alone(model: TrackerModel) -> None:
    text = "default,bank-off,first-only,bank=3,bank=15+select=confident"
    clip = drawn_clip(frames=12)
    settings = parse_settings(text, Setting())
    together = evaluate(sequence_of(clip), settings, {Setting().model: model}, lambda *_: None)
    for setting, beside in zip(settings, together, strict=True):
        assert beside.scores == follow(model, setting.name, clip)[0].scores


def test_copy_first_stays_where_the_object_was(model: TrackerModel) -> None:
    result, found = follow(model, "copy-first", drawn_clip(frames=12))
    first = labels_at(0) == 1
    assert all((masks[1].full() == first).all() for masks in found[1:])
    ious = [metrics.region_similarity(first, labels_at(n) == 1) for n in range(1, 11)]
    assert result.scores[1].j == pytest.approx(np.mean(ious))


@pytest.mark.parametrize(("setting", "forgets"), [("first-only", True), ("default", False)])
def test_first_only_attends_to_no_later_frame(model: TrackerModel, setting: str, forgets: bool) -> None:
    clip = drawn_clip(frames=12)
    upset = replace(clip, frames=[*clip.frames[:5], 255 - clip.image(5), *clip.frames[6:]])
    last, beside = (follow(model, setting, each)[1][-1][1].full() for each in (clip, upset))
    assert (last == beside).all() == forgets


def test_without_a_bank_a_lost_object_keeps_its_box() -> None:
    unseen = tiny_model(presence=-60.0)
    result, found = follow(unseen, "bank-off", drawn_clip())
    assert not any(masks[1].area for masks in found[1:])
    assert result.occlusions == OcclusionCount(1, 0, len(OUT_OF_VIEW), 0)


def test_an_object_without_a_frame_to_score_has_no_mean(model: TrackerModel) -> None:
    result, _ = follow(model, "copy-first", drawn_clip(frames=LARGE + 3))
    assert set(result.scores) == {1, 4}
    result, _ = follow(model, "copy-first", drawn_clip(frames=LARGE + 2))
    assert set(result.scores) == {1}


def command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["vos", *arguments])
    vos.main()


def test_the_command_prints_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write_clip(tmp_path, name, drawn_clip(name, frames=12, objects=OBJECTS))
    options = ["--settings", "default,copy-first", "--frames", "10", "--json"]
    command([str(tmp_path), *options], monkeypatch)
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) >= {"J", "F", "J&F", "sequences", "occlusions", "settings"}
    assert set(figures["sequences"]) == {"one", "two"}
    assert set(figures["settings"]) == {"default", "copy-first"}
    assert 0.0 <= figures["J"] <= 1.0


def test_the_command_reports_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(SystemExit, field="error"):
        command([str(tmp_path)], monkeypatch)


def masks_of(seed: int) -> tuple[Bools, Bools]:
    """Two smooth random masks, in many ways alike."""
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal((2, *generator.integers(12, 60, 2))).astype(np.float32)
    a, b = (cv2.GaussianBlur(layer, (0, 0), 3) for layer in noise)
    return a > 0, a + 0.7 * b > 0


def boundary_f_by_distances(mask: Bools, truth: Bools) -> float:
    """F from the distances of all pairs of contour pixels."""
    reach = np.ceil(0.008 * np.hypot(*mask.shape))
    mask_shares = np.argwhere(metrics.contour(mask))
    wanted = np.argwhere(metrics.contour(truth))
    near = np.linalg.norm(mask_shares[:, None] - wanted[None], axis=2) <= reach
    precision = near.any(axis=1).mean()
    recall = near.any(axis=0).mean()
    return float(2 * precision * recall / (precision + recall))


@each_row("seed", range(8))
def test_j_is_cocos_iou_and_f_that_of_all_pairs_of_contour_pixels(seed: int) -> None:
    mask, truth = masks_of(seed)
    runs = [coco.encode(np.asfortranarray(each.astype(np.uint8))) for each in (mask, truth)]
    assert metrics.region_similarity(mask, truth) == pytest.approx(coco.iou(runs[:1], runs[1:], [0])[0, 0])
    assert metrics.contour_accuracy(mask, truth) == pytest.approx(boundary_f_by_distances(mask, truth))


def test_a_contour_lies_on_the_side_of_the_origin() -> None:
    mask = np.zeros((5, 5), np.bool_)
    mask[2:4, 2:4] = True
    rows = ["".join(map(str, row)) for row in metrics.contour(mask).astype(int)]
    assert rows == ["00000", "01110", "01010", "01110", "00000"]


def test_empty_masks() -> None:
    nothing = square(0, 0, 0)
    something = square(5, 5)
    assert metrics.score(nothing, nothing) == (1.0, 1.0)
    assert metrics.score(something, nothing) == (0.0, 0.0)
    assert metrics.score(nothing, something) == (0.0, 0.0)
    assert metrics.score(something, something) == (1.0, 1.0)


def test_a_square_that_is_off_by_its_half() -> None:
    assert metrics.region_similarity(square(10, 10), square(10, 20)) == pytest.approx(1 / 3)
    # the contour may be 1 pixel off here
    assert metrics.contour_accuracy(square(10, 10), square(10, 11)) == 1.0
    assert 0.3 < metrics.contour_accuracy(square(10, 10), square(10, 20)) < 0.7


def test_void_pixels_do_not_count() -> None:
    truth = square(10, 10)
    wrong = square(10, 40)
    assert metrics.score(truth | wrong, truth).j < 0.6
    assert metrics.score(truth | wrong, truth, void=wrong) == (1.0, 1.0)


def by_frame(*runs: tuple[int, float]) -> np.ndarray:
    """Values that each last for some frames."""
    return np.concatenate([np.full(frames, value) for frames, value in runs])


def test_hidden_runs() -> None:
    assert hidden_runs(by_frame((2, 0.0), (3, 0.1), (4, 0.0))) == [(0, 2), (5, 9)]
    assert hidden_runs(by_frame((4, 0.1))) == hidden_runs(np.array([])) == []


def test_an_occlusion_is_long_and_ends() -> None:
    assert occlusions(by_frame((3, 0.1), (10, 0.0), (5, 0.1))) == [(3, 13, 13)]
    assert occlusions(by_frame((10, 0.0), (5, 0.1))) == [(0, 10, 10)]
    assert occlusions(by_frame((3, 0.1), (9, 0.0), (5, 0.1))) == []
    assert occlusions(by_frame((3, 0.1), (10, 0.0), (4, 0.1))) == []
    assert occlusions(by_frame((3, 0.1), (10, 0.0), (4, 0.1), (10, 0.0), (6, 0.1))) == [(17, 27, 27)]


def test_the_object_is_back_once_it_is_large_enough() -> None:
    assert occlusions(by_frame((10, 0.0), (4, 1e-4), (5, 0.1))) == [(0, 10, 14)]
    assert occlusions(by_frame((10, 0.0), (9, 1e-4))) == []


def test_recovered_is_soon_and_for_good() -> None:
    assert is_recovered(by_frame((9, 0.0), (20, 0.9)), back=0)
    assert is_recovered(by_frame((9, 0.0), (1, 0.5)), back=0)  # the clip ends there
    assert not is_recovered(by_frame((10, 0.0), (20, 0.9)), back=0)
    assert not is_recovered(by_frame((3, 0.0), (2, 0.9), (20, 0.0)), back=0)
    assert is_recovered(by_frame((3, 0.0), (2, 0.9), (2, 0.0), (20, 0.9)), back=0)
    assert not is_recovered(by_frame((5, 0.9), (20, 0.1)), back=5)


def test_counts_and_shares() -> None:
    object_shares = by_frame((3, 0.1), (10, 0.0), (12, 0.1), (10, 0.0), (12, 0.1))
    ious = by_frame((3, 0.9), (10, 1.0), (12, 0.9), (10, 0.0), (12, 0.2))
    mask_shares = by_frame((3, 0.1), (10, 0.0), (12, 0.1), (5, 0.0), (5, 0.1), (12, 0.1))
    counted = count(object_shares, mask_shares, ious)
    assert counted == OcclusionCount(cases=2, recovered=1, hidden_frames=20, false_frames=5)
    assert (counted.recovered_share, counted.false_while_hidden) == (0.5, 0.25)
    assert counted + counted == OcclusionCount(4, 2, 40, 10)
    assert OcclusionCount().recovered_share is None
    assert OcclusionCount().false_while_hidden is None


def results() -> dict[str, dict[str, SequenceResult]]:
    a = SequenceResult({1: MaskScore(0.8, 0.6), 2: MaskScore(0.6, 0.4)}, OcclusionCount(2, 1, 20, 5), 10.0)
    b = SequenceResult({1: MaskScore(0.1, 0.2)}, OcclusionCount(), 20.0)
    return {"default": {"cup": a, "jar": b}, "bank=3": {"cup": b, "jar": b}}


def test_json_has_the_first_settings_figures_and_then_all() -> None:
    figures = report.as_json(results())
    assert figures["J"] == pytest.approx(0.5)
    assert figures["F"] == pytest.approx(0.4)
    assert figures["J&F"] == pytest.approx(0.45)
    assert figures["sequences"]["cup"]["J"] == pytest.approx(0.7)
    assert figures["sequences"]["cup"]["objects"]["2"]["F"] == 0.4
    counts = {"cases": 2, "recovered": 0.5, "hidden_frames": 20, "false_while_hidden": 0.25}
    assert figures["occlusions"] == counts
    assert figures["settings"]["bank=3"]["J"] == pytest.approx(0.1)
    assert "settings" not in report.as_json({"default": results()["default"]})


def test_the_table_has_each_sequence_and_the_difference() -> None:
    lines = report.as_table(results()).splitlines()
    assert lines[1].split() == ["cup", "default", "2", "0.700", "0.500", "0.600", "10.0"]
    assert lines[2].split() == ["bank=3", "1", "0.100", "0.200", "0.150", "20.0"]
    assert lines[-1].split() == ["bank=3", "0.100", "0.200", "0.150", "-0.400", "-", "0", "-", "20.0"]


def test_settings_are_named_changes_of_a_base() -> None:
    text = "default,bank-off,bank=15+select=confident,dtype=bf16,prompt=point,size=160,read=sparse"
    default, bank_off, large, half, point, small, sparse = parse_settings(text, Setting(prompt="box"))
    assert (default.name, default.method, default.prompt) == ("default", "default", "box")
    assert bank_off.method == "bank-off"
    assert (large.bank_size, large.selection, large.dtype) == (15, "confident", "auto")
    assert (half.dtype, half.prompt, point.prompt) == ("bfloat16", "box", "point")
    assert small.model == ("auto", 160, "exact")
    assert sparse.model == ("auto", 0, "sparse")
    assert default.bank_size == TrackerSettings().bank_size


def test_the_settings_of_compare_are_valid() -> None:
    assert len(parse_settings(COMPARED, Setting())) == len(COMPARED.split(","))


@each_row(
    "text",
    [
        "",
        "fast",
        "bank=1",
        "bank=x",
        "bank",
        "select=best",
        "dtype=int8",
        "size=x",
        "read=fast",
        "prompt=",
        "default,default",
    ],
)
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected"):
        parse_settings(text, Setting())
