"""Score what happens to objects that go out of view and come back, on rendered clips with their truth.

    python -m tools.bench.accuracy.returns out/scenes/returns              objects are added by a box when they come
    python -m tools.bench.accuracy.returns out/scenes/returns --by names   the detector finds them by kind

FOLDER is made by `python -m tools.scenes --split test --scenario leave=4,occlusion=3,lookalike=3 --seed 57 --clips 40
--frames 144 --size 480x360 --fps 12 -o out/scenes/returns`. Frames go through the pipeline one after another, with the
clip's own time stamps. A mask is right if its IoU with the object is at least 0.5.

An id stands for the object whose mask it had first. An absence counts if the object was tracked under its own id
before, then had less than 0.1 % of the image for half a second, and was visible for a second after that. It is over
well if that id is right on at least half of the frames from half a second to two seconds after the return.

A recall is the event `recalled` of the node. It is false if less than half of the mask of that frame lies on the object
that the id stands for, and it is of another object if that one has more of it.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.publish import frame_from
from sam3_node.detection.detectors import Detector, prepare_prompts
from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_configured_detector, load_model
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.step import StepFrame
from sam3_node.replay.name_calibration import knows
from sam3_node.settings import DetectorSettings, ModelSettings, TrackerSettings
from sam3_node.types import NANOSECONDS, Instance, Mask
from sam3_node.wire import RECALLED
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import Figures, make_parser
from tools.command import errors_in_one_line
from tools.doubt.names import CAMERA
from tools.mot import MATCH, MotFrame, MotScorer, TrueClip, mask_iou, open_clips, total

ABSENT_S = 0.5
"""Shortest time out of view that counts as an absence."""
PRESENT_S = 1.0
"""Shortest time in view after it."""
SETTLE_S = 0.5
"""Time after a return in which any answer is right."""
JUDGED_S = 2.0
"""Time after a return up to which it is judged."""
SWAP_FRAMES = 3
"""Frames in a row on which an id has another object's mask that count as a swap."""


@dataclass
class Return:
    """An object that was out of view and is back."""

    object_id: int
    tracked_id: int
    """the id under which it was tracked rightly before"""
    first: int
    """the frame of its return"""
    right: list[bool] = field(default_factory=list)
    """of the judged frames with the object: whether the same id had its mask"""


class ReturnScorer:
    """Follows the absences of the objects of a clip, and judges recalls."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._absent: Counter[int] = Counter()
        """by object: frames out of view"""
        self._owner: dict[int, int] = {}
        """by object: the id that stands for it and had its mask last"""
        self._stands_for: dict[int, int] = {}
        """by id: the object whose mask it had first"""
        self._strangers: Counter[tuple[int, int]] = Counter()
        """frames in a row on which an id had the mask of another object than it stood for"""
        self._under_way: list[Return] = []
        self.returns: list[Return] = []
        self.recalls = 0
        self.false_recalls = 0
        self.recalls_of_others = 0
        self.swaps = 0
        self._recalled: set[int] = set()
        self.swaps_of_recalled = 0

    def add(self, index: int, frame: MotFrame, instances: tuple[Instance, ...], recalled: list[int]) -> None:
        """Add one frame with the ids that came back by their looks on it."""
        shown = [each for each in instances if each.state == "tracked" and each.area]
        pairs = {
            (object_id, each.id)
            for object_id, truth in frame.counted.items()
            for each in shown
            if mask_iou(each, truth) >= MATCH
        }
        for object_id, tracked in sorted(pairs):
            self._stands_for.setdefault(tracked, object_id)
        self._judge_recalls(frame, {each.id: each for each in shown}, recalled)
        self._count_swaps(pairs)
        for object_id in frame.counted:
            hits = [tracked for owner, tracked in pairs if owner == object_id]
            if self._absent[object_id] >= ABSENT_S * self._fps and object_id in self._owner:
                self._under_way.append(Return(object_id, self._owner[object_id], index))
            self._absent[object_id] = 0
            for back in self._under_way:
                if back.object_id == object_id and index >= back.first + SETTLE_S * self._fps:
                    back.right.append(back.tracked_id in hits)
            own = [tracked for tracked in hits if self._stands_for[tracked] == object_id]
            if own and self._owner.get(object_id) not in own and not self._is_judged(object_id):
                self._owner[object_id] = own[0]
        self._count_absent(index, frame)

    def _is_judged(self, object_id: int) -> bool:
        return any(back.object_id == object_id for back in self._under_way)

    def _judge_recalls(self, frame: MotFrame, shown: dict[int, Instance], recalled: list[int]) -> None:
        for tracked in recalled:
            self.recalls += 1
            self._recalled.add(tracked)
            instance = shown.get(tracked)
            if instance is None:
                self.false_recalls += 1
                continue
            x0, y0, x1, y1 = instance.box
            shares = Counter[int]()
            for object_id, truth in {**frame.slivers, **frame.counted}.items():
                shares[object_id] = int(np.count_nonzero(instance.mask.crop & truth[y0:y1, x0:x1]))
            own = shares[self._stands_for.get(tracked, 0)]
            self.false_recalls += bool(own < 0.5 * instance.area)
            self.recalls_of_others += bool(own < max(shares.values(), default=0))

    def _count_swaps(self, pairs: set[tuple[int, int]]) -> None:
        """Count the ids that have had another object's mask for some frames in a row."""
        strangers: Counter[tuple[int, int]] = Counter()
        for object_id, tracked in pairs:
            if self._stands_for.get(tracked, object_id) != object_id:
                strangers[object_id, tracked] = self._strangers[object_id, tracked] + 1
                if strangers[object_id, tracked] == SWAP_FRAMES:
                    self.swaps += 1
                    self.swaps_of_recalled += tracked in self._recalled
        self._strangers = strangers

    def _count_absent(self, index: int, frame: MotFrame) -> None:
        """Count absences, and end the judgement of returns that are complete, or broken off."""
        for object_id in self._owner:
            if object_id not in frame.counted:
                self._absent[object_id] += 1
        for back in list(self._under_way):
            gone = back.object_id not in frame.counted
            if not gone and index < back.first + JUDGED_S * self._fps:
                continue
            self._under_way.remove(back)
            if index - back.first >= PRESENT_S * self._fps and back.right:
                self.returns.append(back)

    def close(self, index: int) -> None:
        """Judge the returns that the clip's end broke off."""
        for back in self._under_way:
            if index - back.first >= PRESENT_S * self._fps and back.right:
                self.returns.append(back)
        self._under_way = []


def play(
    truth: TrueClip, pipeline: Pipeline, by_names: bool, max_frames: int
) -> Iterator[tuple[int, MotFrame, tuple[Instance, ...], list[int]]]:
    """Yield the frames of a clip with the pipeline's instances, and the ids that came back by their looks."""
    added: set[int] = set()
    for index, frame in enumerate(truth.frames(max_frames)):
        image = CapturedImage(frame.image, round(index * NANOSECONDS / truth.fps))
        step = StepFrame(frame_from(image, index, CAMERA))
        masks = pipeline.step(step)
        recalled = [event.id for event in step.events if event.op == RECALLED]
        yield index, frame, masks.instances, recalled
        if by_names:
            continue
        for object_id, true_mask in frame.counted.items():
            if object_id not in added and len(added) < pipeline.registry.capacity:
                box = FramePrompt(box=Mask.from_full(true_mask).box)
                pipeline.add(box, truth.named[object_id], seq=index)
                added.add(object_id)


class ClipResult(NamedTuple):
    """The scorers of one clip."""

    scenario: str
    scorer: ReturnScorer
    identity: MotScorer
    frames: int


def evaluate(
    clips: list[TrueClip],
    model: TrackerModel,
    detector: Detector | None,
    settings: tuple[TrackerSettings, DetectorSettings],
    max_frames: int,
) -> list[ClipResult]:
    """Return the results of all clips."""
    results = []
    for truth in clips:
        pipeline = Pipeline(model, settings[0], "cam0", detector, settings[1])
        if detector is not None:
            pipeline.set_prompts(prepare_prompts(detector, truth.prompts, settings[1].score))
        scorer = ReturnScorer(truth.fps)
        identity = MotScorer(truth.named)
        index = 0
        for index, frame, instances, recalled in play(truth, pipeline, detector is not None, max_frames):
            scorer.add(index, frame, instances, recalled)
            identity.add(frame, instances)
        scorer.close(index)
        back = [np.mean(each.right) >= 0.5 for each in scorer.returns]
        scenario = str(truth.clip.meta.get("scenario", ""))
        print(
            f"{truth.clip.name} {scenario}: back {sum(back)} of {len(back)}, recalls {scorer.recalls}, false "
            f"{scorer.false_recalls}, swaps {scorer.swaps}",
            flush=True,
        )
        results.append(ClipResult(scenario, scorer, identity, index + 1))
    return results


def keep_figures(what: str, results: list[ClipResult], fps: float, figures: Figures) -> None:
    """Keep the figures of some clips with one setting."""
    scorers = [result.scorer for result in results]
    returns = [back for scorer in scorers for back in scorer.returns]
    back = sum(float(np.mean(each.right)) >= 0.5 for each in returns)
    recalls = sum(scorer.recalls for scorer in scorers)
    score = total([result.identity for result in results], sum(result.frames for result in results), fps)
    figures.add(f"absences, {what}", len(returns), "")
    figures.add(f"back after an absence, {what}", 100 * back / max(1, len(returns)), "%", target="80")
    figures.add(f"recalls by looks, {what}", recalls, "")
    false = sum(scorer.false_recalls for scorer in scorers)
    figures.add(f"false recalls, {what}", 100 * false / max(1, recalls), "%", target="2")
    others = sum(scorer.recalls_of_others for scorer in scorers)
    figures.add(f"recalls of another object, {what}", others, "", target="0")
    figures.add(f"swaps, {what}", sum(scorer.swaps for scorer in scorers), "")
    figures.add(f"swaps of recalled ids, {what}", sum(s.swaps_of_recalled for s in scorers), "", target="0")
    figures.add(f"IDF1, {what}", score.idf1, "IDF1", target="0.85")
    figures.add(f"MOTA, {what}", score.mota, "MOTA")


def main() -> None:
    parser = make_parser(__doc__, model="nano", threads=0)
    parser.add_argument("path", type=Path, metavar="FOLDER", help="rendered clips with names")
    parser.add_argument("--by", choices=("box", "names"), default="box", help="how objects are found")
    parser.add_argument("--size", type=int, default=0, help="as model.image_size")
    parser.add_argument("--names", choices=("kind", "name"), default="kind", help="'mug' or 'red mug'")
    parser.add_argument("--recall", choices=("on", "off", "both"), default="both", help="as tracker.recall")
    parser.add_argument(
        "--scenario", default="", help="clips of this scenario alone, such as leave; empty: all"
    )
    parser.add_argument("--clips", type=int, default=0, help="number of first clips; 0: all")
    parser.add_argument("--frames", type=int, default=0, help="number of first frames of each clip; 0: all")
    args: argparse.Namespace = parser.parse_args()
    figures = Figures("accuracy.returns")
    with errors_in_one_line():
        models = ModelSettings.model_validate(
            {"name": args.model, "threads": args.threads, "image_size": args.size}
        )
        model = load_model(models, TrackerSettings())
        detection = DetectorSettings()
        detector = load_configured_detector(detection, models) if args.by == "names" else None
        can_find = (lambda _: True) if detector is None else partial(knows, detector)
        clips = [clip for clip in open_clips(args.path, can_find, args.names) if clip.named]
        if args.scenario:
            clips = [clip for clip in clips if clip.clip.meta.get("scenario") == args.scenario]
        clips = clips[: args.clips or None]
        for recall in (True, False) if args.recall == "both" else (args.recall == "on",):
            tracker = TrackerSettings(recall=recall)
            results = evaluate(clips, model, detector, (tracker, detection), args.frames)
            with_what = f"{model.name} by {args.by}, recall {'on' if recall else 'off'}"
            for scenario in sorted({result.scenario for result in results}):
                of_scenario = [result for result in results if result.scenario == scenario]
                keep_figures(f"{scenario}, {with_what}", of_scenario, clips[0].fps, figures)
            if not args.scenario:
                keep_figures(f"all clips, {with_what}", results, clips[0].fps, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
