"""Options that the settings leave open: on a GPU, the first start times them."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.engines import choice, fast_torch
from sam3_node.engines.choice import Choice, _replace, choose, describe, find_path
from sam3_node.engines.engine_store import FP8
from sam3_node.engines.quantize import Scales
from sam3_node.engines.slot import GateClip
from sam3_node.errors import DeviceError, EngineError
from sam3_node.models import TrackerModel
from sam3_node.models.checkpoints import cast_source
from sam3_node.models.weight_files import pick_dtype
from sam3_node.settings import Settings
from tests.support.refuses import refuses
from tests.support.tiny import random_source, stages_of

CPU = torch.device("cpu")
OFF = {"engine.read_kernel": "torch", "model.compile": False, "engine.graphs": False}
H100_MS = {"bfloat16": 10.0, "float16": 10.0, "float32": 60.0}
T4_MS = {"bfloat16": 900.0, "float16": 100.0, "float32": 300.0}
"""Milliseconds of an encoder; a T4 has no units for bfloat16."""


def tiny_in(dtype: str | torch.dtype, seed: int = 0) -> TrackerModel:
    source = random_source("sam3", seed, presence=8.0, hidden=64, size=56)
    return stages_of(cast_source(source, CPU, pick_dtype(dtype, CPU)))


class Machine:
    """A GPU whose encoder takes `times_ms` in each dtype, less what each option saves, 1 ms by default.

    Values in `broken` raise these errors where they are loaded. Weights in `wrong`, a dtype, are other ones.
    """

    def __init__(
        self,
        broken: dict[Any, Exception] | None = None,
        times_ms: dict[str, float] = H100_MS,
        wrong: str = "",
        **saved_ms: float,
    ) -> None:
        self.broken, self.loads = broken or {}, list[dict[str, Any]]()
        self.times_ms, self.wrong, self.seconds = times_ms, wrong, 0.0
        self.saved_ms = {name: saved_ms.get(name.partition(".")[2], 1.0) for name in OFF}

    def load(self, settings: Settings) -> TrackerModel:
        values = values_of(settings)
        self.loads.append(values)
        on = [name for name, value in values.items() if value != OFF[name]]
        for name in (*on, settings.model.dtype, *([FP8] if settings.engine.precision == FP8 else [])):
            if name in self.broken:
                raise self.broken[name]
        model = tiny_in(settings.model.dtype, seed=int(settings.model.dtype == self.wrong))
        encode = model.stages.encode
        saved_ms = sum(self.saved_ms[name] for name in on) + 4.0 * (settings.engine.precision == FP8)

        def run(pixels: torch.Tensor) -> Any:
            self.seconds += (self.times_ms[settings.model.dtype] - saved_ms) / 1e3
            return encode(pixels)

        model.stages = model.stages._replace(encode=run)
        return model

    def clock(self, device: torch.device) -> float:
        return self.seconds


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with an arithmetic, and all other options open; the gate's reference is a machine's model."""
    monkeypatch.setattr(choice, "pick_device", lambda name: torch.device("cuda" if name == "auto" else name))
    monkeypatch.setattr(fast_torch, "load_model_in", lambda settings, dtype: tiny_in(dtype))
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    clip = GateClip([image] * 4, {1: (0.1, 0.1, 0.6, 0.6)})
    for module in (choice, fast_torch):
        monkeypatch.setattr(module, "read_gate_clip", lambda: clip)
    engine = {"folder": tmp_path, "precision": "bfloat16", "min_cosine": 0.98, "min_iou": 0.9}
    return Settings(model={"dtype": "bfloat16"}, engine=engine)


def kept(settings: Settings) -> Choice:
    found = Choice.load(find_path(settings))
    assert found is not None
    return found


def values_of(settings: Settings) -> dict[str, Any]:
    return {name: attrgetter(name)(settings) for name in OFF}


def test_a_cpu_has_no_options_and_times_nothing(settings: Settings) -> None:
    machine = Machine()
    assert values_of(choose(_replace(settings, {"model.device": "cpu"}), machine.load)) == OFF
    assert not machine.loads
    arithmetic = {"model.device": "cpu", "model.dtype": "auto", "engine.precision": "auto"}
    chosen = choose(_replace(settings, arithmetic), machine.load)
    assert (chosen.model.dtype, chosen.engine.precision) == ("auto", "bfloat16"), "a CPU chooses later"


def test_each_option_stays_if_it_is_faster(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    machine = Machine(read_kernel=3.0, compile=-1.0, graphs=0.1)
    chosen = choose(settings, machine.load, machine.clock)
    assert values_of(chosen) == OFF | {"engine.read_kernel": "triton"}
    assert machine.loads[2] == OFF | {"engine.read_kernel": "triton", "model.compile": True}
    assert "engine.read_kernel triton: torch takes 10 ms a step; triton takes 7 ms a step" in caplog.text
    assert "model.compile False: False takes 7 ms a step; True takes 8 ms a step" in caplog.text
    assert chosen.engine.fallback, "only trials are strict"


def test_a_choice_is_made_once_for_weights_versions_and_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    first = choose(settings, machine.load, machine.clock)
    loads = len(machine.loads)
    assert loads == 4
    assert choose(settings, machine.load, machine.clock) == first
    assert len(machine.loads) == loads
    monkeypatch.setattr(fast_torch, "find_version", lambda package: "another Triton")
    choose(settings, machine.load, machine.clock)
    assert len(machine.loads) == 2 * loads
    for path in settings.engine.folder.rglob("*.json"):
        path.write_text("{")
    assert choose(settings, machine.load, machine.clock) == first, "a damaged choice is made again"
    assert len(machine.loads) == 3 * loads
    assert kept(settings).values == values_of(first)


def test_settings_that_say_it_decide(settings: Settings) -> None:
    machine = Machine()
    given = _replace(settings, {"engine.read_kernel": "torch", "engine.graphs": False})
    chosen = choose(given, machine.load, machine.clock)
    assert values_of(chosen) == OFF | {"model.compile": True}
    assert len(machine.loads) == 2


def test_an_option_that_the_gate_refuses_is_left_out_with_its_reason(settings: Settings) -> None:
    refused = EngineError("torch's faster stages refused by the gate: mean mask IoU 0.5")
    machine = Machine({"engine.read_kernel": refused})
    assert choose(settings, machine.load, machine.clock).engine.read_kernel == "torch"
    assert "mean mask IoU 0.5" in kept(settings).reasons[0]


def test_an_option_that_ends_the_process_is_not_tried_again(settings: Settings) -> None:
    lost = DeviceError("the GPU has failed, and this process can use it no longer")
    machine = Machine({"model.compile": lost})
    with refuses(DeviceError):
        choose(settings, machine.load, machine.clock)
    machine.loads.clear()
    expected = OFF | {"engine.read_kernel": "triton", "engine.graphs": True}
    assert values_of(choose(settings, machine.load, machine.clock)) == expected
    assert machine.loads == [expected], "what was timed before stays"


NO_KERNEL = RuntimeError("no kernel image is available for execution on the device")
REFUSED = "cannot serve here: EngineError: refused by the gate: "
FAILED = "cannot serve here: RuntimeError: no kernel image"


@pytest.mark.parametrize(
    ("machine", "expected", "reason"),
    [
        (Machine(), "bfloat16", "bfloat16 takes 10 ms a step; float16 takes 10 ms a step; float32 takes 60"),
        (Machine(times_ms=T4_MS), "float16", "bfloat16 takes 900 ms a step; float16 takes 100 ms a step"),
        (Machine(times_ms=T4_MS, wrong="float16"), "float32", f"float16 {REFUSED}"),
        (Machine(wrong="bfloat16"), "float16", f"bfloat16 {REFUSED}"),
        (Machine({"bfloat16": NO_KERNEL}, T4_MS), "float16", f"bfloat16 {FAILED}"),
        (Machine(dict.fromkeys(T4_MS, NO_KERNEL)), "bfloat16", f"float32 {FAILED}"),
    ],
)
def test_the_fastest_dtype_that_the_gate_passes_serves(
    machine: Machine, expected: str, reason: str, settings: Settings
) -> None:
    given = _replace(settings, OFF | {"model.dtype": "auto"})
    assert describe(given) == ("not chosen yet: the first start of the node times the options",)
    chosen = choose(given, machine.load, machine.clock)
    assert chosen.model.dtype == expected, describe(given)
    (line,) = describe(given)
    assert line.startswith(f"model.dtype {expected}: ")
    assert reason in line
    assert choose(given, machine.load, machine.clock) == chosen
    assert len(machine.loads) == 3, "the second start times nothing"


def test_what_cannot_be_compared_serves_as_before(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(settings: Settings, dtype: torch.dtype) -> TrackerModel:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fast_torch, "load_model_in", fail)
    machine = Machine(times_ms=H100_MS | {"float16": 5.0}, compile=3.0)
    given = _replace(settings, OFF | {"model.dtype": "auto", "model.compile": "auto"})
    chosen = choose(given, machine.load, machine.clock)
    assert (chosen.model.dtype, chosen.model.compile) == ("bfloat16", True)
    expected = r"bfloat16 takes 10 ms a step; float16 cannot serve here: .*memory.*; float32 takes 60 ms"
    assert re.search(expected, kept(given).reasons[0])


@pytest.mark.parametrize(
    ("refused", "expected", "reason"),
    [
        ({}, "fp8", "bfloat16 takes 10 ms a step; fp8 takes 6 ms a step"),
        ({"fp8": EngineError("refused by the gate: mean IoU 0.5")}, "bfloat16", "gate: mean IoU 0.5"),
    ],
)
def test_fp8_is_tried_with_scales(
    refused: dict[Any, Exception], expected: str, reason: str, settings: Settings, tmp_path: Path
) -> None:
    machine, given = Machine(refused), _replace(settings, OFF | {"engine.precision": "auto"})
    assert choose(given, machine.load, machine.clock).engine.precision == "bfloat16"
    assert len(machine.loads) == 1
    assert "calibrate fp8" in kept(given).reasons[0]
    for amax in (4.0, 5.0):
        machine.loads.clear()
        scales = tmp_path / "scales.json"
        Scales(model="tiny", digest="0" * 64, frames=1, amax={"layer": amax}).save(scales)
        with_scales = _replace(given, {"engine.scales": scales})
        assert choose(with_scales, machine.load, machine.clock).engine.precision == expected
        assert len(machine.loads) == 2, "other scales are tried anew"
        assert reason in kept(with_scales).reasons[0]
