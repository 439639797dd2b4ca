"""Atomic writes, and temporary folders that no killed process leaves behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sam3_node.errors import OutputError
from sam3_node.files import atomic_file, prepare_output, temp_dir, write_atomically


def list_temp_dirs(temporary: Path) -> list[Path]:
    return [path for path in temporary.glob("sam3-node-*/*") if path.is_dir()]


def test_a_written_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "value"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert [item.name for item in path.parent.iterdir()] == ["value"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value"
    write_atomically(path, b"old")
    with pytest.raises(UnicodeEncodeError), atomic_file(path) as file:
        file.write("é".encode("ascii"))
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["value"]


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal; from sam3_node.files import temp_dir\n"
        "with temp_dir() as folder: (folder / 'copy').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={"TMPDIR": str(tmp_path)}, timeout=60)
    assert len(list_temp_dirs(tmp_path)) == 1
    with temp_dir() as folder, temp_dir() as other:
        assert sorted(list_temp_dirs(tmp_path)) == sorted([folder, other])
    assert list_temp_dirs(tmp_path) == []


def test_a_missing_temporary_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(OutputError, match="set TMPDIR"), temp_dir():
        pass


def test_an_output_is_prepared_without_a_trace_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "out.png"
    prepare_output(path)
    assert path.parent.is_dir()
    assert not path.exists()
    path.write_bytes(b"earlier")
    prepare_output(path)
    assert path.read_bytes() == b"earlier"
    with pytest.raises(OutputError, match="exists already"):
        prepare_output(path, overwrite=False)
    with pytest.raises(OutputError, match="cannot create the folder"):
        prepare_output(path / "inside")
    with pytest.raises(OutputError, match="cannot write"):
        prepare_output(path.parent)
