"""The demonstration: camera process -> ZeroMQ -> node process -> ZeroMQ -> this process, on a recorded scene.

It prompts for the objects by their names in the recording. After some seconds it adds the missing objects by boxes, as
soon as they are in view. If the node has no detector, it adds all objects by boxes. The boxes come from the true masks
of the recording, on the frame of the latest message. The results are a table, a video, a contact sheet, a picture of
the best frame, a bag and a summary.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from ..bags import LabelledClip, RecordingWriter
from ..cameras.playback import TABLETOP
from ..client import PerceptionClient
from ..errors import ProcessError, UnknownFrameError
from ..files import prepare_output, write_output
from ..processes.logs import announce
from ..processes.supervisor import CAMERA_READY, NODE_READY, Group, Process
from ..settings import CameraSettings, RobotSettings, Settings, SpatialSettings, TransportSettings
from ..types import NANOSECONDS, Image, Mask, MaskFrame
from ..visualization import VideoWriter, contact_sheet, overlay, write_image
from ..wire import pack_masks
from .machine_load import LoadMeter

SOURCE = "scene:tabletop"
CAMERA = "cam0"
ANY_PORT = "tcp://127.0.0.1:*"
READY_S = 180.0
"""Longest time until a process is ready. A first start may build or load much."""
SILENCE_S = 20.0
"""Longest time without any masks, at the start and beyond the expected end."""
MIN_PIXELS = 150
"""Pixels from which on an object counts as in view."""
MIN_FRACTION = 0.25
"""The same, as a share of the object's largest mask in the recording."""
MAX_SLOWDOWN = 3.0
"""Multiple of the recording's duration after which the demonstration gives up."""
NAME_SEARCH_S = 3.0
"""Seconds of the search by name. Objects without a detection are then added by boxes."""
SHEET_IMAGES = 9
"""Pictures on the contact sheet."""
SHEET_COLUMNS = 3
FULL_RATE = 0.9
"""Share of the camera's rate from which on the demonstration counts as having kept it."""
BUSY_SHARE = 0.2
"""Share of the processors' time, used by other programs, from which on they may have cost the demonstration frames."""
FILES = "overlay.mp4, contact.png, picture.jpg, masks.mcap and summary.json"


def run_demo(out: Path, seconds: float | None, settings: Settings) -> DemoResults:
    """Run for `seconds` (None: the recording once), and write the FILES.

    They are written to the folder `out`. `settings` names model, tracker and detector. Raises ProcessError,
    with the last lines of output, when a process ends or no masks arrive; OutputError when `out` cannot be written; and
    BagError for a damaged recording.
    """
    # an output that cannot be written is an error before anything is started
    prepare_output(out / "overlay.mp4")
    recording = LabelledClip.load(TABLETOP)
    frames = len(recording)
    if seconds is not None:
        frames = max(2, round(seconds * recording.fps))
    duration_s = frames / recording.fps
    announce(f"demo: {SOURCE} at {recording.fps:.0f} fps for {duration_s:.0f} s; each part is a process")
    load = LoadMeter()
    with tempfile.TemporaryDirectory(prefix="sam3-demo-") as folder, Group(echo=announce) as group:
        frames_endpoint = f"ipc://{folder}/frames"
        # without the library that reads it, the robot is left out
        robot_endpoint = ""
        if importlib.util.find_spec("yourdfpy"):
            robot_endpoint = f"ipc://{folder}/robot"
        masks_endpoint, control_endpoint = _start_node(group, settings, frames_endpoint, robot_endpoint)
        with PerceptionClient(masks_endpoint, control_endpoint, timeout_ms=10_000) as client:
            # start the camera after the node, so that the node receives the first frame of the recording
            _start_camera(group, frames_endpoint, robot_endpoint)
            # without a detector, nothing is found by name
            prompter: BoxPrompter
            if settings.detector.kind == "none":
                prompter = BoxPrompter(recording, client)
            else:
                prompter = NamePrompter(recording, client)
            results = _collect(group, client, prompter, frames)
    # the group's processes have ended, so their time counts as own
    results.others_share = load.measure_others()
    announce("drawing the results ...")
    write_results(out, results)
    announce(results.table())
    busy = results.describe_load()
    if busy is not None:
        announce(busy)
    announce(f"wrote {FILES} to {out}")
    announce("click on objects yourself: launch/start launch/demo.toml, then open the page that it prints")
    return results


def _start_node(
    group: Group, settings: Settings, frames_endpoint: str, robot_endpoint: str
) -> tuple[str, str]:
    """Start the node on free ports of this machine. Return its masks and control endpoints."""
    robot = settings.robot
    spatial = settings.spatial
    # the arm of the recorded scene; its base is the camera, which stands still
    if robot_endpoint:
        robot = RobotSettings(urdf=TABLETOP.with_suffix(".urdf"), base="camera")
        spatial = SpatialSettings(calibration=(TABLETOP.with_suffix(".toml"),), poses=robot_endpoint)
    transport = TransportSettings(frames=(frames_endpoint,), masks=ANY_PORT, control=ANY_PORT)
    environment = make_environment(
        transport=transport,
        model=settings.model,
        engine=settings.engine,
        tracker=settings.tracker,
        detector=settings.detector,
        robot=robot,
        spatial=spatial,
    )
    group.start(Process("node", _make_command("run"), NODE_READY, environment))
    ready = group.wait_ready("node", READY_S)
    return ready.group(1), ready.group(2)


def _start_camera(group: Group, frames_endpoint: str, robot_endpoint: str) -> None:
    """Start the camera. It publishes the recording in a loop, as jpeg like the recorded frames, with its robot."""
    camera = CameraSettings(source=SOURCE, name=CAMERA, encoding="jpeg", loop=True, robot=robot_endpoint)
    environment = make_environment(transport=TransportSettings(frames=(frames_endpoint,)), camera=camera)
    group.start(Process("camera", _make_command("camera"), CAMERA_READY, environment))
    group.wait_ready("camera", READY_S)


def _make_command(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", "sam3_node", name


def make_environment(**sections: BaseModel) -> dict[str, str]:
    """Return sections of the settings as environment variables of a process."""
    return {f"SAM3_{name}".upper(): section.model_dump_json() for name, section in sections.items()}


def _collect(group: Group, client: PerceptionClient, prompter: BoxPrompter, frames: int) -> DemoResults:
    """Receive masks and prompt for objects until the camera has published `frames` frames."""
    recording = prompter.recording
    received: list[MaskFrame] = []
    status = client.status()
    start = time.monotonic()
    deadline = start + MAX_SLOWDOWN * frames / recording.fps + SILENCE_S
    due_s = 1.0  # of the next line of progress
    while not received or received[-1].seq < frames - 1:
        # a process that has ended raises here, with its last lines
        group.check()
        masks = client.latest(200)
        if masks is not None:
            # the camera plays in a loop: the next round is none of the frames that were asked for
            if received and masks.seq >= frames:
                break
            received.append(masks)
            prompter.update(masks)
            elapsed_s = time.monotonic() - start
            if elapsed_s >= due_s:
                due_s = elapsed_s + 1.0
                _print_progress(masks, len(received), elapsed_s)
        elif time.monotonic() > deadline or (not received and time.monotonic() > start + SILENCE_S):
            raise ProcessError(
                f"expected masks of {frames} camera frames, found {len(received)} messages; see above"
            )
    return DemoResults(recording, received, prompter.truth_ids, prompter.prompted_at, prompter.events, status)


def _print_progress(masks: MaskFrame, count: int, elapsed_s: float) -> None:
    age_ms = (masks.published_ns - masks.age_origin_ns) / 1e6
    ids = " ".join(str(instance.id) for instance in masks.instances) or "none"
    announce(f"{elapsed_s:5.1f} s  {count} mask messages  capture to publish {age_ms:.0f} ms  objects {ids}")


class BoxPrompter:
    """A prompter that adds each object of the recording once, by its true box, when it is in view.

    `truth_ids`, `prompted_at` and `events` are the fields of DemoResults.
    """

    def __init__(self, recording: LabelledClip, client: PerceptionClient) -> None:
        self.recording = recording
        self.truth_ids: dict[int, int] = {}
        self.prompted_at: dict[int, int] = {}
        self.events: list[tuple[int, str]] = []
        self._client = client
        # objects that were not added yet
        self._waiting = dict(recording.labels)
        # an object that is partly hidden, or at the edge, is added later
        self._min_pixels = {
            truth: max(MIN_PIXELS, MIN_FRACTION * recording.areas(truth).max()) for truth in self._waiting
        }

    def update(self, masks: MaskFrame) -> None:
        """Add the objects that are in view on the frame of `masks` and not added yet. Retry failures later."""
        if not self._waiting:
            return
        # an object at the edge of the picture would be prompted by a part of it
        for truth, inside in self.recording.truth(masks.seq).items():
            if truth not in self._waiting or inside.sum() < self._min_pixels[truth]:
                continue
            label = self._waiting[truth]
            try:
                added = self._client.add_object(box=Mask.from_full(inside).box, label=label, seq=masks.seq)
            except UnknownFrameError:
                return  # the node no longer holds this frame; retry with the next message
            del self._waiting[truth]
            self.truth_ids[added.id] = truth
            self.prompted_at.setdefault(truth, masks.seq)
            self._log_event(masks.seq, f"added {added.id}, {label}, by a box")

    def _log_event(self, seq: int, text: str) -> None:
        self.events.append((seq, text))
        announce(f"frame {seq}: {text}")


class NamePrompter(BoxPrompter):
    """A prompter that names all objects at the start, with one instance of each name.

    A detection of a name counts as the object of that name. After NAME_SEARCH_S it withdraws the names without a
    detection, and adds those objects by boxes.
    """

    _search_ended = False

    def update(self, masks: MaskFrame) -> None:
        """Send the names on the first frame, register new ids, and later add missing objects by boxes."""
        if not self.prompted_at:
            self._send_names(masks.seq)
        # a new id with a name that is looked for is the object of that name
        truths = {name: truth for truth, name in self.recording.labels.items()}
        for instance in masks.instances:
            if instance.id not in self.truth_ids and instance.label in truths:
                truth = truths[instance.label]
                self.truth_ids[instance.id] = truth
                self._waiting.pop(truth, None)
                self._log_event(masks.seq, f"found {instance.id}, {instance.label}")
        if masks.seq - min(self.prompted_at.values()) >= NAME_SEARCH_S * self.recording.fps:
            self._end_search(masks.seq)
            super().update(masks)

    def _send_names(self, seq: int) -> None:
        names = self.recording.labels
        self._client.set_prompts(list(names.values()), most=dict.fromkeys(names.values(), 1))
        self.prompted_at = dict.fromkeys(names, seq)
        self._log_event(seq, f"looking for {', '.join(names.values())}")

    def _end_search(self, seq: int) -> None:
        """Withdraw the names without a detection; only the first call has an effect."""
        if self._search_ended or not self._waiting:
            return
        # names without a detection would otherwise find the object later, beside the one that was added by its box
        self._search_ended = True
        names = [name for truth, name in self.recording.labels.items() if truth not in self._waiting]
        self._client.set_prompts(names, most=dict.fromkeys(names, 1))
        self._log_event(seq, f"not found by name: {', '.join(self._waiting.values())}")


@dataclass(slots=True)
class DemoResults:
    """The received masks, in order, and the recording with the true masks.

    `truth_ids` maps object ids of the node to ids of the recording. `prompted_at` maps the latter to the seq of their
    first prompt. `events` are pairs (seq, text). `others_share` is the share of the processors' time that other
    programs used meanwhile.
    """

    recording: LabelledClip
    frames: list[MaskFrame]
    truth_ids: dict[int, int]
    prompted_at: dict[int, int]
    events: list[tuple[int, str]]
    status: dict[str, Any]
    ious: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    others_share: float | None = None

    @property
    def ids(self) -> list[int]:
        """Ids of all tracked objects."""
        found: set[int] = set()
        for masks in self.frames:
            found.update(instance.id for instance in masks.instances)
        return sorted(found)

    def score(self, masks: MaskFrame) -> float:
        """Compute the IoU with the truth of each object that is in view and was prompted on an earlier frame.

        An object without a mask scores 0. Returns the lowest IoU, or 0 if not every object of the recording has one.
        """
        ious: dict[int, float] = {}
        predicted = {self.truth_ids.get(instance.id): instance.mask for instance in masks.instances}
        for truth, inside in self.recording.truth(masks.seq).items():
            if masks.seq > self.prompted_at.get(truth, masks.seq):
                mask = np.zeros_like(inside)
                if truth in predicted:
                    mask = predicted[truth].full()
                ious[truth] = float((mask & inside).sum() / (mask | inside).sum())
                self.ious[truth].append(ious[truth])
        # a frame that shows only some of the objects is no picture of the demonstration
        if ious.keys() != self.recording.labels.keys():
            return 0.0
        return min(ious.values())

    def summary(self) -> dict[str, Any]:
        """Return the figures. Each IoU is the mean over the frames on which the object is in view."""
        ages_ns = [masks.published_ns - masks.age_origin_ns for masks in self.frames]
        # the age of masks, when they leave the node
        p50, p99 = np.percentile(ages_ns, [50, 99]) / 1e6
        span_s = (self.frames[-1].published_ns - self.frames[0].published_ns) / NANOSECONDS
        # from the first message to the last, as a watcher would count
        rate = 0.0
        if span_s > 0:
            rate = (len(self.frames) - 1) / span_s
        per_object = {truth: float(np.mean(values)) for truth, values in self.ious.items()}
        mean_iou = None
        if per_object:
            mean_iou = round(float(np.mean(list(per_object.values()))), 4)
        return {
            "frames": len(self.frames),
            "frames_per_s": round(rate, 2),
            "skipped": sum(masks.skipped for masks in self.frames[1:]),
            "age_p50_ms": round(float(p50), 2),
            "age_p99_ms": round(float(p99), 2),
            "ids": self.ids,
            "mean_iou": mean_iou,
            "objects": [self._summarise_object(truth, per_object) for truth in sorted(self.prompted_at)],
            "events": [{"seq": seq, "what": what} for seq, what in self.events],
            "model": self.status["model"],
            "stages_p50_us": self._compute_stages_us(),
            "others_cpu_share": self.others_share,
        }

    def _summarise_object(self, truth: int, ious: dict[int, float]) -> dict[str, Any]:
        """Return the figures of one object. It has several ids if it was lost and detected again."""
        ids = [object_id for object_id in self.ids if self.truth_ids.get(object_id) == truth]
        # messages in which the object was, by any of its ids
        count = 0
        for masks in self.frames:
            count += sum(instance.id in ids for instance in masks.instances)
        iou = None
        if truth in ious:
            iou = round(ious[truth], 4)
        return {"ids": ids, "label": self.recording.labels[truth], "frames": count, "mean_iou": iou}

    def _compute_stages_us(self) -> dict[str, int]:
        """Return the median time of each stage, over the frames that have it."""
        times_us: dict[str, list[int]] = {}
        for masks in self.frames:
            for name, us in masks.stages_us.items():
                times_us.setdefault(name, []).append(us)
        return {name: int(np.median(values)) for name, values in times_us.items()}

    def table(self) -> str:
        """Return the figures as text for the terminal."""
        figures = self.summary()
        # one line for each object, then the figures of the whole
        lines = ["", f"{'id':>4}  {'label':<24} {'frames':>6}  {'mean IoU':>8}"]
        for row in figures["objects"]:
            iou = "-" if row["mean_iou"] is None else f"{row['mean_iou']:.3f}"
            ids = ",".join(map(str, row["ids"])) or "-"
            lines.append(f"{ids:>4}  {row['label']:<24} {row['frames']:>6}  {iou:>8}")
        stages = ", ".join(f"{name} {us / 1000:.1f}" for name, us in figures["stages_p50_us"].items())
        lines += [
            "",
            f"{figures['frames']} frames, {figures['frames_per_s']:.1f}/s, {figures['skipped']} skipped",
            f"capture to publish: p50 {figures['age_p50_ms']:.1f} ms, p99 {figures['age_p99_ms']:.1f} ms",
            f"stages (p50, ms): {stages}",
            f"model {figures['model']}",
        ]
        return "\n".join(lines)

    def describe_load(self) -> str | None:
        """Return a line that says that the machine was too busy for the camera's rate; None if it was not."""
        rate = float(self.summary()["frames_per_s"])
        fps = self.recording.fps
        if rate >= FULL_RATE * fps or self.others_share is None or self.others_share < BUSY_SHARE:
            return None
        return (
            f"the machine was too busy for the camera's {fps:.0f} frames a second: other programs used"
            f" {100 * self.others_share:.0f} % of its processors; run the demo again when they have ended"
        )


def write_results(out: Path, results: DemoResults) -> None:
    """Score the masks and write the FILES to the folder `out`.

    The picture is the frame whose worst mask is the best. Raises OutputError when that folder cannot be written.
    """
    frames = results.frames
    # frames of the contact sheet, spread evenly over the whole
    count = min(SHEET_IMAGES, len(frames))
    sampled = set(np.linspace(0, len(frames) - 1, count).round().astype(int).tolist())
    pictures: list[Image] = []
    # scoring fills the figures of `summary`, so it comes before the rate is read
    best = int(np.argmax([results.score(masks) for masks in frames]))
    rate = max(1.0, float(results.summary()["frames_per_s"]))
    with (
        VideoWriter(out / "overlay.mp4", rate) as video,
        RecordingWriter(out / "masks.mcap", overwrite=True) as bag,
    ):
        # one pass over the recording: each picture is decoded once
        for number, masks in enumerate(frames):
            picture = overlay(results.recording.image(masks.seq), masks)
            video.write(picture)
            bag.write_masks(pack_masks(masks, "rle")[1], masks, masks.age_origin_ns)
            if number == best:
                write_image(out / "picture.jpg", picture)
            if number in sampled:
                pictures.append(picture)
    captions = [f"frame {frames[number].seq}: {_list_objects(frames[number])}" for number in sorted(sampled)]
    write_image(out / "contact.png", contact_sheet(pictures, captions, SHEET_COLUMNS))
    write_output(out / "summary.json", json.dumps(results.summary(), indent=2).encode() + b"\n")


def _list_objects(masks: MaskFrame) -> str:
    return ", ".join(f"{instance.id} {instance.label}" for instance in masks.instances) or "no objects"
