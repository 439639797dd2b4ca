"""`sam3-node tune`: it times whole combinations of options on several numbers of objects, and keeps the fastest."""

from operator import attrgetter
from typing import Any

import pytest
import torch

from sam3_node.engines import options, tune
from sam3_node.engines.engine_store import FP8
from sam3_node.engines.options import COMPILE, GRAPHS, KERNEL, PRECISION, Trial, Tuning, find_path, resolve
from sam3_node.engines.tune import find_best, list_combinations, list_rows, time_step
from sam3_node.errors import DeviceError, EngineError
from sam3_node.models import TrackerModel
from sam3_node.settings import Settings
from tests.engines.test_options import pretend_gpu
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.engines
COUNTS = (1, 3)


class Machine:
    """A GPU on which a step takes some ms for each number of objects, by its options.

    Compiling helps one object and hurts three; graphs help both; the kernels help only what is compiled. Values in
    `broken` raise their errors where they are loaded.
    """

    def __init__(self, broken: dict[Any, Exception] | None = None) -> None:
        self.broken = broken or {}
        self.loads: list[dict[str, Any]] = []

    def load(self, settings: Settings) -> TrackerModel:
        values = {name: attrgetter(name)(settings) for name in (COMPILE, GRAPHS, KERNEL, PRECISION)}
        self.loads.append(values)
        for name, value in values.items():
            if (name, value) in self.broken:
                raise self.broken[name, value]
        assert not settings.engine.fallback, "a refusal must not be hidden by a slower option"
        model = tiny_model(hidden=64, size=56)
        model.name = repr(values)
        return model

    def time(self, model: TrackerModel, objects: int, clock: object) -> float:
        values = eval(model.name)
        ms = 20.0 * objects
        if values[GRAPHS]:
            ms -= 5.0
        if values[COMPILE]:
            ms += -4.0 if objects == 1 else 3.0
            ms -= 9.0 * objects * (values[KERNEL] == "triton")
        return ms


@pytest.fixture
def settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Settings:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(tune, "pick_device", options.pick_device)
    monkeypatch.setattr(tune.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(tune, "keep_launch", lambda device, folder: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return Settings(engine={"folder": tmp_path})


def run(settings: Settings, machine: Machine, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Tuning:
    monkeypatch.setattr(tune, "time_step", machine.time)
    return tune.tune(settings, machine.load, COUNTS, **how)


def test_combinations_are_tried_as_a_whole(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither compiling nor the kernels help alone."""
    machine = Machine()
    tuning = run(settings, machine, monkeypatch)
    assert len(tuning.trials) == len(machine.loads) == 8
    assert tuning.best is not None
    best = tuning.trials[tuning.best]
    assert (best.values[COMPILE], best.values[KERNEL], best.values[GRAPHS]) == (True, "triton", True)
    assert set(best.ms) == set(COUNTS)
    chosen = resolve(settings)
    assert (chosen.model.compile, chosen.engine.read_kernel, chosen.engine.graphs) == (True, "triton", True)
    assert chosen.engine.fallback, "only trials are strict"


def test_the_table_says_what_each_combination_takes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = EngineError("refused by the gate: mean mask IoU 0.5")
    shown = list[tuple[int, int]]()
    tuning = run(
        settings,
        Machine({(GRAPHS, False): error}),
        monkeypatch,
        report=lambda what, done, total: shown.append((done, total)),
    )
    header, *rows = list_rows(tuning)
    assert [f"{count} objects" in header for count in COUNTS] == [True, True]
    assert len(rows) == len(tuning.trials)
    assert sum("mean mask IoU 0.5" in row[-1] for row in rows) == 4
    assert shown == [(number, 8) for number in range(8)]


def test_a_tuning_that_was_stopped_goes_on(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = DeviceError("the GPU has failed, and this process can use it no longer")
    machine = Machine({(KERNEL, "torch"): lost})
    with refuses(DeviceError):
        run(settings, machine, monkeypatch)
    stopped = Tuning.load(tune.find_part(find_path(settings)))
    assert stopped is not None
    assert stopped.best is None
    assert stopped.trials[-1].refused == tune.ENDED
    machine.broken.clear()
    done = len(stopped.trials)
    machine.loads.clear()
    tuning = run(settings, machine, monkeypatch)
    assert len(machine.loads) == 8 - done, "neither what was timed nor what ended the process is tried again"
    assert tuning.trials[:done] == stopped.trials
    machine.loads.clear()
    run(settings, machine, monkeypatch)
    assert len(machine.loads) == 8, "a tuning that has ended begins anew"


def test_a_new_tuning_serves_when_it_has_ended(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    finished = run(settings, machine, monkeypatch)
    machine.broken[KERNEL, "torch"] = DeviceError("the GPU has failed, and this process can use it no longer")
    with refuses(DeviceError):
        run(settings, machine, monkeypatch)
    assert options.find_tuning(settings) == finished


def test_a_trial_that_the_user_ends_is_made_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()

    def interrupt(*args: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "time_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(settings, machine.load, COUNTS)
    tuning = run(settings, machine, monkeypatch)
    assert all(not trial.refused for trial in tuning.trials)


def test_kernels_without_a_launch_leave_the_other_trials(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no ptxas for this GPU")

    monkeypatch.setattr(tune, "keep_launch", fail)
    tuning = run(settings, Machine(), monkeypatch)
    assert tuning.best is not None
    assert "no ptxas for this GPU" in caplog.text


def test_our_kernels_are_no_choice_in_float32(settings: Settings) -> None:
    given = options.replace_values(settings, {options.DTYPE: "float32"})
    assert {values[KERNEL] for values in list_combinations(given)} == {"torch"}


def test_fp8_is_tried_with_scales_and_what_joins_its_rounding(settings: Settings, tmp_path: Any) -> None:
    assert all(FP8 not in values.values() for values in list_combinations(settings))
    scales = settings.engine.model_copy(update={"scales": tmp_path / "scales.json"})
    found = list(list_combinations(settings.model_copy(update={"engine": scales})))
    tried = {(values[COMPILE], values[KERNEL]) for values in found if values[PRECISION] == FP8}
    assert tried == {(True, "triton"), (True, "torch"), (False, "triton")}


def test_what_settings_name_is_not_tried(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options.replace_values(settings, {COMPILE: False, KERNEL: "torch"})
    assert [values[GRAPHS] for values in list_combinations(given)] == [True, False]
    decided = options.replace_values(given, {GRAPHS: True, PRECISION: "bfloat16", options.DTYPE: "bfloat16"})
    with refuses(EngineError, field=("model.compile", "auto")):
        run(decided, Machine(), monkeypatch)


def test_a_small_gain_is_noise() -> None:
    times = [Trial({}, {1: 10.0, 4: 20.0}), Trial({}, {1: 9.9, 4: 19.7}), Trial({}, {1: 9.0, 4: 20.0})]
    assert find_best(times) == 2
    assert find_best(times[:2]) == 0
    with refuses(EngineError, field="no memory"):
        find_best([Trial({}, refused="no memory")])


def test_a_step_is_timed_with_full_banks() -> None:
    model = tiny_model(hidden=64, size=56)
    seconds = iter(float(number) for number in range(1000))
    assert time_step(model, 2, clock=lambda device: next(seconds)) == 1000.0
