"""The demonstration: camera process -> ZeroMQ -> node process -> ZeroMQ -> this process, on a recorded scene.

Objects are asked for by the names that they have in the recording. Those that are not found so after some seconds, or
all for a node without a detector, are added live by boxes from the recording's own truth, on the frame that the latest
message is about: those that are in view, the others when they have come.
"""

from __future__ import annotations

import sys
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from ..bags import LabelledClip
from ..cameras.bag import TABLETOP
from ..client import PerceptionClient
from ..errors import ProcessError, UnknownFrameError
from ..processes.group import CAMERA_READY, NODE_READY
from ..processes.supervisor import Group, Process
from ..settings import CameraSettings, Settings, TransportSettings
from ..types import Mask, MaskFrame
from .demo_results import Results, write_results

SOURCE, CAMERA = "scene:tabletop", "cam0"
ANY_PORT = "tcp://127.0.0.1:*"
READY_S, SILENCE_S = 180.0, 20.0
MIN_PIXELS, MIN_PART = 150, 0.25
OVERTIME = 3.0
PATIENCE_S = 3.0  # for names, before what was not found is shown by a box


def run_demo(out: Path, seconds: float | None = None, settings: Settings | None = None) -> Results:
    """Play for `seconds`, or the recording once, and write overlay.mp4, contact.png, masks.mcap and summary.json.

    They go to `out`; model, tracker and detector are those of `settings`. Raises ProcessError, with its last lines,
    when a process ends or no masks come; OutputError when `out` cannot be written; BagError for a damaged recording.
    """
    settings = settings or Settings()
    recording = LabelledClip.load(TABLETOP)
    frames = len(recording) if seconds is None else max(2, round(seconds * recording.fps))
    duration_s = frames / recording.fps
    say(
        f"demo: {SOURCE} at {recording.fps:.0f} fps for {duration_s:.0f} s; camera and node are processes of their own"
    )
    with tempfile.TemporaryDirectory(prefix="sam3-demo-") as folder, Group(echo=say) as group:
        frames_at = f"ipc://{folder}/frames"
        masks_at, control_at = _start_node(group, settings, frames_at)
        with PerceptionClient(masks_at, control_at, timeout_ms=10_000) as client:
            # after the node, which so sees the recording from its first frame on
            _start_camera(group, frames_at)
            director = (
                Boxes(recording, client) if settings.detector.kind == "none" else Names(recording, client)
            )
            results = _collect(group, client, director, frames)
    say("drawing the results ...")
    write_results(out, results)
    say(results.table())
    say(f"wrote overlay.mp4, contact.png, masks.mcap and summary.json to {out}")
    return results


def say(line: str) -> None:
    """Print a line at once."""
    print(line, file=sys.stdout, flush=True)


def _start_node(group: Group, settings: Settings, frames_at: str) -> tuple[str, str]:
    """The node on free ports of this machine; its endpoints of masks and control."""
    transport = TransportSettings(frames=(frames_at,), masks=ANY_PORT, control=ANY_PORT)
    environment = _environment(
        transport=transport,
        model=settings.model,
        engine=settings.engine,
        tracker=settings.tracker,
        detector=settings.detector,
    )
    group.start(Process("node", _command("run"), NODE_READY, environment))
    ready = group.wait_ready("node", READY_S)
    assert ready is not None
    return ready.group(1), ready.group(2)


def _start_camera(group: Group, frames_at: str) -> None:
    """The recording again and again, its frames as they were recorded."""
    camera = CameraSettings(source=SOURCE, name=CAMERA, encoding="jpeg", loop=True)
    environment = _environment(transport=TransportSettings(frames=(frames_at,)), camera=camera)
    group.start(Process("camera", _command("camera"), CAMERA_READY, environment))
    group.wait_ready("camera", READY_S)


def _command(verb: str) -> tuple[str, ...]:
    return sys.executable, "-m", "sam3_node", verb


def _environment(**sections: BaseModel) -> dict[str, str]:
    """Sections of the settings as the variables that a process reads them from."""
    return {
        f"SAM3_{section}__{name}".upper(): ",".join(value) if isinstance(value, tuple) else str(value).lower()
        for section, model in sections.items()
        for name, value in model.model_dump().items()
        if value is not None
    }


def _collect(group: Group, client: PerceptionClient, director: Director, frames: int) -> Results:
    """Receive masks and ask for objects until the camera has published `frames`."""
    progress, recording = Progress(), director.recording
    received: list[MaskFrame] = []
    status = client.status()
    start, deadline = time.monotonic(), time.monotonic() + OVERTIME * frames / recording.fps + SILENCE_S
    while not received or received[-1].seq < frames - 1:
        group.check()
        masks = client.latest(200)
        if masks is not None:
            if received and masks.seq >= frames:
                break
            received.append(masks)
            director.direct(masks)
            progress.tell(masks, len(received), time.monotonic() - start)
        elif time.monotonic() > deadline or (not received and time.monotonic() > start + SILENCE_S):
            raise ProcessError(
                f"expected masks of {frames} camera frames, found {len(received)} messages; see above"
            )
    return Results(recording, received, director.truth_of, director.asked, director.events, status)


class Director(ABC):
    """Asks for the objects of the truth; `truth_of` and `asked` as in Results."""

    def __init__(self, recording: LabelledClip, client: PerceptionClient) -> None:
        self.recording = recording
        self.truth_of: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        self.events: list[tuple[int, str]] = []
        self._client = client

    @abstractmethod
    def direct(self, masks: MaskFrame) -> None:
        """See the newest masks, and do what is to be done now."""

    def _tell(self, seq: int, what: str) -> None:
        self.events.append((seq, what))
        say(f"frame {seq}: {what}")


class Boxes(Director):
    """Shows each object once, by its true box, when it is in view."""

    def __init__(self, recording: LabelledClip, client: PerceptionClient) -> None:
        super().__init__(recording, client)
        self._waiting = dict(recording.labels)
        self._enough = {
            truth: max(MIN_PIXELS, MIN_PART * recording.areas(truth).max()) for truth in self._waiting
        }

    def direct(self, masks: MaskFrame) -> None:
        """Add what is in view on the frame of `masks` and not asked for yet; what fails is tried on the next."""
        if not self._waiting:
            return
        for truth, inside in self.recording.truth(masks.seq).items():
            if truth not in self._waiting or inside.sum() < self._enough[truth]:
                continue
            label = self._waiting[truth]
            try:
                added = self._client.add_object(box=Mask.from_full(inside).box, label=label, seq=masks.seq)
            except UnknownFrameError:
                return  # the node has gone on; the next message is fresher
            del self._waiting[truth]
            self.truth_of[added.id] = truth
            self.asked.setdefault(truth, masks.seq)
            self._tell(masks.seq, f"added {added.id}, {label}, by a box")


class Names(Boxes):
    """Names all objects at the start, one of each; what is found under a name is taken for the object of that name.

    After a while the names of what was not found are withdrawn, and those objects are shown by boxes.
    """

    _gave_up = False

    def direct(self, masks: MaskFrame) -> None:
        """Ask on the first frame, take note of ids that are new, show the rest."""
        if not self.asked:
            self._ask(masks.seq)
        truths = {name: truth for truth, name in self.recording.labels.items()}
        for instance in masks.instances:
            if instance.id not in self.truth_of and instance.label in truths:
                self.truth_of[instance.id] = truth = truths[instance.label]
                self._waiting.pop(truth, None)
                self._tell(masks.seq, f"found {instance.id}, {instance.label}")
        if masks.seq - min(self.asked.values()) >= PATIENCE_S * self.recording.fps:
            self._give_up(masks.seq)
            super().direct(masks)

    def _ask(self, seq: int) -> None:
        names = self.recording.labels
        self._client.set_prompts(list(names.values()), most=dict.fromkeys(names.values(), 1))
        self.asked = dict.fromkeys(names, seq)
        self._tell(seq, f"looking for {', '.join(names.values())}")

    def _give_up(self, seq: int) -> None:
        """Once: look no more for what has not been found."""
        if self._gave_up or not self._waiting:
            return
        self._gave_up = True
        found = [name for truth, name in self.recording.labels.items() if truth not in self._waiting]
        self._client.set_prompts(found, most=dict.fromkeys(found, 1))
        self._tell(seq, f"not found by name: {', '.join(self._waiting.values())}")


@dataclass(slots=True)
class Progress:
    """One line a second."""

    due_s: float = field(default=1.0)

    def tell(self, masks: MaskFrame, count: int, elapsed_s: float) -> None:
        """Print what has come so far, when a second has gone by."""
        if elapsed_s < self.due_s:
            return
        self.due_s = elapsed_s + 1.0
        age_ms = (masks.published_ns - masks.age_origin_ns) / 1e6
        ids = " ".join(str(instance.id) for instance in masks.instances) or "none"
        say(f"{elapsed_s:5.1f} s  {count} mask messages  capture to publish {age_ms:.0f} ms  objects {ids}")
