"""Tests of the folder of keys: its files, their modes, and that a running process reads it again."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from sam3_node.errors import AuthenticationError
from sam3_node.transport.security import KeyFolder
from tests.support.refuses import refuses
from tests.support.transport_peer import wait_until


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.create("node", "node")
    return folder


def names(folder: KeyFolder) -> list[str]:
    return sorted(key.name for key in folder.authorised().values())


def test_secrets_are_private_and_separate(keys: KeyFolder) -> None:
    pair = keys.find_own(("node",))
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((keys.path / "node.secret").stat().st_mode) == 0o600
    assert pair.secret.decode() in (keys.path / "node.secret").read_text()
    assert pair.secret.decode() not in (keys.path / "authorised" / "node.pub").read_text()
    assert pair.secret.decode() not in repr(pair)
    assert pair.key.public in keys.authorised()


def test_a_change_counts_at_once(keys: KeyFolder) -> None:
    for number in range(20):  # faster than the clock of the file system
        keys.create(f"policy{number}", "operator")
        assert f"policy{number}" in names(keys)
        keys.revoke(f"policy{number}")
        assert names(keys) == ["node"]
    assert len(keys.revoked()) == 20
    assert keys.own_names() == {"node"}


def test_an_edit_in_place_counts_soon(keys: KeyFolder) -> None:
    file = keys.path / "authorised" / "node.pub"
    assert names(keys) == ["node"]
    file.write_text("role = 'king'")
    wait_until(lambda: not names(keys))


def test_a_name_can_be_revoked_again(keys: KeyFolder) -> None:
    for _ in range(3):
        keys.create("policy", "operator")
        keys.revoke("policy")
    assert len(keys.revoked()) == 3


@pytest.mark.parametrize("name", ["../node", "a/b", "", "x" * 65, ".secret"])
def test_names_stay_in_the_folder(keys: KeyFolder, name: str) -> None:
    for change in (lambda: keys.create(name, "reader"), lambda: keys.revoke(name)):
        with pytest.raises(AuthenticationError, match="expected"):
            change()


def test_a_name_is_taken_once(keys: KeyFolder) -> None:
    before = (keys.path / "node.secret").read_bytes()
    with refuses(AuthenticationError, field=("exists", "already")):
        keys.create("node", "node")
    assert (keys.path / "node.secret").read_bytes() == before


def test_a_secret_that_others_may_read_is_refused(keys: KeyFolder) -> None:
    (keys.path / "node.secret").chmod(0o640)
    with refuses(AuthenticationError, field=("0640", "600")):
        keys.find_own(("node",))


def test_a_folder_that_others_may_change_authorises_nobody(
    keys: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    (keys.path / "authorised").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert not KeyFolder(keys.path).authorised()
    assert "can be written by others" in caplog.text


def test_damaged_files_do_not_count_and_are_not_quoted(
    keys: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    secret = keys.find_own(("node",)).secret.decode()
    folder = keys.path / "authorised"
    for number, text in enumerate(("", "\xff", "[", "role = 1", f"secret = '{secret}'", "x" * 10000)):
        (folder / f"bad{number}.pub").write_bytes(text.encode("latin-1"))
    (folder / "link.pub").symlink_to(folder / "node.pub")
    assert names(keys) == ["node"]
    (keys.path / "node.secret").write_text(f"role = 'node'\nsecret = '{secret}'\npublic = '{secret}'\n")
    with refuses(AuthenticationError, field="pair") as error:
        keys.find_own(("node",))
    assert secret not in str(error.value) + caplog.text


def test_the_key_of_a_process_follows_from_its_role(keys: KeyFolder) -> None:
    keys.create("policy", "operator")
    keys.create("watcher", "reader")
    keys.create("front", "camera", ["cam0"])
    keys.create("any", "camera", ["*"])
    assert keys.find_own(("operator", "reader")).key.name == "policy"
    assert keys.find_own(("operator", "reader"), "watcher").key.name == "watcher"
    assert keys.find_own(("camera",), camera="cam0").key.name == "front"
    assert keys.find_own(("camera",), camera="cam7").key.name == "any"
    assert keys.find_own(("camera",), camera="*").key.name == "any"  # of a replay, which sends several
    with refuses(AuthenticationError, field=("node", "policy")):
        keys.find_own(("node",), "policy")
    with refuses(AuthenticationError, field="cam1"):
        keys.find_own(("camera",), "front", camera="cam1")
    with refuses(AuthenticationError, field=("NAME", "--role")):
        keys.find_own(("robot",))
    with refuses(AuthenticationError, field=("name", "camera")):
        keys.find_server("camera")
    keys.create("policy2", "operator")
    with refuses(AuthenticationError, field=("policy2", "transport.key")):
        keys.find_own(("operator", "reader"))


@pytest.mark.parametrize("kind", ["file", "dangling link", "link", "pipe", "absent"])
def test_what_takes_the_place_of_the_folder_authorises_nobody_until_it_is_back(
    keys: KeyFolder, kind: str
) -> None:
    authorised, kept = keys.path / "authorised", keys.path / "kept"
    assert names(keys) == ["node"]
    authorised.rename(kept)
    if kind == "file":
        authorised.write_text("role = 'operator'")
    elif kind == "pipe":
        os.mkfifo(authorised)
    elif kind != "absent":
        authorised.symlink_to(kept if kind == "link" else keys.path / "nowhere")
    wait_until(lambda: not names(keys))
    with refuses(AuthenticationError, field=("role", "node")):
        keys.find_server("node")
    authorised.unlink(missing_ok=True)
    kept.rename(authorised)
    wait_until(lambda: names(keys) == ["node"])


def test_things_that_are_no_key_files_cost_nothing(keys: KeyFolder) -> None:
    """A running process reads the folder each second for months."""
    folder = keys.path / "authorised"
    (folder / "folder.pub").mkdir()
    os.mkfifo(folder / "pipe.pub")
    (folder / "link.pub").symlink_to("/dev/zero")
    with (folder / "large.pub").open("wb") as large:
        large.truncate(1 << 34)
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        assert list(keys._scan(folder)) == list(keys.authorised())
    assert names(keys) == ["node"]
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_key_that_was_revoked_here_is_named(keys: KeyFolder) -> None:
    keys.create("policy", "operator")
    keys.revoke("policy")
    for name in ("", "policy"):
        with refuses(AuthenticationError, field=("policy", "revoked")):
            keys.find_own(("operator", "reader"), name)
    with pytest.raises(AuthenticationError) as caught:
        keys.find_own(("camera",))
    assert "policy" not in str(caught.value)
    keys.revoke("node")
    with refuses(AuthenticationError, field=("node", "revoked")):
        keys.find_server("node")
