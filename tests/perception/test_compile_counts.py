"""Compilation ends with the warm-up: no live frame and no prompt waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.models import TrackerModel
from sam3_node.models.sam import tracker_model
from sam3_node.perception import perception
from sam3_node.perception.perception import load_models, warm_up
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import DetectorSettings, ModelSettings, Settings, TrackerSettings
from sam3_node.types import Frame, Mask
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.repeats import repetitions
from tests.support.tiny import random_source, tiny_model

SIDE = 64


class CountingBackend:
    """A backend of torch.compile that compiles nothing and counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield CountingBackend()
    torch._dynamo.reset()


def blank(seq: int) -> Frame:
    return Frame("cam", seq, seq, SIDE, SIDE, "bgr8", bytes(SIDE * SIDE * 3))


def test_neither_frames_nor_prompts_compile_after_the_warm_up(
    backend: CountingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = repetitions(4, 16)
    monkeypatch.setattr(tracker_model, "CPU_BATCH", tracker_model.GPU_BATCH)
    settings = Settings(tracker=TrackerSettings(max_objects=objects))
    model = tiny_model(hidden=64, size=56)
    model.compile(backend)
    warm_up(model, settings, model.stages)
    warm, errors = backend.graphs, torch._dynamo.utils.counters["frames"].copy()
    buckets = objects.bit_length()
    assert warm >= 1 + 3 * buckets, "one encoder, and the other stages for 1, 2, 4 and more objects"
    pipeline = Pipeline(model, settings.tracker, "cam")
    pipeline.step(blank(0))
    full = np.zeros((SIDE, SIDE), dtype=np.bool_)
    full[10:30, 10:30] = True
    prompts = [
        FramePrompt(points=[(9, 9)]),
        FramePrompt(points=[(5, 9), (20, 9), (50, 50)], labels=[1, 1, 0]),
        FramePrompt(box=(4, 4, 30, 30)),
        FramePrompt(mask=Mask.from_full(full)),
        FramePrompt(points=[(9, 9), (30, 9)]),
        FramePrompt(box=(4, 4, 30, 30), points=[(9, 9)]),
    ]
    for seq in range(objects):
        prompt = prompts[seq % len(prompts)]
        added = pipeline.add(prompt, seq=seq if seq % 2 else None)
        pipeline.step(blank(seq + 1))
        pipeline.refine(added.id, prompt)
        if prompt.mask is None:
            pipeline.queries.segment(prompt)
    assert len(pipeline.objects) == objects
    assert backend.graphs == warm
    assert torch._dynamo.utils.counters["frames"] == errors, (
        "dynamo gave up on a function, or traced another one"
    )


def test_an_encoder_that_a_detector_shares_is_compiled_once(
    backend: CountingBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The detector is loaded before the warm-up, because sharing adds an output to the encoder."""
    random_source("sam3", hidden=64, size=56).save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(TrackerModel, "compile", partialmethod(TrackerModel.compile, backend))

    def share(detector: object, settings: object, model: TrackerModel, engine: object) -> None:
        model.share_trunk()

    monkeypatch.setattr(perception, "load_configured_detector", share)
    settings = Settings(
        model=ModelSettings(name=str(tmp_path / "tiny"), device="cpu", compile=True),
        tracker=TrackerSettings(max_objects=1),
        detector=DetectorSettings(kind="sam3-concept"),
    )
    model, _ = load_models(settings)
    warm = backend.graphs
    Pipeline(model, settings.tracker, "cam").step(blank(0))
    assert backend.graphs == warm > 0
