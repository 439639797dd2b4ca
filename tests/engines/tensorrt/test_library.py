"""Errors without the TensorRT library."""

from __future__ import annotations

import sys

import pytest

from sam3_node.cli import main as cli
from sam3_node.engines.tensorrt.builder import PACKAGES, find_library
from sam3_node.errors import MissingExtraError


@pytest.fixture
def without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_tensorrt")
def test_a_missing_library_is_told_with_its_extras() -> None:
    with pytest.raises(MissingExtraError, match=r"sam3-node\[tensorrt\].*sam3-node\[tensorrt-rtx\]"):
        find_library()


@pytest.mark.usefixtures("without_tensorrt")
def test_a_build_without_the_library_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "build", "--gpu", "sm89"]) == 2
    assert "found neither" in capsys.readouterr().err
