"""The cache folder of torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from sam3_node.engines.inductor import CACHE_VARIABLE, keep_compiled


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "restored afterwards")
    monkeypatch.delenv(CACHE_VARIABLE)


@pytest.mark.parametrize("cached", [False, True])
def test_the_cache_is_in_the_folder_of_engines(tmp_path: Path, cached: bool) -> None:
    if cached:
        cache_dir()  # sets the environment
    keep_compiled(tmp_path / "engines")
    assert cache_dir() == str(tmp_path / "engines" / "compiled")


def test_a_folder_that_the_environment_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    keep_compiled(tmp_path / "engines")
    assert cache_dir() == str(tmp_path / "mine")
    assert not (tmp_path / "engines").exists()


def test_a_folder_that_cannot_be_made_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    keep_compiled(tmp_path / "file")
    assert not cache_dir().startswith(str(tmp_path))
    assert "compiled stages are not kept" in caplog.text


@pytest.mark.parametrize("place", ["engines", "engines/compiled"])
def test_a_folder_that_others_can_write_is_skipped(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "engines").mkdir(mode=0o755)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place).chmod(0o775)
    keep_compiled(tmp_path / "engines")
    assert not cache_dir().startswith(str(tmp_path))
    assert "compiled stages are not kept" in caplog.text
    assert "chmod -R go-w" in caplog.text
