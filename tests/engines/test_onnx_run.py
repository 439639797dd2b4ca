"""A stage run by onnxruntime: its tensors, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sam3_node.engines.export import export
from sam3_node.engines.specs import StageSpec
from sam3_node.errors import EngineError, MissingExtraError
from tests.support.onnx_run import OnnxRun
from tests.support.refuses import refuses
from tests.support.tiny_stage import scaled

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageSpec, Path]:
    return scaled(), export(scaled(), tmp_path_factory.mktemp("small") / "scale.onnx")


@pytest.mark.parametrize("objects", [1, 3, 64])
def test_runs_for_any_number_of_objects(small: tuple[StageSpec, Path], objects: int) -> None:
    stage, path = small
    (values,) = stage.examples(objects)
    assert torch.equal(OnnxRun(path, stage)(values), stage.module(values))


def test_inputs_need_not_be_contiguous(small: tuple[StageSpec, Path]) -> None:
    stage, path = small
    values = torch.randn(4096, 2).T
    assert torch.equal(OnnxRun(path, stage)(values), stage.module(values))


def test_results_of_one_call_outlive_the_next(small: tuple[StageSpec, Path]) -> None:
    stage, path = small
    run = OnnxRun(path, stage)
    first, second = (stage.examples(2, seed=seed)[0] for seed in (1, 2))
    results = run(first), run(second)
    assert torch.equal(results[0], stage.module(first))
    assert torch.equal(results[1], stage.module(second))


def test_a_file_that_cannot_be_read_is_an_error(small: tuple[StageSpec, Path], tmp_path: Path) -> None:
    stage, path = small
    with refuses(EngineError, field=("scale", "ONNX")):
        OnnxRun(tmp_path / "absent.onnx", stage)
    (tmp_path / "damaged.onnx").write_bytes(path.read_bytes()[:999])
    with refuses(EngineError, field="scale"):
        OnnxRun(tmp_path / "damaged.onnx", stage)


@pytest.mark.parametrize("other", [scaled(side=5), scaled(dtype=torch.float16)])
def test_a_file_that_is_not_this_stage_is_refused(small: tuple[StageSpec, Path], other: StageSpec) -> None:
    with refuses(EngineError, field=("stage", "inputs")):
        OnnxRun(small[1], other)


@pytest.mark.parametrize(
    "inputs",
    [(), (None,), (torch.zeros(4096),), (torch.zeros(2, 5),), (torch.zeros(2, 4096).double(),)],
    ids=["none", "nothing", "one axis", "narrow", "double"],
)
def test_wrong_inputs_are_refused(small: tuple[StageSpec, Path], inputs: tuple) -> None:
    run = OnnxRun(small[1], small[0])
    with refuses(EngineError, field=("scale", "4096", "float32")):
        run(*inputs)
    assert run(torch.ones(2, 4096)).shape == (2, 4096)


def test_an_operator_that_onnxruntime_lacks_is_an_error(tmp_path: Path) -> None:
    """onnxruntime has no multiplication of bfloat16 for a CPU."""
    stage = scaled(dtype=torch.bfloat16)
    path = export(stage, tmp_path / "scale.onnx")
    with refuses(EngineError, field=("scale", "CPU")):
        OnnxRun(path, stage)


def test_a_missing_runtime_names_its_extra(
    small: tuple[StageSpec, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refuses(MissingExtraError, field="onnx"):
        OnnxRun(small[1], small[0])
