"""Score a detector on rendered clips: COCO's average precision, by pycocotools, and a contact sheet."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from sam3_node.detection.detectors import VOCABULARY, Detector
from sam3_node.detection.loading import load_detector
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import require
from sam3_node.types import Detection, Image
from sam3_node.visualization import contact_sheet, write_image
from tools.scenes.clips import list_clips, read_clip

from .data import SIZE, compute_boxes, read_names
from .network import ANYTHING, Phrase

Box = tuple[float, float, float, float]
MIN_SCORE = 0.001  # of a detection that counts towards average precision
MAX_SHOWN = 24  # frames of the sheet
SHOWN_SCORE = 0.3
POOLED = "phrases"  # the only category when phrases are pooled
WIDTH = 480  # of a frame, pixels
COLUMNS = 4  # frames in a row
INK = (0, 255, 255)
PAPER = (0, 0, 0)


class LabelledFrame(NamedTuple):
    """A frame, its objects' names and boxes in pixels, and the names of all objects of its clip."""

    image: Image
    names: list[Phrase]
    boxes: list[Box]
    clip: list[Phrase]

    def mixed(self) -> list[Phrase]:
        """Return the clip's names, and each kind with the colour of the previous name, which rarely fits an object."""
        shifted = zip(self.clip, self.clip[1:] + self.clip[:1], strict=True)
        return list(dict.fromkeys([*self.clip, *(Phrase(b.kind, a.colours) for a, b in shifted)]))


class DetectionScorer:
    """LabelledFrame and detections in the form that pycocotools reads."""

    def __init__(self, categories: Sequence[str] = (POOLED,)) -> None:
        self._numbers = {name: i for i, name in enumerate(categories, start=1)}
        self._images: list[dict[str, Any]] = []
        self._truth: list[dict[str, Any]] = []
        self._detections: list[dict[str, Any]] = []

    def add(self, truth: Sequence[tuple[str, Box]], detections: Sequence[tuple[str, Box, float]]) -> None:
        """Add one image by category; truth of other categories is left out."""
        image = len(self._images) + 1
        self._images.append({"id": image})
        for name, box in truth:
            if name in self._numbers:
                row = {"id": len(self._truth) + 1, "area": _sized(box)[2] * _sized(box)[3], "iscrowd": 0}
                self._truth.append({**row, **self._at(image, name, box)})
        for name, box, score in detections:
            self._detections.append({**self._at(image, name, box), "score": score})

    def _at(self, image: int, name: str, box: Box) -> dict[str, Any]:
        return {"image_id": image, "category_id": self._numbers[name], "bbox": _sized(box)}

    def figures(self, *, by_category: bool = True) -> dict[str, float]:
        """Return AP, AP50, recall, F1 and score; all 0 without detections.

        AP is over IoU 0.5 to 0.95, recall with 100 boxes, F1 the best at IoU 0.5 of all categories together, and score
        the one that gives it.
        """
        if not self._detections:
            return dict.fromkeys(("AP", "AP50", "recall", "F1", "score"), 0.0)
        with contextlib.redirect_stdout(io.StringIO()):
            run = self._evaluated(by_category)
            run.summarize()
            pooled = run if not by_category else self._evaluated(False)
        stats = {"AP": run.stats[0], "AP50": run.stats[1], "recall": run.stats[8]}
        return {name: float(value) for name, value in stats.items()} | _best_point(pooled)

    def _evaluated(self, by_category: bool) -> Any:
        """Return a COCOeval that has accumulated."""
        api = require("pycocotools.coco", "dev")
        truth = api.COCO()
        categories = [{"id": number, "name": name} for name, number in self._numbers.items()]
        truth.dataset = {"images": self._images, "annotations": self._truth, "categories": categories}
        truth.createIndex()
        detections = truth.loadRes([dict(row) for row in self._detections])
        run = require("pycocotools.cocoeval", "dev").COCOeval(truth, detections, "bbox")
        run.params.useCats = int(by_category)
        run.evaluate()
        run.accumulate()
        return run


def check(folder: Path, scenes: Path, every: int, size: int, sheet: Path) -> None:
    """Score the weights of a folder on every `every`-th frame of the clips of another, and draw a sheet."""
    detector = load_detector("yolo-world", folder, image_size=size)
    vocabulary = Vocabulary.load(folder / VOCABULARY)
    truths = list(read_truths(scenes, every))
    for line in report(detector, vocabulary, truths):
        print(line, flush=True)
    chosen = truths[:: -(-len(truths) // MAX_SHOWN)]
    phrases = (_in_vocabulary(vocabulary, truth.clip) for truth in chosen)
    frames = zip((truth.image for truth in chosen), phrases, strict=True)
    draw_sheet(sheet, [(image, detect(detector, image, known, SHOWN_SCORE)) for image, known in frames])
    print(f"{len(chosen)} of {len(truths)} frames with their detections: {sheet}", flush=True)


def read_truths(scenes: Path, every: int) -> Iterator[LabelledFrame]:
    """Yield every `every`-th frame of each clip of a folder."""
    for clip_name in list_clips(scenes):
        clip = read_clip(scenes, clip_name)
        names = read_names(clip)
        for frame in range(0, len(clip), every):
            image = clip.image(frame)
            boxes = compute_boxes(clip.labels(frame), names, image.shape[1] / SIZE[1])
            seen = [names[number] for number in boxes]
            yield LabelledFrame(image, seen, list(boxes.values()), list(dict.fromkeys(names.values())))


def report(detector: Detector, vocabulary: Vocabulary, truths: Sequence[LabelledFrame]) -> Iterator[str]:
    """Yield the lines of a table; phrases that the vocabulary lacks are left out."""
    yield f"{len(truths)} frames, {sum(len(truth.boxes) for truth in truths)} objects"
    columns = ("AP", "AP50", "recall", "F1", "score")
    yield f"{'phrases':40}" + "".join(f"{name:>8}" for name in columns)
    kinds = _kinds(detector, vocabulary, truths)
    mixed = _phrases(detector, vocabulary, truths, LabelledFrame.mixed)
    anything = _phrases(detector, vocabulary, truths, lambda truth: [Phrase(ANYTHING)])
    rows = {
        "kinds": kinds.figures(),
        "any kind": kinds.figures(by_category=False),
        "names in the clip, and recombined": mixed.figures(),
        ANYTHING: anything.figures(),
    }
    for title, figures in rows.items():
        yield f"{title:40}" + "".join(f"{figures[name]:8.3f}" for name in columns)


def detect(detector: Detector, image: Image, phrases: Sequence[str], threshold: float) -> list[Detection]:
    """Return the detections of phrases in a frame; none without phrases."""
    return detector.detect(image, detector.prepare(list(phrases)), threshold) if phrases else []


def _kinds(detector: Detector, vocabulary: Vocabulary, truths: Sequence[LabelledFrame]) -> DetectionScorer:
    """Score all kinds of the clips, detected together."""
    named = {Phrase(name.kind) for truth in truths for name in truth.clip}
    kinds = _in_vocabulary(vocabulary, sorted(named, key=str))
    scorer = DetectionScorer(kinds)
    for truth in truths:
        detections = detect(detector, truth.image, kinds, MIN_SCORE)
        objects = [(name.kind, box) for name, box in zip(truth.names, truth.boxes, strict=True)]
        scorer.add(objects, [(detection.label, detection.box, detection.score) for detection in detections])
    return scorer


def _phrases(
    detector: Detector,
    vocabulary: Vocabulary,
    truths: Sequence[LabelledFrame],
    choose: Callable[[LabelledFrame], list[Phrase]],
) -> DetectionScorer:
    """Score each phrase on each frame as an image of its own, so that scores are compared across phrases."""
    scorer = DetectionScorer()
    for truth in truths:
        phrases = [phrase for phrase in choose(truth) if str(phrase) in vocabulary]
        detections = detect(detector, truth.image, _in_vocabulary(vocabulary, phrases), MIN_SCORE)
        for phrase in phrases:
            fitting = zip(truth.names, truth.boxes, strict=True)
            objects = [(POOLED, box) for name, box in fitting if phrase.describes(name)]
            found = (detection for detection in detections if detection.label == str(phrase))
            scorer.add(objects, [(POOLED, detection.box, detection.score) for detection in found])
    return scorer


def _in_vocabulary(vocabulary: Vocabulary, phrases: Sequence[Phrase]) -> list[str]:
    return [str(phrase) for phrase in phrases if str(phrase) in vocabulary]


def _sized(box: Box) -> list[float]:
    """Convert x0 y0 x1 y1 to x, y, width, height."""
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _best_point(run: Any) -> dict[str, float]:
    """Return the best F1 at IoU 0.5 among all scores, and its score."""
    precision, scores = (run.eval[name][0, :, 0, 0, -1] for name in ("precision", "scores"))
    recall = run.params.recThrs
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-9)
    best = int(f1.argmax())
    return {"F1": float(f1[best]), "score": float(scores[best])}


def draw_sheet(path: Path, frames: Sequence[tuple[Image, Iterable[Detection]]]) -> None:
    """Draw BGR frames, all of one shape, with boxes, labels and scores; raise OutputError if writing fails."""
    tiles = [_tile(image, detections) for image, detections in frames]
    write_image(path, contact_sheet(tiles, [""] * len(tiles), COLUMNS))


def _tile(image: Image, detections: Iterable[Detection]) -> Image:
    scale = WIDTH / image.shape[1]
    tile: Image = cv2.resize(image, (WIDTH, round(image.shape[0] * scale)), interpolation=cv2.INTER_AREA)
    for detection in detections:
        x0, y0, x1, y1 = (round(side * scale) for side in detection.box)
        cv2.rectangle(tile, (x0, y0), (x1, y1), INK, 1)
        text = f"{detection.label} {detection.score:.2f}"
        for colour, thickness in ((PAPER, 3), (INK, 1)):
            at = (min(x0, WIDTH - 8 * len(text)), max(10, y0 - 3))
            cv2.putText(tile, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.4, colour, thickness, cv2.LINE_AA)
    return tile
