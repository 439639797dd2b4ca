"""Measure J of the masks that a policy holds at each moment of a live camera, beside J of a replay of the same frames.

    python -m tools.bench.accuracy.streaming [--model nano] [--sizes 256,160] [--objects 1,4] [--runs 3]
    python -m tools.bench.accuracy.streaming FOLDER --fps 24      clips in DAVIS' layout, at this rate

A camera plays each clip at its own rate over a socket, a node process tracks, and this process subscribes. Objects are
prompted by their true masks on the first frame, before the clock starts. The capture of each later frame is a moment:
the newest masks that have arrived by then count, against the truth of that moment (streaming accuracy: Li, Wang and
Ramanan, "Towards Streaming Perception", ECCV 2020). "VOT's rule" also takes masks that arrive until the next frame does
(real-time experiment: Kristan et al., "The Visual Object Tracking VOT2017 Challenge Results", ICCVW 2017). "moved" is
`masks.moved_to(moment)`. Offline, the pipeline steps through every frame. J is the mean over the moments of an object,
then over the objects. With depth, the true position is what the same stage measures under the true mask.
"""

import argparse
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.sources import open_camera
from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_model
from sam3_node.perception.pipeline import Pipeline
from sam3_node.resources import Closeable
from sam3_node.settings import CameraSettings, ModelSettings, TrackerSettings
from sam3_node.transport import FramePublisher
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.measuring import Measuring
from tools.bench.common import SHARED, Figures, make_parser, objects_text
from tools.bench.processes import Processes, next_masks
from tools.command import errors_in_one_line
from tools.vos.metrics import region_similarity
from tools.vos.sequences import TrueFrame, open_sequences

KINDS = OFFLINE, STREAMING, MOVED, VOT = (
    "offline",
    "streaming",
    "streaming and moved",
    "streaming by VOT's rule",
)
CAMERA = "bench"
CONNECT_MS = 60_000
SUBSCRIBE_S = 0.3
RESEND_S = 2.0
CACHE_S = "30"
"""The node keeps the first frame for its prompts for this long."""
TAIL_MS = 1000
"""Time without masks after which a clip has been played."""
DAVIS = [folder for folder in [SHARED / "data/davis"] if folder.is_dir()]


Arrival = tuple[int, MaskFrame]
"""The Unix time at which the subscriber had masks, and these."""


class Played(NamedTuple):
    """A clip as the node saw it: its frames with their captures, and the arrivals. Instances have the truth's ids."""

    frames: list[Frame]
    arrivals: list[Arrival]


class Scores:
    """Scores of the moments of some clips, by kind of mask."""

    def __init__(self) -> None:
        self.j: defaultdict[str, list[float]] = defaultdict(list)
        """of each object"""
        self.errors_mm: defaultdict[str, list[float]] = defaultdict(list)
        self.ages_ms: list[float] = []
        self.seconds = self.processed = 0.0

    def add(self, played: Played, offline: Sequence[MaskFrame], truth: Iterator[TrueFrame]) -> None:
        """Judge each moment of a clip but the first, on which objects are prompted."""
        frames, arrivals = played
        captures = [frame.capture_ns for frame in frames]
        ends = [*captures[1:], 2 * captures[-1] - captures[-2]]
        scores: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        stage = Measuring()
        for index, true in islice(enumerate(truth), 1, None):
            now_ns = captures[index]
            newest = find_newest(arrivals, now_ns)
            self.ages_ms.append((now_ns - newest.capture_ns) / 1e6)
            held = {
                STREAMING: newest,
                MOVED: newest.moved_to(now_ns).masks,
                VOT: find_newest(arrivals, ends[index]),
                OFFLINE: offline[index],
            }
            reference = measure_truth(stage, frames[index], true, newest)
            for kind, masks in held.items():
                for item in masks.instances:
                    mask = item.mask.full()
                    truth_mask = true.truth(item.id)
                    scores[kind, item.id].append(region_similarity(mask, truth_mask, true.void))
                    place = reference.get(item.id)
                    if place is not None and item.position_m is not None:
                        self.errors_mm[kind].append(1000 * float(np.linalg.norm(place - item.position_m)))
        for (kind, _), values in scores.items():
            self.j[kind].append(statistics.mean(values))
        self.seconds += (ends[-1] - captures[1]) / 1e9
        self.processed += len(arrivals) - 1


def find_newest(arrivals: Sequence[Arrival], now_ns: int) -> MaskFrame:
    """Return the masks that arrived last by a time; the first, which are of the prompts, arrive before all times."""
    return next((masks for ns, masks in reversed(arrivals) if ns <= now_ns), arrivals[0][1])


def measure_truth(
    stage: Measuring, frame: Frame, true: TrueFrame, masks: MaskFrame
) -> Mapping[int, np.ndarray]:
    """Return the position [3] of each object under its true mask, in metres; none without depth."""
    if frame.depth is None:
        return {}
    exact = [
        replace(item, mask=Mask.from_full(true.truth(item.id)), state="tracked", position_m=None)
        for item in masks.instances
    ]
    measured = stage.measure(frame, exact, None).instances
    return {item.id: np.array(item.position_m) for item in measured if item.position_m is not None}


def choose_objects(first: TrueFrame, count: int) -> dict[int, Mask]:
    """Return the largest `count` objects of a first frame by their ids; none if it has fewer."""
    ids = sorted(first.masks, key=lambda object_id: -int(first.masks[object_id].sum()))[:count]
    return {object_id: Mask.from_full(first.masks[object_id]) for object_id in ids if len(ids) == count}


def rename(masks: MaskFrame, ids: Mapping[int, int]) -> MaskFrame:
    """Return masks whose instances have the truth's ids."""
    known = tuple(replace(item, id=ids[item.id]) for item in masks.instances if item.id in ids)
    return replace(masks, instances=known, before=masks.before and rename(masks.before, ids))


class Rig(Closeable):
    """A node process, with the camera and the subscriber in this process. It plays clips one after another."""

    def __init__(self, processes: Processes, fps: float) -> None:
        self._fps = fps
        self._seq = 0
        self._publisher = FramePublisher(processes.frames)
        processes.start("run")
        self._client = processes.client()
        self._publisher.wait_for_peer(CONNECT_MS)
        time.sleep(SUBSCRIBE_S)

    def close(self) -> None:
        self._client.close()
        self._publisher.close()

    def play(self, uri: str, length: int, prompts: Mapping[int, Mask]) -> Played:
        """Play the first `length` frames of a source; its clock starts once the `prompts` are tracked."""
        sent: list[Frame] = []
        seen = threading.Event()
        prompted = threading.Event()
        begin = self._seq
        camera = threading.Thread(target=self._run_camera, args=(uri, length, sent, seen, prompted))
        camera.start()
        try:
            while (masks := next_masks(self._client)).seq < begin:
                pass
            seen.set()
            added = {key: self._client.add_object(mask=mask, seq=masks.seq) for key, mask in prompts.items()}
        finally:
            seen.set()
            prompted.set()
        ids = {each.id: key for key, each in added.items()}
        first = tuple(
            Instance(key, "", 1.0, "tracked", 1, 0, each.segmentation.mask)
            for key, each in added.items()
            if each.segmentation is not None
        )
        arrivals: list[Arrival] = [(0, replace(masks, instances=first))]
        newer: MaskFrame | None = masks
        while camera.is_alive() or newer is not None:
            newer = self._client.latest(timeout_ms=TAIL_MS)
            if newer is not None:
                arrivals.append((time.time_ns(), rename(newer, ids)))
        self._client.reset()
        return Played(sent, arrivals)

    def _run_camera(
        self, uri: str, length: int, sent: list[Frame], seen: threading.Event, prompted: threading.Event
    ) -> None:
        """Publish the images of a source at its pace, as a camera process does, but wait at the first."""
        settings = CameraSettings(name=CAMERA, fps=0 if uri.startswith("bag:") else self._fps)
        with closing(open_camera(uri, settings)) as source:
            for image in islice(source, length):
                sent.append(self._send(frame_from(image, self._seq, settings)))
                while not seen.wait(RESEND_S):  # a busy node withholds masks that have become too old
                    sent[0] = self._send(replace(sent[0], seq=self._seq, capture_ns=time.time_ns()))
                prompted.wait()

    def _send(self, frame: Frame) -> Frame:
        self._seq += 1
        self._publisher.send(frame)
        return frame


def track_offline(
    model: TrackerModel, frames: Sequence[Frame], prompts: Mapping[int, Mask], tracker: TrackerSettings
) -> list[MaskFrame]:
    """Step through every frame, as a replay does, with the prompts on the first; return their masks."""
    pipeline = Pipeline(model, tracker, CAMERA)
    found = [pipeline.step(frames[0])]
    ids = {pipeline.add(FramePrompt(mask=mask), seq=frames[0].seq).id: key for key, mask in prompts.items()}
    found += [pipeline.step(frame) for frame in frames[1:]]
    return [rename(masks, ids) for masks in found]


def measure(
    path: Path, chosen: dict[str, Any], window: str, objects: int, args: argparse.Namespace
) -> list[Scores]:
    """Return the scores of each run over the clips that have so many objects."""
    runs = [Scores() for _ in range(args.runs)]
    tracker = TrackerSettings.model_validate({"window": window})
    settings = {f"SAM3_MODEL__{name.upper()}": str(value) for name, value in chosen.items()}
    settings |= {"SAM3_DETECTOR__KIND": "none", "SAM3_TRACKER__FEATURE_CACHE_S": CACHE_S}
    settings["SAM3_TRACKER__WINDOW"] = window
    clips = [
        (sequence, prompts)
        for sequence in open_sequences(path, max_frames=args.frames)
        if (prompts := choose_objects(next(sequence.frames()), objects))
    ]
    if not clips:
        return runs
    model = load_model(ModelSettings.model_validate(chosen), tracker)
    with Processes(**settings) as processes, Rig(processes, args.fps) as rig:
        for sequence, prompts in clips:
            uri = f"bag:{path}" if path.is_file() else f"images:{path}/JPEGImages/{sequence.name}"
            played = [rig.play(uri, sequence.length, prompts) for _ in runs]
            offline = track_offline(model, played[0].frames, prompts, tracker)
            for scores, each in zip(runs, played, strict=True):
                scores.add(each, offline, sequence.frames())
            print(f"{sequence.name}: {objects_text(objects)}", file=sys.stderr)
    return runs


def report(what: str, runs: Sequence[Scores], figures: Figures) -> None:
    """Keep the figures of one set of clips."""
    for kind in KINDS:
        figures.add(f"J {kind}, {what}", [statistics.mean(run.j[kind]) for run in runs], "J")
    for kind in KINDS:
        if runs[0].errors_mm[kind]:
            errors = [statistics.median(run.errors_mm[kind]) for run in runs]
            figures.add(f"error of the position {kind}, median, {what}", errors, "mm")
    gains = [statistics.mean(run.j[MOVED]) - statistics.mean(run.j[STREAMING]) for run in runs]
    figures.add(f"gain of moved_to, {what}", gains, "J")
    figures.add(
        f"age of the masks held, median, {what}", [statistics.median(run.ages_ms) for run in runs], "ms"
    )
    figures.add(f"frames processed, {what}", [run.processed / run.seconds for run in runs], "frames/s")


def main() -> None:
    parser = make_parser(__doc__, runs=3, model="nano")
    paths = [TABLETOP, *DAVIS]
    parser.add_argument("paths", type=Path, nargs="*", default=paths, help="recordings, or folders of clips")
    parser.add_argument("--fps", type=float, default=24.0, help="rate of folders; a recording has its own")
    parser.add_argument("--sizes", default="0", help="sizes of model.image_size; 0: the model's own")
    parser.add_argument("--objects", default="1,4", help="numbers of objects; the largest are tracked")
    parser.add_argument("--windows", default="off", help="values of tracker.window, such as off,auto")
    parser.add_argument("--frames", type=int, default=0, help="number of first frames of each clip; 0: all")
    args = parser.parse_args()
    figures = Figures("accuracy.streaming")
    sizes, counts = (map(int, text.split(",")) for text in (args.sizes, args.objects))
    with errors_in_one_line():
        for path, size, objects, window in product(args.paths, sizes, counts, args.windows.split(",")):
            chosen = {"name": args.model, "image_size": size}
            runs = measure(path, chosen, window, objects, args)
            if runs[0].j:
                pixels = f"{size} px" if size else "its own size"
                what = f"{path.stem}, {Path(args.model).name} at {pixels}, {objects_text(objects)}"
                if window != "off":
                    what += f", windows {window}"
                report(what, runs, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
