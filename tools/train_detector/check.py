"""Figures of a detector on rendered clips: COCO's average precision, by pycocotools, and a sheet to look at."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sam3_node.detection.base import Detector
from sam3_node.detection.load import VOCABULARY, load_detector
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import require
from sam3_node.types import Detection
from tools.scenes.clips import list_clips, read_clip

from .data import boxes_of, names_of
from .sheet import draw_sheet
from .view import SIZE, Image
from .words import ANYTHING, Phrase

Box = tuple[float, float, float, float]
LEAST = 0.001  # score of a box that counts, the worst that an average precision reads
SHOWN = 24  # frames of the sheet, at most
SHOWN_SCORE = 0.3
ASKED = "asked"  # the one category where phrases are pooled


class Truth(NamedTuple):
    """A frame, its objects' names and boxes in pixels, and the names of all objects of its clip."""

    image: Image
    names: list[Phrase]
    boxes: list[Box]
    clip: list[Phrase]

    def mixed(self) -> list[Phrase]:
        """The clip's names, and each kind in the colour of the name before: most of these fit nothing."""
        shifted = zip(self.clip, self.clip[1:] + self.clip[:1], strict=True)
        return list(dict.fromkeys([*self.clip, *(Phrase(b.kind, a.colours) for a, b in shifted)]))


class Tally:
    """Truth and detections as pycocotools reads them."""

    def __init__(self, categories: Sequence[str] = (ASKED,)) -> None:
        self._numbers = {name: i for i, name in enumerate(categories, start=1)}
        self._images: list[dict[str, Any]] = []
        self._truth: list[dict[str, Any]] = []
        self._found: list[dict[str, Any]] = []

    def add(self, truth: Sequence[tuple[str, Box]], found: Sequence[tuple[str, Box, float]]) -> None:
        """What is on one image, by category; truth of other categories is left out."""
        image = len(self._images) + 1
        self._images.append({"id": image})
        for name, box in truth:
            if name in self._numbers:
                row = {"id": len(self._truth) + 1, "area": _sized(box)[2] * _sized(box)[3], "iscrowd": 0}
                self._truth.append({**row, **self._at(image, name, box)})
        self._found += [{**self._at(image, name, box), "score": score} for name, box, score in found]

    def _at(self, image: int, name: str, box: Box) -> dict[str, Any]:
        return {"image_id": image, "category_id": self._numbers[name], "bbox": _sized(box)}

    def figures(self, *, by_category: bool = True) -> dict[str, float]:
        """AP over IoU 0.5 to 0.95; AP50; recall with 100 boxes; the best F1 at IoU 0.5 of all categories together
        and its score. All 0 where nothing was found.
        """
        if not self._found:
            return dict.fromkeys(("AP", "AP50", "recall", "F1", "score"), 0.0)
        with contextlib.redirect_stdout(io.StringIO()):
            run = self._evaluated(by_category)
            run.summarize()
            pooled = run if not by_category else self._evaluated(False)
        stats = {"AP": run.stats[0], "AP50": run.stats[1], "recall": run.stats[8]}
        return {name: float(value) for name, value in stats.items()} | _best_point(pooled)

    def _evaluated(self, by_category: bool) -> Any:
        """A COCOeval that has accumulated."""
        api = require("pycocotools.coco", "dev")
        truth = api.COCO()
        categories = [{"id": number, "name": name} for name, number in self._numbers.items()]
        truth.dataset = {"images": self._images, "annotations": self._truth, "categories": categories}
        truth.createIndex()
        found = truth.loadRes([dict(row) for row in self._found])
        run = require("pycocotools.cocoeval", "dev").COCOeval(truth, found, "bbox")
        run.params.useCats = int(by_category)
        run.evaluate()
        run.accumulate()
        return run


def check(folder: Path, scenes: Path, every: int, size: int, sheet: Path) -> None:
    """Print figures of the weights in a folder on every so many frames of the clips in another; draw a sheet."""
    detector = load_detector("yolo-world", folder, image_size=size)
    known = Vocabulary.load(folder / VOCABULARY)
    truths = list(read_truths(scenes, every))
    for line in report(detector, known, truths):
        print(line, flush=True)
    chosen = truths[:: -(-len(truths) // SHOWN)]
    found = [detect(detector, truth.image, _known(known, truth.clip), SHOWN_SCORE) for truth in chosen]
    draw_sheet(sheet, [(truth.image, each) for truth, each in zip(chosen, found, strict=True)])
    print(f"{len(chosen)} of {len(truths)} frames with what was found: {sheet}", flush=True)


def read_truths(scenes: Path, every: int) -> Iterator[Truth]:
    """Every so many frames of each clip in a folder."""
    for clip_name in list_clips(scenes):
        clip = read_clip(scenes, clip_name)
        names = names_of(clip)
        for frame in range(0, len(clip), every):
            image = clip.image(frame)
            boxes = boxes_of(clip.labels(frame), names, image.shape[1] / SIZE[1])
            seen = [names[number] for number in boxes]
            yield Truth(image, seen, list(boxes.values()), list(dict.fromkeys(names.values())))


def report(detector: Detector, known: Vocabulary, truths: Sequence[Truth]) -> Iterator[str]:
    """Lines of a table. Of what the vocabulary does not know nothing is asked."""
    yield f"{len(truths)} frames, {sum(len(truth.boxes) for truth in truths)} objects"
    columns = ("AP", "AP50", "recall", "F1", "score")
    yield f"{'asked':40}" + "".join(f"{name:>8}" for name in columns)
    kinds = _kinds(detector, known, truths)
    rows = {
        "kinds": kinds.figures(),
        "kinds, whichever": kinds.figures(by_category=False),
        "names in the clip, and recombined": _phrases(detector, known, truths, Truth.mixed).figures(),
        ANYTHING: _phrases(detector, known, truths, lambda truth: [Phrase(ANYTHING)]).figures(),
    }
    for title, figures in rows.items():
        yield f"{title:40}" + "".join(f"{figures[name]:8.3f}" for name in columns)


def detect(detector: Detector, image: Image, phrases: Sequence[str], threshold: float) -> list[Detection]:
    """What answers phrases in a frame; nothing where there are none."""
    return detector.detect(image, detector.prepare(list(phrases)), threshold) if phrases else []


def _kinds(detector: Detector, known: Vocabulary, truths: Sequence[Truth]) -> Tally:
    """All kinds that are there, asked at once."""
    kinds = _known(known, sorted({Phrase(name.kind) for truth in truths for name in truth.clip}, key=str))
    tally = Tally(kinds)
    for truth in truths:
        found = detect(detector, truth.image, kinds, LEAST)
        objects = [(name.kind, box) for name, box in zip(truth.names, truth.boxes, strict=True)]
        tally.add(objects, [(each.label, each.box, each.score) for each in found])
    return tally


def _phrases(
    detector: Detector, known: Vocabulary, truths: Sequence[Truth], asked: Callable[[Truth], list[Phrase]]
) -> Tally:
    """Each phrase on each frame as an image of its own, so that scores are compared across phrases."""
    tally = Tally()
    for truth in truths:
        phrases = [phrase for phrase in asked(truth) if str(phrase) in known]
        found = detect(detector, truth.image, _known(known, phrases), LEAST)
        for phrase in phrases:
            fitting = zip(truth.names, truth.boxes, strict=True)
            objects = [(ASKED, box) for name, box in fitting if phrase.describes(name)]
            tally.add(objects, [(ASKED, each.box, each.score) for each in found if each.label == str(phrase)])
    return tally


def _known(known: Vocabulary, phrases: Sequence[Phrase]) -> list[str]:
    return [str(phrase) for phrase in phrases if str(phrase) in known]


def _sized(box: Box) -> list[float]:
    """x0 y0 x1 y1 -> x, y, width, height."""
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _best_point(run: Any) -> dict[str, float]:
    """The best F1 at IoU 0.5 among all scores, and the score that it is reached at."""
    precision, scores = (run.eval[name][0, :, 0, 0, -1] for name in ("precision", "scores"))
    recall = run.params.recThrs
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-9)
    best = int(f1.argmax())
    return {"F1": float(f1[best]), "score": float(scores[best])}
