"""The lesson in features: what counts as explained, at which places, and that a run resumes with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sam3_node.models.checkpoints import NANO
from tests.support.rectangles import write_rectangles
from training.nano.network import SIZE, nano_config, new_tracker
from training.nano.data import Recipe, Sources
from research.nano_lesson import Lesson, LessonTrainer
from training.nano.network import Features, TrainingTracker
from training.nano.train import Stage

CPU = torch.device("cpu")
FRAMES = Stage("frames", 1e-6, 1e-3, Recipe(clips=2, frames=1, objects=2), light=True)  # one step
CLIPS = Stage("clips", 1e-6, 1e-3, Recipe(clips=1, frames=2, objects=2))


@pytest.fixture
def lesson() -> Lesson:
    """The bundled weights teach."""
    return Lesson("nano", "float32")


@pytest.fixture(scope="module")
def student() -> TrainingTracker:
    source = new_tracker(nano_config())
    source.load_state_dict({name: w.float() for name, w in load_file(NANO / "model.safetensors").items()})
    return TrainingTracker(source)


@pytest.fixture
def pixels() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def make_identity(lesson: Lesson) -> None:
    """Make the maps hand on each channel as it is."""
    for linear in lesson.maps:
        assert isinstance(linear, torch.nn.Conv2d)
        torch.nn.init.dirac_(linear.weight)


def test_the_teachers_own_features_explain_all_of_them(
    lesson: Lesson, student: TrainingTracker, pixels: Tensor
) -> None:
    """The features of training are at the places of those of inference."""
    with torch.no_grad():
        features = student.encode(pixels)
    make_identity(lesson)
    assert lesson(features, pixels).item() < 1e-3
    turned = Features(*(level.flip(3) for level in features))
    assert lesson(turned, pixels).item() > 0.5


def test_features_that_say_nothing_explain_nothing(
    lesson: Lesson, student: TrainingTracker, pixels: Tensor
) -> None:
    features = Features(*(torch.zeros_like(level) for level in student.encode(pixels)))
    assert lesson(features, pixels).item() == pytest.approx(1.0, abs=0.01)


def test_the_student_learns_and_the_teacher_does_not(
    lesson: Lesson, student: TrainingTracker, pixels: Tensor
) -> None:
    make_identity(lesson)
    lesson(student.encode(pixels.flip(3)), pixels).backward()
    patches = student.source.vision_encoder.backbone.patch_embed
    assert all(p.grad is not None and bool(p.grad.any()) for p in patches.parameters())
    assert {name.split(".")[0] for name in lesson.state_dict()} == {"maps"}
    assert all(p.grad is not None for p in lesson.parameters())


def test_a_run_resumes_with_its_lesson(lesson: Lesson, tmp_path: Path) -> None:
    write_rectangles(tmp_path / "scenes")
    trainer = LessonTrainer(tmp_path / "out", CPU, lesson)
    trainer.run([FRAMES], Sources(tmp_path / "scenes", tmp_path / "cache"), workers=0)
    assert "unlike" in (tmp_path / "out" / "log.jsonl").read_text()
    again = LessonTrainer(tmp_path / "out", CPU, Lesson("nano", "float32"))
    for held, kept in zip(again.lesson.parameters(), lesson.parameters(), strict=True):
        assert torch.equal(held, kept)


def test_a_step_on_clips_leaves_the_maps_as_they_are(lesson: Lesson, tmp_path: Path) -> None:
    write_rectangles(tmp_path / "scenes")
    trainer = LessonTrainer(tmp_path / "out", CPU, lesson)
    sources = Sources(tmp_path / "scenes", tmp_path)
    trainer.run([FRAMES], sources, workers=0)
    before = [parameter.detach().clone() for parameter in lesson.parameters()]
    assert all(bool(parameter.any()) for parameter in before)
    trainer.run([FRAMES, CLIPS], sources, workers=0)
    assert all(torch.equal(a, b) for a, b in zip(before, lesson.parameters(), strict=True))
