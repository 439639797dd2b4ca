"""The demonstration: camera process -> ZeroMQ -> node process -> ZeroMQ -> this process, on a drawn scene.

Objects are added, corrected and removed live, by boxes and points from the scene's own truth, on the frame
that the latest message is about.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from .cameras.scene import Scene
from .client import PerceptionClient
from .demo_results import Results, write_results
from .errors import ProcessError, UnknownFrameError
from .group import CAMERA_READY, NODE_READY
from .settings import CameraSettings, Settings, TransportSettings
from .supervisor import Group, Process
from .types import Box, Mask, MaskFrame

SOURCE, FPS, CAMERA = "scene:shapes", 15, "cam0"
ANY_PORT = "tcp://127.0.0.1:*"
READY_S, SILENCE_S = 180.0, 20.0
FEWEST_PIXELS = 150
OVERTIME = 3.0

Way = Literal["box", "point"]
BoolImage = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Step:
    """What is done to the scene's object `truth`, when the part `at` (0..1) of the demo is over."""

    at: float
    action: Literal["add", "refine", "remove"]
    truth: int
    way: Way = "box"


PLAN = (
    Step(0.00, "add", 1, "box"),
    Step(0.05, "add", 2, "point"),
    Step(0.25, "add", 4, "box"),
    Step(0.40, "add", 5, "point"),
    Step(0.55, "refine", 2, "point"),
    Step(0.85, "remove", 4),
)


def run_demo(out: Path, seconds: float = 10.0, settings: Settings | None = None) -> Results:
    """Play for `seconds`, and write overlay.mp4, contact.png, masks.mcap and summary.json to `out`.

    Model and tracker are those of `settings`. Raises ProcessError, with its last lines, when a process ends
    or no masks come; OutputError when `out` cannot be written.
    """
    settings = settings or Settings()
    frames = max(2, round(seconds * FPS))
    say(f"demo: {SOURCE} at {FPS} fps for {frames / FPS:.0f} s; camera and node are processes of their own")
    with Group(echo=say) as group:
        masks_at, control_at = _start(group, settings)
        with PerceptionClient(masks_at, control_at, timeout_ms=10_000) as client:
            results = _collect(group, client, frames)
    say("drawing the results ...")
    write_results(out, results)
    say(results.table())
    say(f"wrote overlay.mp4, contact.png, masks.mcap and summary.json to {out}")
    return results


def say(line: str) -> None:
    """Print a line at once."""
    print(line, file=sys.stdout, flush=True)


def _start(group: Group, settings: Settings) -> tuple[str, str]:
    """Camera and node on free ports of this machine; the node's endpoints of masks and control."""
    camera = CameraSettings(source=SOURCE, name=CAMERA, fps=FPS)
    environment = _environment(transport=TransportSettings(frames=(ANY_PORT,)), camera=camera)
    group.start(Process("camera", _command("camera"), CAMERA_READY, environment))
    ready = group.wait_ready("camera", READY_S)
    assert ready is not None
    transport = TransportSettings(frames=(ready.group(1),), masks=ANY_PORT, control=ANY_PORT)
    model = settings.model.model_copy(update={"threads": settings.model.threads or _spare_threads()})
    environment = _environment(transport=transport, model=model, tracker=settings.tracker)
    group.start(Process("node", _command("run"), NODE_READY, environment))
    ready = group.wait_ready("node", READY_S)
    assert ready is not None
    return ready.group(1), ready.group(2)


def _spare_threads() -> int:
    """All cores but one, which is for camera and subscriber: threads that share a core stall each other."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores - 1)


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


def _collect(group: Group, client: PerceptionClient, frames: int) -> Results:
    """Receive masks and follow the plan until the camera has gone on by `frames`."""
    scene = Scene.from_uri(SOURCE)
    director = Director(scene, client)
    progress = Progress()
    received: list[MaskFrame] = []
    status = client.status()
    start, deadline = time.monotonic(), time.monotonic() + OVERTIME * frames / FPS + SILENCE_S
    while not received or received[-1].seq - received[0].seq < frames - 1:
        group.check()
        masks = client.latest(200)
        if masks is not None:
            received.append(masks)
            director.direct(masks, (masks.seq - received[0].seq) / frames)
            progress.tell(masks, len(received), time.monotonic() - start)
        elif time.monotonic() > deadline or (not received and time.monotonic() > start + SILENCE_S):
            raise ProcessError(
                f"expected masks of {frames} camera frames, found {len(received)} messages; see above"
            )
    return Results(scene, received, director.truth_of, director.labels, director.events, status)


class Director:
    """Carries out the plan; `truth_of` maps the node's ids to the scene's."""

    def __init__(self, scene: Scene, client: PerceptionClient) -> None:
        self.truth_of: dict[int, int] = {}
        self.labels: dict[int, str] = {}
        self.events: list[tuple[int, str]] = []
        self._scene = scene
        self._client = client
        self._left = list(PLAN)

    def direct(self, masks: MaskFrame, progress: float) -> None:
        """Do what is due, on the frame of `masks`; what fails for now is tried on the next."""
        due = [step for step in self._left if step.at <= progress]
        if not due:
            return
        _, ids = self._scene.render(masks.seq)
        for step in due:
            inside = ids == step.truth
            if step.action != "remove" and np.count_nonzero(inside) < FEWEST_PIXELS:
                continue  # out of view
            try:
                event = self._carry_out(step, inside, masks.seq)
            except UnknownFrameError:
                continue  # the node has gone on; the next message is fresher
            self._left.remove(step)
            self.events.append((masks.seq, event))
            say(f"frame {masks.seq}: {event}")

    def _carry_out(self, step: Step, inside: BoolImage, seq: int) -> str:
        label = self._scene.names[step.truth - 1]
        if step.action == "add":
            object_id = self._client.add_object(**_prompt(step.way, inside), label=label, seq=seq).id
            self.truth_of[object_id], self.labels[object_id] = step.truth, label
            return f"added {object_id}, {label}, by a {step.way}"
        object_id = next(known for known, truth in self.truth_of.items() if truth == step.truth)
        if step.action == "refine":
            self._client.refine_object(object_id, **_prompt(step.way, inside), seq=seq)
            return f"refined {object_id}, {label}, by a {step.way}"
        self._client.remove_object(object_id)
        return f"removed {object_id}, {label}"


def _prompt(way: Way, inside: BoolImage) -> dict[str, Any]:
    return {"box": tight_box(inside)} if way == "box" else {"points": [deepest_point(inside)], "labels": [1]}


def tight_box(inside: BoolImage) -> Box:
    """The box x0, y0, x1, y1 in pixels around what is set in bool [h, w]."""
    return Mask.from_full(inside).box


def deepest_point(inside: BoolImage) -> tuple[float, float]:
    """The x, y in pixels that is farthest from the edge of what is set in bool [h, w]."""
    depth = cv2.distanceTransform(inside.astype(np.uint8), cv2.DIST_L2, 5)
    row, column = np.unravel_index(int(depth.argmax()), depth.shape)
    return float(column) + 0.5, float(row) + 0.5


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
