"""Compare what runs in parallel with what runs in turn: replays that encode ahead, and cameras encoded together.

`tools.bench.gpu` measures both. Where nothing gains, as on a CPU, both ways still run and give the same masks.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from sam3_node.bags import read_masks
from sam3_node.bags.native.reader import TABLETOP, RecordingReader
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.engines.validation import read_clock
from sam3_node.perception import encode_ahead
from sam3_node.perception.joint_encoding import MAX_TOGETHER, JointEncoding, choose_together
from sam3_node.perception.perception import Perception
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.preparing import FramePreparer, PreparedFrame
from sam3_node.perception.step import StepFrame
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import compare_masks, run_job
from sam3_node.settings import Settings
from sam3_node.types import NANOSECONDS, Frame
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import percentile

FPS = 30
WARM_ROUNDS = 3


class Loaded:
    """A Perception that is loaded when it is first used."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def perception(self) -> Perception:
        """The Perception, warmed up as in a node."""
        return Perception.load(self.settings)


def read_frames(count: int, camera: str = "cam") -> list[Frame]:
    """Return frames of the bundled recording, in a loop, without depth."""
    recorded = islice(RecordingReader([TABLETOP]).frames(), count)
    frames = islice(cycle(recorded), count)
    return [
        replace(
            frame, camera=camera, seq=seq, capture_ns=(seq + 1) * NANOSECONDS // FPS, depth=None, times={}
        )
        for seq, frame in enumerate(frames)
    ]


def list_points(frame: Frame, count: int) -> list[tuple[float, float]]:
    """Return points spread over a frame, one for each object."""
    steps = np.linspace(0.2, 0.8, count)
    return [(frame.width * step, frame.height * (1 - step)) for step in steps.tolist()]


def compare_replays(loaded: Loaded, count: int, stride: int, frames: int) -> Mapping[str, float]:
    """Return the rates of plain replays and of those that encode ahead, in stepped frames/s, and 1 for equal masks.

    The recording has `frames` frames to step at this stride.
    """
    perception = loaded.perception
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bag = folder / "bag.mcap"
        found = read_frames(frames * stride)
        with RecordingWriter(bag) as writer:
            for frame in found:
                writer.write_frame(frame, frame.capture_ns)
        marked = [
            ObjectOnFrame(points=(point,), labels=(1,), index=0) for point in list_points(found[0], count)
        ]
        rates = dict[str, float]()
        outputs = dict[str, Path]()
        for way, beside in (("plain", False), ("ahead", True), ("plain again", False), ("ahead again", True)):
            out = folder / way
            job = Job((str(bag),), str(out), "every", objects=tuple(marked), stride=stride)
            with mock.patch.object(encode_ahead, "encodes_beside", lambda model, beside=beside: beside):
                summary = run_job(job, lambda settings: perception)
            rates[way] = summary.frames_per_s
            outputs[way] = out / "masks.mcap"
        compared = compare_masks(read_masks(outputs["ahead"]), read_masks(outputs["plain"]))
    gain = (rates["ahead"] + rates["ahead again"]) / (rates["plain"] + rates["plain again"])
    return rates | {"times as fast": gain, "equal masks": float(compared.is_identical)}


def compare_rounds(loaded: Loaded, count: int, rounds: int) -> Mapping[str, float]:
    """Return the median milliseconds of a round of cameras: one, and several encoded one by one and together."""
    model = loaded.perception.model
    prepare = FramePreparer(model, loaded.settings.tracker.max_frame_pixels)
    names = [f"cam{number}" for number in range(MAX_TOGETHER)]
    clips = {name: [prepare(frame) for frame in read_frames(4, name)] for name in names}
    pipelines = {name: Pipeline(model, loaded.settings.tracker, name) for name in names}
    for name, pipeline in pipelines.items():
        first = clips[name][0]
        step_one(pipeline, first)
        for point in list_points(first.frame, count):
            pipeline.add(FramePrompt(points=[point]), seq=first.frame.seq)

    def run_round(cameras: Sequence[str], together: bool, number: int) -> None:
        frames = [clips[name][number % len(clips[name])] for name in cameras]
        encoding = JointEncoding(model, dict(enumerate(frames)), len(frames)) if together else None
        for name, prepared in zip(cameras, frames, strict=True):
            step_one(pipelines[name], prepared, encoding)

    found = {"one camera": time_rounds(partial(run_round, names[:1], False), rounds, model.device)}
    for cameras in (names[:2], names):
        for together in (False, True):
            ms = time_rounds(partial(run_round, cameras, together), rounds, model.device)
            found[f"{len(cameras)} cameras, {'together' if together else 'one by one'}"] = ms
    found["4 cameras together, in steps of one"] = found["4 cameras, together"] / found["one camera"]
    found["a node encodes together"] = float(choose_together(model))
    found["features without neighbours are equal"] = float(is_independent(loaded, clips))
    return found


def step_one(pipeline: Pipeline, prepared: PreparedFrame, encoding: JointEncoding | None = None) -> None:
    """Step a frame whose image is prepared."""
    pipeline.step(StepFrame(prepared.frame, prepared=prepared, encoding=encoding))


def time_rounds(run: partial[None], rounds: int, device: torch.device) -> float:
    """Return the median milliseconds of a round, after some that are not timed."""
    times_ms = []
    for number in range(WARM_ROUNDS + rounds):
        begin_s = read_clock(device)
        run(number)
        times_ms.append(1e3 * (read_clock(device) - begin_s))
    return percentile(times_ms[WARM_ROUNDS:], 0.5)


@torch.inference_mode()
def is_independent(loaded: Loaded, clips: Mapping[str, Sequence[PreparedFrame]]) -> bool:
    """Return True if the features of a frame in a batch are bit-equal with any other frames in it."""
    model = loaded.perception.model
    frames = dict(enumerate(clip[0] for clip in clips.values()))
    whole = JointEncoding(model, frames, len(frames))
    equal = True
    for index, prepared in frames.items():
        expected = whole.take(prepared.frame)
        found = JointEncoding(model, {index: prepared}, len(frames)).take(prepared.frame)
        assert expected is not None
        assert found is not None
        pairs = zip(found.features, expected.features, strict=True)
        equal &= all(a is None or b is None or torch.equal(a, b) for a, b in pairs)
    return equal
