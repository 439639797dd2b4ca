"""Atomic writes, and temporary folders that no killed process leaves behind."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sam3_node import files
from sam3_node.errors import OutputError
from tests.support.hostility import link_to_device, make_pipe
from tests.support.patience import PATIENCE_S
from tests.support.refuses import refuses
from tests.support.resources import nothing_added
from tests.support.tables import each_row


def list_temp_dirs(temporary: Path) -> list[Path]:
    return [path for path in temporary.glob("sam3-node-*/*") if path.is_dir()]


def test_a_written_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "value"
    files.write_atomically(path, b"first")
    files.write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert [item.name for item in path.parent.iterdir()] == ["value"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value"
    files.write_atomically(path, b"old")
    with pytest.raises(UnicodeEncodeError), files.atomic_file(path) as file:
        file.write("é".encode("ascii"))
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["value"]


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal; from sam3_node.files import temp_dir\n"
        "with temp_dir() as folder: (folder / 'copy').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={"TMPDIR": str(tmp_path)}, timeout=PATIENCE_S)
    assert len(list_temp_dirs(tmp_path)) == 1
    with files.temp_dir() as folder, files.temp_dir() as other:
        assert sorted(list_temp_dirs(tmp_path)) == sorted([folder, other])
    assert list_temp_dirs(tmp_path) == []


def test_a_missing_temporary_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with refuses(OutputError, field="TMPDIR"), files.temp_dir():
        pass


def test_an_output_is_prepared_without_a_trace_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "out.png"
    files.prepare_output(path)
    assert path.parent.is_dir()
    assert not path.exists()
    path.write_bytes(b"earlier")
    files.prepare_output(path)
    assert path.read_bytes() == b"earlier"
    with refuses(OutputError, field=("exists", "already")):
        files.prepare_output(path, overwrite=False)
    with refuses(OutputError, field=("create", "folder")):
        files.prepare_output(path / "inside")
    with refuses(OutputError, field="write"):
        files.prepare_output(path.parent)


def test_a_symbolic_link_in_place_of_an_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f"value{files.UNFINISHED}").symlink_to(victim)
    files.write_atomically(tmp_path / "value", b"new")
    assert (victim.read_text(), (tmp_path / "value").read_bytes()) == ("mine", b"new")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the folder that holds the temporary folders of this user; it does not exist."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"sam3-node-{os.getuid()}"


def test_temporary_folders_are_for_their_user_alone(root: Path) -> None:
    with files.temp_dir() as folder:
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert folder.parent == root


def test_a_folder_removed_meanwhile_is_no_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "work-removed"])
    with files.temp_dir() as folder:
        assert folder.parent == root


def test_a_symbolic_link_in_place_of_the_temporary_folder_is_refused(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / files.GUARD).write_text("mine")
    (home / "old.lock").touch()
    root.symlink_to(home)
    with refuses(OutputError, field="TMPDIR"), files.temp_dir():
        pass
    assert sorted(path.name for path in home.iterdir()) == [files.GUARD, "old.lock"]
    assert (home / files.GUARD).read_text() == "mine"


def test_a_symbolic_link_in_place_of_the_guard_is_not_followed(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root.mkdir(mode=0o700)
    (root / files.GUARD).symlink_to(victim)
    with refuses(OutputError, field="TMPDIR"), files.temp_dir():
        pass
    assert victim.read_text() == "mine"


def test_a_temporary_folder_that_others_can_write_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with refuses(OutputError, field="0777"), files.temp_dir():
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_temporary_folder_of_another_user_is_refused(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)
    with refuses(OutputError, field="12345"), files.temp_dir():
        pass


@each_row("name", ["", ".", "..", "a/b", "/a", "../a", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with refuses(OutputError, field=("name", "file")):
        files.child_path(tmp_path, name)


def test_a_name_of_a_file_is_taken(tmp_path: Path) -> None:
    assert files.child_path(tmp_path, "..a") == tmp_path / "..a"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
        (b"/annex/objects/SHA256E-s5--00.mp4\n", "git annex get"),
        (b"", "an empty file"),
        (b"version 2 of something else", None),
        (b"\x89PNG", None),
    ],
)
def test_stand_ins_of_files_are_known_with_advice(
    tmp_path: Path, content: bytes, expected: str | None
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    found = files.describe_stand_in(path)
    assert found is None if expected is None else expected in str(found)


def test_links_to_absent_files_are_stand_ins(tmp_path: Path) -> None:
    for target, expected in (
        ("../.git/annex/objects/a", "git annex get"),
        ("../../blobs/a", "../../blobs/a"),
    ):
        path = tmp_path / target.replace("/", "_")
        path.symlink_to(target)
        assert expected in str(files.describe_stand_in(path))
    (tmp_path / "whole").write_bytes(b"content")
    (tmp_path / "link").symlink_to("whole")
    for path in (tmp_path / "link", tmp_path / "absent", tmp_path):
        assert files.describe_stand_in(path) is None


def test_a_regular_file_is_read_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"12345")
    assert files.read_regular(path, 5) == b"12345"
    with pytest.raises(files.IrregularFileError, match="at most 4 bytes, found 5"):
        files.read_regular(path, 4)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert files.read_regular(link, 5) == b"12345", "a link is followed"


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_what_blocks_or_never_ends_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "value"
    if kind == "a pipe":
        make_pipe(path)
    elif kind == "a device":
        link_to_device(path)
    else:
        path.mkdir()
    with (
        nothing_added(),
        pytest.raises(files.IrregularFileError, match=f"expected a regular file, found {kind}"),
    ):
        files.check_regular(path, 1000)


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """A folder that others have made, in which `link` leads to a folder outside, and that folder with a file."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "kept")
    return folder, outside


Change = Callable[[Path], object]
CHANGES: list[Change] = [
    lambda folder: files.remove_inside(folder, folder / "link" / "kept"),
    lambda folder: files.remove_inside(folder, folder / ".." / "outside" / "kept"),
    lambda folder: files.remove_folder_inside(folder, folder / "link" / "below"),
    lambda folder: files.move_inside(folder, folder / "new", folder / "link" / "kept"),
    lambda folder: files.open_lock(folder, folder / "file"),
    lambda folder: files.open_lock(folder, folder / "link" / "kept"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_leaves_its_folder(linked: tuple[Path, Path], change: Change) -> None:
    folder, outside = linked
    (folder / "new").write_text("new")
    with pytest.raises(OutputError, match="expected"):
        change(folder)
    assert (outside / "kept").read_text() == "kept"


def test_a_link_itself_is_removed_or_replaced(linked: tuple[Path, Path]) -> None:
    folder, outside = linked
    with pytest.raises(FileExistsError):
        files.write_new(folder / "file", "other")
    with pytest.raises(FileExistsError):
        files.link_or_copy(outside / "kept", folder / "file")
    (folder / "new").write_text("new")
    files.move_inside(folder, folder / "new", folder / "file")
    assert (folder / "file").read_text() == "new"
    files.remove_folder_inside(folder, folder / "link")
    files.remove_inside(folder, folder / "file")
    files.remove_inside(folder, folder / "absent")
    assert not list(folder.iterdir())
    assert (outside / "kept").read_text() == "kept"


def test_a_file_is_linked_or_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("content")
    files.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").samefile(tmp_path / "a")

    def fail(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", fail)
    files.link_or_copy(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "content"
    assert not (tmp_path / "c").samefile(tmp_path / "a")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 65 + "1" + "}" * 65,
        "[" * 65 + "]" * 65,
        "NaN",
        "[1e5, -Infinity]",
        "9" * 5000,
        "{",
        "\xff",
        r'{"\ud800": 1}',
        r'["\uDFFF"]',
    ],
)
def test_json_beyond_its_limits_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"levels|NaN|Infinity|digits|Expect|decode|Invalid|JSON|Cannot|Unclosed|surrogates"
    ):
        files.parse_json(text.encode("latin-1"))


def test_json_within_its_limits_is_read() -> None:
    assert files.parse_json("[" * 64 + "]" * 64)
    assert files.parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert files.parse_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 100_000, "[" + "a." * 70 + "a]", "a = " + "9" * 5000, "a = " + "{b=" * 70, "a = \xff"],
)
def test_toml_beyond_its_limits_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"levels|NaN|Infinity|digits|Expect|decode|Invalid|JSON|Cannot|Unclosed|surrogates"
    ):
        files.parse_toml(text.encode("latin-1"))
