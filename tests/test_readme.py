"""README says what is so: its commands parse, its examples run, its paths exist, its hex is the golden files'."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from sam3_node import errors
from sam3_node.cli import main as cli
from sam3_node.node.operations import OPERATIONS
from sam3_node.processes.group import list_processes
from sam3_node.settings import load_settings
from sam3_node.wire import decode_mask
from tests.support.node_rig import Rig
from tests.support.paths import ROOT
from tests.support.wire_examples import golden

README = (ROOT / "README.md").read_text()
SHOWN = re.sub(r"<!--.*?-->", "", README, flags=re.DOTALL)
FOLDERS = "calibration|launch|sam3_node|tests|tools"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def block_with(text: str) -> str:
    (found,) = [block for block in blocks("python") if text in block]
    return found


def commands() -> Iterator[list[str]]:
    """Every command line of the sh blocks and of the tables, in words."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    for line in lines + re.findall(r"`(sam3-node [^`]+)`", SHOWN):
        words = shlex.split(line, comments=True)
        if words:
            yield words


def table_after(heading: str) -> list[str]:
    """The first cells of the table that follows."""
    _, _, rest = README.partition(heading)
    rows = re.search(r"^\|---.*\n((?:\|.*\n)+)", rest, flags=re.MULTILINE)
    assert rows is not None
    return [row.split("|")[1] for row in rows[1].splitlines()]


def hex_of(text: str) -> str:
    """README's hex without its spaces."""
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_is_understood(words: list[str]) -> None:
    if words[0] == "launch/start":
        profile = ROOT / words[1]
        assert list_processes(load_settings(profile), profile)
        return
    assert words[0] == "sam3-node"
    wanted = [word for word in words[1:] if not word.startswith("FILE")]
    assert cli._parser().parse_args(wanted).run


def test_every_path_exists() -> None:
    named = set(re.findall(rf"(?<![\w/-])(?:{FOLDERS})/[\w./-]*\w", SHOWN))
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
        for line in re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", SHOWN):
        if target.startswith("#"):
            assert target[1:] in headings
        elif not target.startswith("https://"):
            assert (ROOT / target).exists()


def test_every_operation_and_every_error_is_listed() -> None:
    operations = re.findall(r"`(\w+)`", " ".join(table_after("### Control")))
    assert sorted(operations) == sorted(OPERATIONS)
    named = set(re.findall(r"`(\w+)`", " ".join(table_after("## Errors"))))
    assert named == {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.Sam3NodeError)
    } - {"Sam3NodeError"}


def test_the_hex_is_that_of_the_golden_files() -> None:
    text = hex_of(README)
    bits, rle = (msgpack.unpackb(golden(f"masks-{name}")[1])["instances"] for name in ("bits", "rle"))
    lines = re.findall(r"^    ([0-9a-f]{2}(?: [0-9a-f]{2})*)    ", SHOWN, flags=re.MULTILINE)
    assert bits[0]["mask"]["data"].hex() in hex_of("".join(lines))
    for data in (rle[0]["mask"]["data"], rle[2]["mask"]["data"], golden("request-status")[0]):
        assert data.hex() in text
    assert golden("frame-jpeg")[1].hex().startswith(hex_of("8a a176 01  a46b696e64 a56672616d65"))


def test_the_reader_without_this_package_decodes_the_golden_masks() -> None:
    names: dict[str, Any] = {}
    exec(block_with("def decode_bits"), names)
    for found in msgpack.unpackb(golden("masks-bits")[1])["instances"]:
        assert np.array_equal(names["decode_bits"](found["mask"]), decode_mask(found["mask"]).full())


def test_the_tracker_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", block_with("load_tracker(")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1] (1, 64, 64)")


def test_the_recording_example_runs() -> None:
    pytest.importorskip("mcap")
    done = subprocess.run(
        [sys.executable, "-c", block_with("Recording.load(")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    bag, recording = done.stdout.splitlines()
    assert bag == "('tabletop',) 224 640 jpeg None"
    assert recording.startswith("225 15.0")


def test_a_policy_and_a_reader_without_this_package_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    try:
        rig.node()
        rig.camera()
        with rig.client() as client:
            assert client.latest(timeout_ms=30_000) is not None
        policy = block_with("PerceptionClient(")
        for ours, theirs in (
            ("tcp://127.0.0.1:5551", rig.masks),
            ("tcp://127.0.0.1:5552", rig.control),
            ("(200, 275, 350, 435)", "(100, 100, 200, 200)"),  # on the rig's smaller frames
            ("masks.seq > 10_000", "'inside' in globals()"),
        ):
            assert ours in policy
            policy = policy.replace(ours, theirs)
        run(policy)
        reader = block_with("def read_masks")
        run(f"{reader}\nseq, found = next(read_masks({rig.masks!r}))\nassert found[1].shape == (240, 320)")
    finally:
        rig.close()


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_settings_have_their_marks() -> None:
    assert README.count("<!-- settings -->") == README.count("<!-- /settings -->") == 1
