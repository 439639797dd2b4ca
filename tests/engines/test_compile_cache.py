"""The folder of what torch.compile has made."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from sam3_node.engines.inductor import CACHE, keep_compiled


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "restored afterwards")
    monkeypatch.delenv(CACHE)


@pytest.mark.parametrize("asked", [False, True])
def test_torch_keeps_it_where_it_is_told(tmp_path: Path, asked: bool) -> None:
    if asked:
        cache_dir()  # sets the environment
    keep_compiled(tmp_path / "engines")
    assert cache_dir() == str(tmp_path / "engines" / "compiled")


def test_a_place_that_the_environment_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "mine"))
    keep_compiled(tmp_path / "engines")
    assert cache_dir() == str(tmp_path / "mine")
    assert not (tmp_path / "engines").exists()


def test_a_folder_that_cannot_be_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    keep_compiled(tmp_path / "file")
    assert not cache_dir().startswith(str(tmp_path))
    assert "compiled stages are not kept" in caplog.text
