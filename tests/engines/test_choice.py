"""Options that the settings leave open: on a GPU, the first start times them."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.engines import choice
from sam3_node.engines.choice import Choice, choose, find_path
from sam3_node.engines.slot import GateClip
from sam3_node.errors import DeviceError, EngineError
from sam3_node.models import TrackerModel
from sam3_node.settings import Settings
from tests.support.refuses import refuses
from tests.support.tiny import random_source, stages_of

OFF = {"engine.read_kernel": "torch", "model.compile": False, "engine.graphs": False}


class Machine:
    """A GPU on which an encoder takes 10 ms, less what each option saves; options in `broken` raise these errors."""

    def __init__(self, saved_ms: dict[str, float], broken: dict[str, Exception] | None = None) -> None:
        self.saved_ms, self.broken, self.loads = saved_ms, broken or {}, list[dict[str, Any]]()
        self.seconds = 0.0

    def load(self, settings: Settings) -> TrackerModel:
        values = values_of(settings)
        self.loads.append(values)
        on = [name for name, value in values.items() if value != OFF[name]]
        for name in on:
            if name in self.broken:
                raise self.broken[name]
        model = stages_of(random_source("sam3", hidden=64, size=56))
        encode = model.stages.encode

        def run(pixels: torch.Tensor) -> Any:
            self.seconds += (10 - sum(self.saved_ms[name] for name in on)) / 1e3
            return encode(pixels)

        model.stages = model.stages._replace(encode=run)
        return model

    def clock(self, device: torch.device) -> float:
        return self.seconds


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(choice, "pick_device", lambda name: torch.device("cuda" if name == "auto" else name))
    frame = np.zeros((48, 64, 3), np.uint8)
    monkeypatch.setattr(choice, "read_gate_clip", lambda: GateClip([frame] * 4, {1: (0.1, 0.1, 0.6, 0.6)}))
    return Settings(engine={"folder": tmp_path})


def kept(settings: Settings) -> Choice:
    found = Choice.load(find_path(settings))
    assert found is not None
    return found


def values_of(settings: Settings) -> dict[str, Any]:
    return {name: attrgetter(name)(settings) for name in OFF}


def test_a_cpu_has_no_options_and_times_nothing(settings: Settings) -> None:
    machine = Machine(dict.fromkeys(OFF, 1.0))
    model = settings.model.model_copy(update={"device": "cpu"})
    assert values_of(choose(settings.model_copy(update={"model": model}), machine.load)) == OFF
    assert not machine.loads


def test_each_option_stays_if_it_is_faster(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    machine = Machine({"engine.read_kernel": 3.0, "model.compile": -1.0, "engine.graphs": 0.1})
    chosen = choose(settings, machine.load, machine.clock)
    assert values_of(chosen) == OFF | {"engine.read_kernel": "triton"}
    assert machine.loads[2] == OFF | {"engine.read_kernel": "triton", "model.compile": True}
    assert "a step takes 7 ms with triton, 10 ms without" in caplog.text
    assert "model.compile False: a step takes 8 ms with True, 7 ms without" in caplog.text
    assert chosen.engine.fallback, "only trials are strict"


def test_a_choice_is_made_once_for_weights_versions_and_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(dict.fromkeys(OFF, 1.0))
    first = choose(settings, machine.load, machine.clock)
    loads = len(machine.loads)
    assert loads == 4
    assert choose(settings, machine.load, machine.clock) == first
    assert len(machine.loads) == loads
    monkeypatch.setattr(choice, "find_version", lambda package: "another Triton")
    choose(settings, machine.load, machine.clock)
    assert len(machine.loads) == 2 * loads


def test_a_damaged_choice_is_made_again(settings: Settings) -> None:
    machine = Machine(dict.fromkeys(OFF, 1.0))
    choose(settings, machine.load, machine.clock)
    (path,) = settings.engine.folder.rglob("*.json")
    path.write_text("{")
    choose(settings, machine.load, machine.clock)
    assert kept(settings).values == {
        "engine.read_kernel": "triton",
        "model.compile": True,
        "engine.graphs": True,
    }


def test_settings_that_say_it_decide(settings: Settings) -> None:
    machine = Machine(dict.fromkeys(OFF, 1.0))
    engine = settings.engine.model_copy(update={"read_kernel": "torch", "graphs": False})
    chosen = choose(settings.model_copy(update={"engine": engine}), machine.load, machine.clock)
    assert values_of(chosen) == OFF | {"model.compile": True}
    assert len(machine.loads) == 2


def test_an_option_that_the_gate_refuses_is_left_out_with_its_reason(settings: Settings) -> None:
    refused = EngineError("torch's faster stages refused by the gate: mean mask IoU 0.5")
    machine = Machine(dict.fromkeys(OFF, 1.0), {"engine.read_kernel": refused})
    assert choose(settings, machine.load, machine.clock).engine.read_kernel == "torch"
    assert "mean mask IoU 0.5" in kept(settings).reasons[0]


def test_an_option_that_ends_the_process_is_not_tried_again(settings: Settings) -> None:
    lost = DeviceError("the GPU has failed, and this process can use it no longer")
    machine = Machine(dict.fromkeys(OFF, 1.0), {"model.compile": lost})
    with refuses(DeviceError):
        choose(settings, machine.load, machine.clock)
    machine.loads.clear()
    expected = OFF | {"engine.read_kernel": "triton", "engine.graphs": True}
    assert values_of(choose(settings, machine.load, machine.clock)) == expected
    assert machine.loads == [expected], "what was timed before stays"
