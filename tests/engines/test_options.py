"""Options that settings leave open: fixed defaults by device, or what a tuning has found on this machine."""

from operator import attrgetter
from typing import Any

import pytest
import torch

from sam3_node.engines import fast_torch, options
from sam3_node.engines.options import (
    COMPILE,
    DTYPE,
    GRAPHS,
    KERNEL,
    OPTIONS,
    PRECISION,
    Trial,
    Tuning,
    describe,
    find_defaults,
    find_path,
    replace_values,
    resolve,
)
from sam3_node.settings import Settings

CUDA = torch.device("cuda")
H100 = (9, 0)
T4 = (7, 5)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = H100) -> None:
    """Let `auto` mean a GPU of this capability, which cannot compute."""
    monkeypatch.setattr(options, "pick_device", lambda name: torch.device("cuda" if name == "auto" else name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fast_torch, "identify_setup", lambda settings: "a setup")


@pytest.fixture
def settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Settings:
    pretend_gpu(monkeypatch)
    return Settings(engine={"folder": tmp_path})


def values_of(settings: Settings) -> dict[str, Any]:
    return {name: attrgetter(name)(settings) for name in OPTIONS}


def tuned(settings: Settings, **values: str | bool) -> Tuning:
    """Keep a tuning whose second trial serves."""
    names = {"dtype": DTYPE, "read_kernel": KERNEL, "compile": COMPILE, "graphs": GRAPHS}
    best = Trial({names[name]: value for name, value in values.items()}, {1: 16.21, 4: 22.0, 16: 38.0})
    tuning = Tuning(
        (1, 4, 16), (Trial({COMPILE: False}, {1: 20.0, 4: 30.0, 16: 60.0}), best), 1, "2026-11-26"
    )
    tuning.save(find_path(settings))
    return tuning


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(H100, "bfloat16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16"), (T4, "float32")],
)
def test_a_gpu_has_fixed_defaults(
    capability: tuple[int, int], dtype: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    expected = {DTYPE: dtype, KERNEL: "auto", COMPILE: False, GRAPHS: True, PRECISION: "bfloat16"}
    assert values_of(resolve(settings)) == expected


def test_a_gpu_of_another_maker_runs_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    assert find_defaults(CUDA) == {DTYPE: "bfloat16", COMPILE: False, GRAPHS: False, PRECISION: "bfloat16"}


def test_a_cpu_compiles_and_captures_nothing_and_chooses_its_dtype_later(settings: Settings) -> None:
    chosen = resolve(replace_values(settings, {"model.device": "cpu"}))
    assert values_of(chosen) == {
        DTYPE: "auto",
        KERNEL: "auto",
        COMPILE: False,
        GRAPHS: False,
        PRECISION: "bfloat16",
    }
    assert describe(replace_values(settings, {"model.device": "cpu"}), None) == ()


def test_engines_have_kernels_of_their_own(settings: Settings) -> None:
    chosen = resolve(replace_values(settings, {"engine.kind": "tensorrt"}))
    assert values_of(chosen) == {
        DTYPE: "auto",
        KERNEL: "torch",
        COMPILE: False,
        GRAPHS: False,
        PRECISION: "bfloat16",
    }


def test_what_was_tuned_serves_and_one_line_says_so(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    resolve(settings)
    assert len(caplog.messages) == 1
    assert "sam3-node tune" in caplog.text
    caplog.clear()
    tuned(settings, compile=True, read_kernel="torch")
    chosen = resolve(settings)
    assert (chosen.model.compile, chosen.engine.read_kernel) == (True, "torch")
    assert len(caplog.messages) == 1
    assert "16.2, 22.0 and 38.0 ms with 1, 4 and 16 objects" in caplog.text
    caplog.clear()
    assert values_of(resolve(chosen)) == values_of(chosen)
    assert not caplog.messages, "what is decided is not said again"


def test_settings_that_name_a_value_decide(settings: Settings) -> None:
    given = replace_values(settings, {GRAPHS: False, DTYPE: "float32", COMPILE: True})
    chosen = resolve(given)
    assert (chosen.engine.graphs, chosen.model.dtype, chosen.model.compile) == (False, "float32", True)


def test_a_tuning_is_of_these_weights_versions_and_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(settings, compile=True)
    assert resolve(settings).model.compile is True
    assert resolve(replace_values(settings, {"tracker.read": "pooled"})).model.compile is False
    monkeypatch.setattr(fast_torch, "find_version", lambda package: "another Triton")
    assert resolve(settings).model.compile is False


def test_a_damaged_tuning_is_ignored(settings: Settings) -> None:
    tuned(settings, compile=True)
    for path in settings.engine.folder.rglob("*.json"):
        path.write_text("{")
    assert resolve(settings).model.compile is False


def test_an_unfinished_tuning_serves_nothing(settings: Settings) -> None:
    Tuning((1,), (Trial({COMPILE: True}, {1: 1.0}),)).save(find_path(settings))
    assert resolve(settings).model.compile is False
