"""Calls in a child process: what ends the child is an error, and the next call starts another."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sam3_node.bags.isolated import IsolatedCalls
from sam3_node.errors import BagError, MissingExtraError
from tests.support.hdf5_files import make_pictures, write_aloha
from tests.support.refuses import refuses


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_aloha(tmp_path / "a.hdf5", {"high": make_pictures(3)})


def test_a_child_that_ends_is_replaced_for_other_files(path: Path, tmp_path: Path) -> None:
    other = write_aloha(tmp_path / "b.hdf5", {"low": make_pictures(3)})
    with IsolatedCalls("h5py", "hdf5") as calls:
        assert "observations/images/high" in calls.call("list_hdf5", path)["datasets"]
        child = calls._child
        assert child is not None
        os.kill(child.pid, signal.SIGSEGV)
        child.wait()
        with refuses(BagError, field=("a.hdf5", "h5py")):
            calls.call("list_hdf5", path)
        assert "observations/images/low" in calls.call("list_hdf5", other)["datasets"]
        with refuses(BagError, field=("within", "limits")):
            calls.call("list_hdf5", path)  # would end the next child, too


def test_an_interrupt_of_the_terminal_does_not_reach_the_child(path: Path) -> None:
    with IsolatedCalls("h5py", "hdf5") as calls:
        calls.call("list_hdf5", path)
        assert os.getpgid(calls._child.pid) != os.getpgid(0)


def test_a_closed_one_can_be_used_again(path: Path) -> None:
    calls = IsolatedCalls("h5py", "hdf5")
    calls.close()
    assert calls.call("list_hdf5", path)
    calls.close()
    calls.close()
    assert calls.call("list_hdf5", path)
    calls.close()


def test_a_missing_library_names_the_extra(path: Path) -> None:
    with (
        IsolatedCalls("no_such_library", "hdf5") as calls,
        refuses(MissingExtraError, field=("no_such_library", "hdf5")),
    ):
        calls.call("list_hdf5", path)
