"""What of the Triton exports needs no ONNX: names that a server does not have, and folders of ensembles."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sam3_node.engines.triton_server import ENSEMBLE, ENSEMBLE_FILE, ServedModel, _write_model
from tests.support.paths import ROOT


class StandIn:
    """A server that finds two names, and is asked for nothing else."""

    def __init__(self, url: str) -> None:
        pass

    def get_model_config(self, name: str) -> dict[str, Any]:
        return {"input": [{"dims": [3, 8, 8]}], "parameters": {"names": {"string_value": "red mug,box"}}}


@pytest.mark.parametrize("names", [["cup"], ["box", "cup"], "cup", ("mug",)])
def test_a_name_that_is_not_served_is_told(monkeypatch: pytest.MonkeyPatch, names: Any) -> None:
    package = ModuleType("tritonclient.http")
    package.InferenceServerClient = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tritonclient", ModuleType("tritonclient"))
    monkeypatch.setitem(sys.modules, "tritonclient.http", package)
    spec = importlib.util.spec_from_file_location("triton_client", ROOT / "examples" / "triton_client.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError, match=r"red mug,box, which are served; found (cup|mug)"):
        module.Segmenter("sam3").predict(names=names)


def test_the_folder_of_an_ensemble_is_not_empty(tmp_path: Path) -> None:
    """An object store or a repository keeps no empty folder, and a server takes no model without one."""
    _write_model(tmp_path / "whole", ServedModel({"name": "whole", "platform": ENSEMBLE}), None)
    assert [path.name for path in (tmp_path / "whole" / "1").iterdir()] == [ENSEMBLE_FILE]
