"""Frames that are encoded together: what decides their features, and when it pays."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sam3_node.models.sam.stages import Features
from sam3_node.models.sam.tracker_model import TrackerModel
from sam3_node.perception import joint_encoding
from sam3_node.perception.joint_encoding import JointEncoding, choose_together
from sam3_node.perception.preparing import FramePreparer
from sam3_node.types import FrameBatch
from tests.support.live import moving_frame
from tests.support.tiny import noise_clip, random_source, stages_of, tiny_model

SIZE = 3


def parts(features: Features) -> list[Tensor]:
    return [part for part in features if part is not None]


@pytest.mark.parametrize("family", ["sam3", "sam2", "edgetam"])
@torch.inference_mode()
def test_features_depend_on_the_frame_and_its_index_alone(family: str) -> None:
    model = stages_of(random_source(family))
    clip = noise_clip(model.image_size, SIZE)
    together = model.encode_together(torch.cat(clip))
    for index, pixels in enumerate(clip):
        # the same frame everywhere, as a replay has it that lacks the others
        repeated = model.encode_together(torch.cat([pixels] * SIZE))[index]
        for found, other, alone in zip(
            parts(together[index]), parts(repeated), parts(model.encode(pixels)), strict=True
        ):
            assert torch.equal(found, other)
            assert (found - alone).abs().max() < 1e-4
            assert found.untyped_storage().nbytes() <= found.nbytes + 64, "freed without the others"


def prepare(model: TrackerModel, count: int) -> dict[int, Any]:
    preparer = FramePreparer(model, 1 << 24)
    return {index: preparer(moving_frame(index, f"cam{index}")) for index in range(count)}


def test_a_frame_that_is_missing_changes_nothing_for_the_others() -> None:
    model = tiny_model()
    frames = prepare(model, SIZE)
    whole = JointEncoding(model, frames, SIZE)
    for index, prepared in frames.items():
        part = JointEncoding(model, {index: prepared}, SIZE)
        found = part.take(prepared.frame)
        expected = whole.take(prepared.frame)
        assert found is not None
        assert expected is not None
        assert found.batch == expected.batch == FrameBatch(SIZE, index)
        assert all(map(torch.equal, parts(found.features), parts(expected.features)))
        assert whole.take(prepared.frame) is None, "once"


def test_a_frame_alone_is_encoded_as_by_its_step() -> None:
    model = tiny_model()
    (prepared,) = prepare(model, 1).values()
    found = JointEncoding(model, {0: prepared}, 1).take(prepared.frame)
    assert found is not None
    assert found.batch is None
    assert all(map(torch.equal, parts(found.features), parts(model.encode(prepared.pixels))))


def test_where_memory_runs_out_frames_are_encoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    frames = prepare(model, 2)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "encode_together", fail)
    encoding = JointEncoding(model, frames, 2)
    found = [encoding.take(prepared.frame) for prepared in frames.values()]
    assert encoding.is_split
    assert [one and one.batch for one in found] == [None, None]
    assert all(one is not None for one in found)


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        ((10, 15, 20, 25), 4),
        ((10, 15, 28, 20), 2),  # a third frame gains nothing
        ((10, 19, 20, 20), 1),
        ((10, 15, None, 20), 2),  # no memory for a third one
    ],
)
def test_as_many_frames_are_joined_as_gain_by_it(
    monkeypatch: pytest.MonkeyPatch, times_ms: tuple[float | None, ...], expected: int
) -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), encode_limits=SimpleNamespace(many_images=True))
    counts = itertools.count(1)

    def time_encoder(model: object, count: int) -> float:
        assert count == next(counts)
        took_ms = times_ms[count - 1]
        if took_ms is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return took_ms / 1e3

    monkeypatch.setattr(joint_encoding, "time_encoder", time_encoder)
    monkeypatch.setattr(joint_encoding, "measure_free", lambda device: 0.5)
    assert choose_together(model) == expected


def test_memory_is_left_for_cameras_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), encode_limits=SimpleNamespace(many_images=True))
    monkeypatch.setattr(joint_encoding, "time_encoder", lambda model, count: 1.0)
    monkeypatch.setattr(joint_encoding, "measure_free", lambda device: 0.2)
    assert choose_together(model) == 2


def test_a_cpu_and_an_encoder_for_one_image_take_frames_one_by_one() -> None:
    model = tiny_model()
    assert model.encode_limits.many_images
    assert choose_together(model) == 1
    model.compile(backend="eager")
    assert not model.encode_limits.many_images
    assert model.encode_limits.runs_beside


def test_the_times_of_a_batch_are_measured() -> None:
    assert joint_encoding.time_encoder(tiny_model(), 2) > 0
