"""Recordings of what a real Perception did on frames, written as a node and its recorder would, in one process."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import cv2
import numpy as np

from sam3_node.bags import read_masks
from sam3_node.bags.native import NODE
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.errors import Sam3NodeError
from sam3_node.node.cameras import FRAMES_PER_STEP
from sam3_node.node.operations import carry_out
from sam3_node.node.status import CameraStats
from sam3_node.perception.perception import Perception
from sam3_node.perception.step import StepFrame
from sam3_node.replay.job import Job
from sam3_node.settings import Settings
from sam3_node.types import Frame, MaskFrame, StepDecisions
from sam3_node.wire import CAUGHT_UP, DROPPED, FAILED, SERVED, Event, pack, pack_event, pack_masks, unpack
from sam3_node.wire.requests import read_operation

SIZE = (48, 64)
BOX = [16.0, 12.0, 48.0, 36.0]
MS = 1_000_000


def tiny_settings(folder: Path, **tracker: Any) -> Settings:
    """Return settings for tiny random weights, which are written to `folder` if they are missing."""
    from tests.support.tiny import write_tiny  # not for forked processes, which never make weights

    weights = folder / "tiny"
    write_tiny(weights)
    return Settings(
        model={"name": str(weights), "device": "cpu", "threads": 1},  # type: ignore[arg-type]
        tracker={"max_objects": 4, **tracker},  # type: ignore[arg-type]
        detector={"kind": "none"},  # type: ignore[arg-type]
    )


def chosen(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the part of these settings that a job needs."""
    return {
        name: getattr(settings, name).model_dump(mode="json", exclude_unset=True)
        for name in ("model", "tracker", "detector")
    }


def moving_frame(seq: int, camera: str = "left") -> Frame:
    """Return a JPEG of a bright square that moves over noise; each camera has other noise."""
    noise = np.random.default_rng([seq, *camera.encode()])
    image = noise.integers(0, 90, (*SIZE, 3), dtype=np.uint8)
    image[12 + seq % 8 : 30 + seq % 8, 16 + seq % 16 : 40 + seq % 16] += 120
    jpeg = cv2.imencode(".jpg", image)[1].tobytes()
    return Frame(camera, seq, (1000 + 40 * seq) * MS, SIZE[1], SIZE[0], "jpeg", jpeg, sent_ns=1)


class Live:
    """A recording while it is written. A context manager."""

    def __init__(self, path: Path, perception: Perception, events: int = 0) -> None:
        self.perception = perception
        self.masks: list[MaskFrame] = []
        self._writer = RecordingWriter(path)
        self.events = events
        self._now_ns = 1
        self._taken: dict[str, int] = {}
        self._describe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def skip(self, frame: Frame) -> None:
        """Record a frame without stepping it."""
        self._writer.write_frame(frame, self._tick())
        self._writer.flush()

    def step(
        self,
        frame: Frame,
        record_frame: bool = True,
        record_masks: bool = True,
        withheld: bool = False,
        decisions: StepDecisions | None = None,
    ) -> MaskFrame | None:
        """Step and record a frame; return its masks, None if the step fails or they are `withheld`."""
        if record_frame:
            self.skip(frame)
        camera = frame.camera
        if camera not in self.perception.pipelines:
            self.perception.serve(camera)
            self.tell(SERVED, camera=camera)
        skipped = max(0, frame.seq - self._taken.get(camera, frame.seq) - 1)
        self._taken[camera] = frame.seq
        stats = CameraStats()
        stats.decisions = decisions or StepDecisions()
        pipeline = self.perception.pipelines[camera]
        try:
            step = StepFrame(frame, self._tick(), skipped, stats.decisions)
            masks = self.perception.link(pipeline.step(step))
        except Sam3NodeError as error:
            self.tell(FAILED, **stats.describe_failure(frame, str(error)))
            return None
        if withheld:
            self.tell(FAILED, **stats.describe_failure(frame, "too old"), withheld=True)
            self._catch_up(camera)
            return None
        masks = replace(masks, stages_us={**masks.stages_us, "pack": 7}, published_ns=self._tick())
        self.masks.append(masks)
        if record_masks:
            self._writer.write_masks(pack_masks(masks)[1], masks, self._tick())
        self._catch_up(camera)
        return masks

    def _catch_up(self, camera: str) -> None:
        """Go on with objects that were prompted on past frames, as the node does after a step."""
        catch_ups = self.perception.pipelines[camera].catch_ups
        for _ in range(FRAMES_PER_STEP):
            if (done := catch_ups.advance()) is not None:
                self.tell(CAUGHT_UP, camera=camera, id=done.id)

    def ask(self, op: str, recorded: bool = True, **args: Any) -> Any:
        """Carry out and record a control request; return its result."""
        answer = carry_out(self.perception, read_operation(op, args))
        self.tell(op, recorded, **args)
        return unpack(pack(answer.to_result()), what="reply")

    def drop(self, camera: str) -> None:
        """Drop a camera, as the node does for a new one."""
        self.perception.drop(camera)
        self.tell(DROPPED, camera=camera)

    def restart(self) -> None:
        """Start the node again."""
        for camera in list(self.perception.pipelines):
            self.perception.drop(camera)
        self.perception.forget_things()
        self.events = 0
        self._taken.clear()
        self._describe()

    def tell(self, op: str, recorded: bool = True, **args: Any) -> None:
        """Publish an event; it may be lost on its way to the recorder."""
        event = Event(self.events, op, args)
        self.events += 1
        if recorded:
            self._writer.write_event(pack_event(event)[1], event.n, self._tick())

    def _describe(self) -> None:
        cameras = {camera: {"objects": len(one.objects)} for camera, one in self.perception.pipelines.items()}
        self._writer.write_metadata(
            NODE, {**self.perception.describe(), "events": self.events, "cameras": cameras}
        )

    def _tick(self) -> int:
        self._now_ns += MS
        return self._now_ns


def edited(live: Live, last: int = 24) -> Iterator[MaskFrame]:
    """Two cameras of which frames are skipped, one frame that does not decode, and every kind of edit in between."""
    for seq in range(last):
        for camera in ("left", "right"):
            frame = moving_frame(seq, camera)
            if camera == "right" and seq % 3 == 1:
                live.skip(frame)
                continue
            if (camera, seq) == ("left", 7):
                frame = replace(frame, colour=bytes(frame.colour)[:-40])
            if masks := live.step(frame):
                yield masks
        if edit := EDITS.get(seq):
            live.ask(edit[0], **edit[1])


def record_edits(path: Path, perception: Perception, last: int = 24) -> Path:
    """Record what `edited` makes."""
    with Live(path, perception) as live:
        for _ in edited(live, last):
            pass
    return path


def masks_of(job: Job) -> list[MaskFrame]:
    """Return the masks that a replay wrote."""
    return list(read_masks(Path(job.out) / "masks.mcap"))


def masks_on(frame: Frame) -> MaskFrame:
    """Return masks of a frame, without objects."""
    return MaskFrame(*frame.key, frame.width, frame.height)


def stop_after(count: int, what: str = "") -> tuple[Callable[[str, int, int | None], None], threading.Event]:
    """Return a progress callback, and the event that it sets when `count` frames are done, of `what` if given."""
    stop = threading.Event()

    def progress(now: str, done: int, total: int | None) -> None:
        if done == count and what in ("", now):
            stop.set()

    return progress, stop


EDITS: dict[int, tuple[str, dict[str, Any]]] = {
    1: ("add_object", {"camera": "left", "box": BOX, "label": "first"}),
    3: ("add_object", {"camera": "right", "points": [[30, 20]], "seq": 2, "choice": 1}),
    5: (
        "refine_object",
        {"camera": "left", "id": 1, "points": [[30, 20], [5, 5]], "labels": [1, 0], "seq": 2, "stride": 2},
    ),
    8: ("add_object", {"camera": "left", "points": [[20, 30]], "label": "second", "choice": 2}),
    11: ("pause", {}),
    12: ("resume", {}),
    14: ("remove_object", {"camera": "left", "id": 1}),
    16: ("reset", {"camera": "right"}),
    17: ("add_object", {"camera": "right", "box": BOX, "seq": 17}),
}
