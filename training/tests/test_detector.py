"""Training of the detector: words, pictures, losses, weights; and its scores against known values."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from sam3_node.detection.detectors import NANO, VOCABULARY
from sam3_node.detection.loading import load_detector
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import CameraError, ModelError, OutputError
from sam3_node.models.yolo.network import Predictions, anchors, load_yolo_world
from sam3_node.types import Detection
from tests.support.refuses import refuses
from tools.scenes.clips import Clip, read_clip, write_clip
from training.detector.check import (
    POOLED,
    WIDTH,
    DetectionScorer,
    LabelledFrame,
    check,
    detect,
    draw_sheet,
    read_truths,
)
from training.detector.data import SIZE, Augmentation, Pictures, Scenes, compute_boxes, query, read_names
from training.detector.losses import assign, complete_iou, focal, losses
from training.detector.network import ANYTHING, Phrase, Words, WordVectors, export, vocabulary
from training.detector.train import Trainer

RED_MUG = Phrase("mug", ("red",))
BLUE_GLASS = Phrase("glass", ("clear", "blue"))
WORDS = Words.from_names([RED_MUG, BLUE_GLASS, Phrase("tape roll", ("green",))])
BOX = (100, 60, 180, 140)


def write_red_square(folder: Path, speck: bool) -> Path:
    image = np.full((240, 320, 3), 200, np.uint8)
    labels = np.zeros((240, 320), np.uint8)
    image[60:140, 100:180] = (20, 20, 200)
    labels[60:140, 100:180] = 1
    labels[10:13, 10:13] = 2 * speck
    objects = [{"id": 1, "kind": "mug", "color": "red"}, {"id": 2, "kind": "egg", "color": "white"}]
    write_clip(folder, "a", Clip("a", [image] * 2, [labels] * 2, meta={"objects": objects[: 1 + speck]}))
    return folder


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """One clip of two frames: a red square, named a mug, and a speck."""
    return write_red_square(tmp_path / "train", speck=True)


@pytest.mark.parametrize(
    ("phrase", "fits"),
    [
        *((Phrase("glass", words), True) for words in ((), ("blue",), ("clear",))),
        *((phrase, True) for phrase in (BLUE_GLASS, Phrase(ANYTHING), Phrase(ANYTHING, ("blue",)))),
        *((phrase, False) for phrase in (Phrase("glass", ("red",)), Phrase("mug", ("blue",)))),
    ],
)
def test_a_phrase_describes_names_with_all_its_words(phrase: Phrase, fits: bool) -> None:
    assert phrase.describes(BLUE_GLASS) is fits


def test_the_vocabulary_has_combinations_that_no_scene_had_and_synonyms() -> None:
    torch.manual_seed(0)
    phrase_vectors = vocabulary(WORDS, WordVectors(len(WORDS), 8))
    assert {"mug", "clear green mug", "blue tape roll", "object", "red object"} <= set(phrase_vectors.phrases)
    same = phrase_vectors.encode(["green roll of tape", "green tape roll"])
    assert np.array_equal(same[0], same[1])
    assert np.allclose(np.linalg.norm(phrase_vectors.vectors, axis=1), 1, atol=1e-5)


def test_a_phrase_is_the_direction_of_the_sum_of_its_words() -> None:
    vectors = WordVectors(len(WORDS), 8)
    mug, red = (vectors.table.weight[WORDS.numbers([p])[0, i]] for p, i in ((RED_MUG, 0), (RED_MUG, 1)))
    vector = vectors(torch.from_numpy(WORDS.numbers([RED_MUG])))[0]
    assert torch.allclose(vector, (mug + red) / (mug + red).norm(), atol=1e-6)


def test_queries_have_true_and_false_phrases_and_can_leave_anything_out() -> None:
    rng = np.random.default_rng(0)
    names = [RED_MUG, BLUE_GLASS]
    queries = [query(rng, WORDS, names, 12, anything=False) for _ in range(50)]
    assert {len(phrases) for phrases in queries} == {12}
    assert all(phrase.kind != ANYTHING for phrases in queries for phrase in phrases)
    true = [any(phrase.describes(name) for name in names) for phrases in queries for phrase in phrases]
    assert 0.1 < np.mean(true) < 0.7
    assert query(rng, WORDS, [], 4), "of a picture without objects, too"


def test_solids_without_a_name_are_described_by_their_colour_alone() -> None:
    thing = Phrase("bent thing", ("red",))
    words = Words.from_names([RED_MUG, thing])
    assert words.kinds == ("mug", ANYTHING)
    assert Phrase(ANYTHING, ("red",)).describes(thing)
    assert not RED_MUG.describes(thing)
    rng = np.random.default_rng(0)
    phrases = {str(phrase) for _ in range(50) for phrase in query(rng, words, [thing], 6)}
    assert phrases == {"mug", "red mug", "object", "red object"}


def test_boxes_leave_slivers_out(scenes: Path) -> None:
    clip = read_clip(scenes, "a")
    assert compute_boxes(clip.labels(0), read_names(clip)) == {1: BOX}


def test_a_view_moves_pixels_and_labels_alike_and_keeps_hues() -> None:
    rng = np.random.default_rng(0)
    labels = np.zeros((240, 320), np.uint8)
    labels[80:160, 120:200] = 1
    image = np.full((240, 320, 3), 90, np.uint8)
    image[labels == 1] = 40, 40, 200
    for _ in range(20):
        view = Augmentation.draw(rng, labels.shape)
        canvas = view.image(image).astype(int)
        moved = view.labels(labels)
        assert canvas.shape == (*SIZE, 3)
        inside = canvas[moved == 1]
        if len(inside) > 500:
            red, green, blue = inside.mean(axis=0)
            assert red > 2 * max(green, blue)


def test_batches_hold_the_objects_of_their_pictures(scenes: Path) -> None:
    source = Scenes(scenes)
    batch = Pictures(source, source.words, 3, [0]).batch(np.random.default_rng(1))
    assert batch.images.shape == (3, *SIZE, 3)
    assert batch.boxes.shape[:2] == batch.fits.shape[:2]
    assert batch.fits.shape[2] == batch.words.shape[1]


def test_clips_beside_give_some_of_the_pictures_and_words(scenes: Path, tmp_path: Path) -> None:
    clip = read_clip(scenes, "a")
    objects = [{"id": 1, "kind": "bent thing", "color": "teal"}, {"id": 2, "kind": "pan", "color": "red"}]
    other = Clip("b", [clip.image(0)], [clip.labels(0)], meta={"objects": objects})
    write_clip(tmp_path / "beside", "b", other)
    source = Scenes(scenes, beside=tmp_path / "beside")
    assert source.words.kinds == ("egg", "mug", "pan", ANYTHING)
    assert source.words.colours == ("red", "teal", "white")
    rng = np.random.default_rng(0)
    drawn = [source.draw(rng).names for _ in range(200)]
    share = np.mean([Phrase("bent thing", ("teal",)) in names for names in drawn])
    assert 0.2 < share < 0.4


def test_clips_without_names_are_an_error(tmp_path: Path) -> None:
    blank = np.zeros((24, 32, 3), np.uint8)
    write_clip(tmp_path, "a", Clip("a", [blank], [blank[..., 0]]))
    with refuses(CameraError, field=("kind", "color")):
        Scenes(tmp_path)


def _predictions(boxes: torch.Tensor, phrases: int) -> Predictions:
    """Return predictions in which each anchor has the box of its nearest object, with an uncertain class."""
    centres, strides = anchors(SIZE, torch.device("cpu"))
    distributions = torch.zeros(1, len(centres), 4, 16, requires_grad=True)
    return Predictions(
        torch.zeros(1, len(centres), phrases, requires_grad=True), distributions, centres, strides
    )


def test_anchors_learn_the_object_they_lie_in_and_nothing_without_a_phrase() -> None:
    boxes = torch.tensor([[[40.0, 40, 100, 100], [200, 100, 280, 180]]])
    fits = torch.tensor([[[True, False], [False, False]]])
    predictions = _predictions(boxes, 2)
    drawn = boxes[:, :1].expand(-1, len(predictions.centres), -1)
    chosen = assign(predictions.logits.sigmoid(), drawn, predictions.centres, boxes, fits)
    taken = predictions.centres[chosen.weight[0] > 0]
    assert 0 < len(taken) <= 10
    assert bool(((taken >= 40) & (taken <= 100)).all())
    assert torch.allclose(chosen.scores.amax(dim=1), torch.tensor([[1.0, 0.0]]))


def test_losses_are_finite_without_objects_and_reach_both_heads_with_one() -> None:
    boxes = torch.tensor([[[40.0, 40, 100, 100]]])
    for fits in (torch.tensor([[[False]]]), torch.tensor([[[True]]])):
        predictions = _predictions(boxes, 1)
        terms = losses(predictions, boxes, fits)
        sum(terms.values()).backward()  # type: ignore[union-attr]
        assert all(bool(term.isfinite()) for term in terms.values())
        assert bool(predictions.distributions.grad.any()) is bool(fits.any())  # type: ignore[union-attr]


def test_complete_iou_is_one_for_equal_boxes_and_falls_with_distance() -> None:
    box = torch.tensor([[0.0, 0, 10, 10]])
    values = [float(complete_iou(box, box + shift)[1]) for shift in (0, 5, 20)]
    assert values[0] == pytest.approx(1, abs=1e-5)
    assert values[0] > values[1] > 0 > values[2]


def test_focal_loss_is_least_at_the_distance() -> None:
    distance = torch.full((1, 4), 2.25)
    bins = torch.full((1, 4, 16), -20.0)
    bins[..., 2] = float(np.log(0.75))
    bins[..., 3] = float(np.log(0.25))
    assert float(focal(bins, distance).mean()) == pytest.approx(
        -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)), abs=1e-4
    )


def test_training_learns_resumes_and_exports_loadable_weights(scenes: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "run"
    source = Scenes(scenes)
    trainer = Trainer(folder, source.words, torch.device("cpu"))
    batch = Pictures(source, source.words, 2, [0]).batch(np.random.default_rng(3))
    records = [trainer.step(batch, 2e-3) for _ in range(8)]
    assert records[-1]["loss"] < records[0]["loss"]
    trainer.save()
    again = Trainer(folder, source.words, torch.device("cpu"))
    assert again.progress.step == 8
    export([again.path], folder / "export")
    detector = load_detector("yolo-world", folder / "export", image_size=320)
    assert "white mug" in Vocabulary.load(folder / "export" / "vocabulary.safetensors")
    black = np.zeros((240, 320, 3), np.uint8)
    assert isinstance(detector.detect(black, detector.prepare(["red mug"]), 0.5), list)
    with refuses(ModelError, field="words"):
        Trainer(folder, WORDS, torch.device("cpu"))
    more = Words([*source.words.kinds, "kettle"], source.words.colours)
    begun = Trainer(tmp_path / "on", more, torch.device("cpu"), init=folder / "export")
    begun.save()
    export([begun.path], tmp_path / "same")
    known, found = (Vocabulary.load(path / VOCABULARY) for path in (folder / "export", tmp_path / "same"))
    assert np.allclose(found.encode(known.phrases), known.vectors, atol=1e-5)
    assert "red kettle" in found
    other = Trainer(tmp_path / "far", source.words, torch.device("cpu"))
    for value in other.average.values():
        value.mul_(3)
    other.save()
    export([other.path], tmp_path / "half", folder / "export")
    export([again.path, other.path], tmp_path / "mean")
    alone = export([other.path], tmp_path / "all").parent
    paths = (folder / "export", alone, tmp_path / "half", tmp_path / "mean")
    near, far, half, mean = (load_yolo_world(path, dtype="float32").state_dict() for path in paths)
    name = next(iter(near))
    for between in (half, mean):
        assert torch.allclose(between[name], (near[name] + far[name]) / 2, rtol=2e-3, atol=1e-3)
    with pytest.raises(ModelError, match="others"):
        export([again.path, begun.path], tmp_path / "mixed")


HERE = (10.0, 10.0, 60.0, 60.0)
THERE = (100.0, 100.0, 180.0, 180.0)
BLUE_CAN = Phrase("can", ("blue",))


def figures(detections: list[tuple[str, tuple[float, float, float, float], float]]) -> dict[str, float]:
    scorer = DetectionScorer()
    scorer.add([(POOLED, HERE), (POOLED, THERE)], detections)
    return scorer.figures()


def test_all_found_and_nothing_else_is_perfect() -> None:
    perfect = figures([(POOLED, HERE, 0.9), (POOLED, THERE, 0.7)])
    assert perfect == pytest.approx({"AP": 1, "AP50": 1, "recall": 1, "F1": 1, "score": 0.7}, abs=1e-6)


def test_half_found_is_half_of_the_recall() -> None:
    half = figures([(POOLED, HERE, 0.9)])
    assert half["recall"] == pytest.approx(0.5)
    assert half["AP50"] == pytest.approx(0.5, abs=0.01)
    assert half["F1"] == pytest.approx(2 / 3, abs=0.01)


def test_a_false_box_of_a_high_score_costs_precision() -> None:
    false = (POOLED, (200.0, 10.0, 240.0, 50.0), 0.95)
    assert figures([false, (POOLED, HERE, 0.9), (POOLED, THERE, 0.7)])["AP50"] < 0.7


def test_no_detection_scores_zero() -> None:
    assert not any(figures([]).values())


def test_categories_are_apart() -> None:
    scorer = DetectionScorer(("mug", "can"))
    scorer.add([("mug", HERE), ("spoon", THERE)], [("can", HERE, 0.9)])
    assert scorer.figures()["AP"] == 0
    assert scorer.figures(by_category=False)["AP50"] == pytest.approx(1, abs=1e-6)


def test_recombined_names_keep_the_true_ones() -> None:
    truth = LabelledFrame(np.zeros((8, 8, 3), np.uint8), [RED_MUG], [HERE], [RED_MUG, BLUE_CAN])
    mixed = truth.mixed()
    assert mixed[:2] == [RED_MUG, BLUE_CAN]
    assert {str(phrase) for phrase in mixed[2:]} == {"red can", "blue mug"}


def test_labelled_frames_have_the_boxes_of_visible_objects(scenes: Path) -> None:
    (truth,) = read_truths(scenes, 2)
    assert (truth.names, truth.boxes) == ([RED_MUG], [(100.0, 60.0, 180.0, 140.0)])
    assert truth.clip == [RED_MUG, Phrase("egg", ("white",))]


def test_the_bundled_weights_are_checked_from_the_folder(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.png"
    check(NANO, scenes, 1, 0, sheet)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 frames, 2 objects"
    titles = [line.split("  ")[0] for line in lines[2:6]]
    assert titles == ["kinds", "any kind", "names in the clip, and recombined", "object"]
    assert cv2.imread(str(sheet)).shape[1] >= 2 * WIDTH


def test_no_phrases_find_nothing() -> None:
    detector = load_detector("yolo-world", NANO)
    assert detect(detector, np.zeros((64, 64, 3), np.uint8), [], 0.1) == []
    assert "mug" in Vocabulary.load(NANO / VOCABULARY)


def test_a_sheet_shows_boxes_and_names_a_path_that_fails(tmp_path: Path) -> None:
    image = np.zeros((240, 320, 3), np.uint8)
    draw_sheet(tmp_path / "new" / "a.png", [(image, [Detection("red mug", 0.8, HERE)])])
    assert cv2.imread(str(tmp_path / "new" / "a.png")).max() == 255
    with refuses(OutputError, field="write"):
        draw_sheet(tmp_path, [(image, [])])
