"""Encoding the next frame while this one's objects are tracked changes when it is encoded, and nothing else."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sam3_node.errors import BagError
from sam3_node.models import TrackerModel
from sam3_node.models.sam.stages import EncodeLimits
from sam3_node.perception import encode_ahead
from sam3_node.perception.encode_ahead import encodes_beside
from sam3_node.perception.perception import Perception
from sam3_node.perception.stages.track import TrackObjects
from sam3_node.perception.step import StepFrame
from sam3_node.replay.event_log import Action, Step
from sam3_node.replay.job import Job
from sam3_node.replay.run import compare_job, look_ahead, run_job
from sam3_node.schema.operations import PinFrame
from tests.support.live import moving_frame, record_edits, tiny_settings
from tests.support.patience import PATIENCE_S
from tests.support.resources import nothing_added

FRAMES = 12


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job on a recording of two cameras with edits, and a frame that does not decode."""
    folder = tmp_path_factory.mktemp("recorded")
    perception = Perception.load(tiny_settings(folder, feature_cache_s=0))
    path = record_edits(folder / "live.mcap", perception, FRAMES)
    return Job((str(path),), str(folder / "plain"), "as-recorded")


class Threads:
    """The names of the threads that have run the encoder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = list[str]()
        encode = TrackerModel.encode

        def note(model: TrackerModel, pixels: torch.Tensor) -> Any:
            self.names.append(threading.current_thread().name)
            return encode(model, pixels)

        monkeypatch.setattr(TrackerModel, "encode", note)

    @property
    def ahead(self) -> int:
        return sum(name.startswith("encode-ahead") for name in self.names)


def read_output(job: Job) -> bytes:
    return (Path(job.out) / "masks.mcap").read_bytes()


@pytest.mark.parametrize(("mode", "stride"), [("as-recorded", 1), ("every", 1), ("every", 3)])
def test_the_output_is_that_of_a_plain_replay(
    recorded: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, stride: int
) -> None:
    plain = replace(recorded, out=str(tmp_path / "plain"), mode=mode, stride=stride)
    ahead = replace(plain, out=str(tmp_path / "ahead"))
    threads = Threads(monkeypatch)
    expected = run_job(plain)
    assert threads.names, "the encoder has run"
    assert not threads.ahead, "on a CPU the model keeps its cores"
    monkeypatch.setattr(encode_ahead, "encodes_beside", lambda model: True)
    threads.names.clear()
    with nothing_added():
        found = run_job(ahead)
    assert threads.ahead == len(threads.names) == expected.frames - expected.failed
    assert (found.frames, found.failed, found.notes) == (expected.frames, expected.failed, expected.notes)
    assert read_output(ahead) == read_output(plain)
    if mode == "as-recorded":
        assert compare_job(ahead).is_identical


def test_the_next_frame_is_encoded_while_this_one_is_tracked(
    recorded: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_ahead, "encodes_beside", lambda model: True)
    encoded = threading.Semaphore(0)
    track = TrackObjects.run
    encode = TrackerModel.encode
    waited = list[bool]()

    def note(model: TrackerModel, pixels: torch.Tensor) -> Any:
        features = encode(model, pixels)
        encoded.release()
        return features

    def wait(stage: TrackObjects, step: StepFrame) -> None:
        # its own frame, once, and the next one, which nobody waits for otherwise; the last frame has none
        waited.append(encoded.acquire(timeout=PATIENCE_S if len(waited) < FRAMES - 1 else 0))
        track(stage, step)

    monkeypatch.setattr(TrackerModel, "encode", note)
    monkeypatch.setattr(TrackObjects, "run", wait)
    encoded_first = threading.Thread(target=lambda: encoded.acquire(timeout=PATIENCE_S))
    encoded_first.start()
    job = replace(recorded, out=str(tmp_path / "out"), mode="every", topics=("right",))
    run_job(job)
    encoded_first.join(PATIENCE_S)
    assert waited == [True] * (FRAMES - 1) + [False]


def test_only_a_gpu_whose_encoder_runs_beside_other_stages_encodes_ahead() -> None:
    def model(device: str, limits: EncodeLimits) -> Any:
        return SimpleNamespace(device=torch.device(device), encode_limits=limits)

    assert encodes_beside(model("cuda", EncodeLimits(runs_beside=True)))
    assert not encodes_beside(model("cuda", EncodeLimits()))
    assert not encodes_beside(model("cpu", EncodeLimits(runs_beside=True)))


def actions(count: int) -> list[Action]:
    """Return steps, with an edit before every third."""
    found: list[Action] = []
    for seq in range(count):
        if seq % 3 == 0:
            found.append(PinFrame(seq=seq))
        found.append(Step(moving_frame(seq), seq))
    return found


def test_steps_to_come_are_known() -> None:
    given = actions(7)
    steps = [action for action in given if isinstance(action, Step)]
    for count in (0, 1, 3):
        found = list(look_ahead(given, count))
        assert [action for action, _ in found] == given
        of_steps = [later for action, later in found if isinstance(action, Step)]
        assert of_steps == [steps[at + 1 : at + 1 + count] for at in range(len(steps))]


def test_an_error_of_the_source_comes_after_earlier_actions() -> None:
    taken = list[Action]()

    def failing() -> Iterator[Action]:
        for action in actions(5):
            taken.append(action)
            yield action
        raise BagError("gone")

    found = look_ahead(failing(), 0)
    next(found)
    assert len(taken) == 1, "nothing is read before it is needed"
    seen = list[Action]()
    with pytest.raises(BagError, match="gone"):
        seen.extend(action for action, _ in look_ahead(failing(), 2))
    assert len(seen) == len(actions(5))
