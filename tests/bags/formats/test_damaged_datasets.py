"""Damaged LeRobot datasets and HDF5 episodes: each gives its frames, a BagError, or is told as lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("av")

from sam3_node.bags import open_bag
from sam3_node.errors import BagError
from tests.support.hdf5_files import make_pictures, write_aloha, write_robomimic
from tests.support.paths import ROOT
from tests.support.repeats import repetitions

DATA = ROOT / "tests" / "data" / "lerobot"
CASES = repetitions(5, 15)
"""Of each dataset."""


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return bytes that are cut, overwritten in some places, or in which a part is repeated or absent."""
    changed = bytearray(data)
    kind = rng.choice(("cut", "bytes", "bytes", "bits", "repeat", "drop", "end"))
    at, count = rng.randrange(len(data)), rng.randrange(1, 64)
    if kind == "cut":
        return bytes(changed[:at])
    if kind == "repeat":
        return bytes(changed[:at] + changed[at // 2 :])
    if kind == "drop":
        return bytes(changed[:at] + changed[at + count :])
    for _ in range(count):
        place = rng.randrange(len(data))
        if kind == "end":  # where Parquet has its description
            place = len(data) - 1 - rng.randrange(min(len(data), 2000))
        changed[place] = changed[place] ^ 1 << rng.randrange(8) if kind == "bits" else rng.randrange(256)
    return bytes(changed)


def read_damaged(path: Path) -> str:
    """Return what a damaged recording gave: frames, told or refused."""
    try:
        with open_bag(path) as bag:
            count = sum(1 for _ in bag)
            return f"{count} frames, {'told' if bag.lost else 'whole'}"
    except BagError:
        return "refused"


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_damaged_lerobot_datasets(version: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    files = sorted(path for path in (DATA / version).rglob("*") if path.is_file())
    outcomes = set()
    for case in range(CASES):
        rng = random.Random(case)
        dataset = Path(shutil.copytree(DATA / version, tmp_path / str(case)))
        path = dataset / rng.choice(files).relative_to(DATA / version)
        path.write_bytes(damage(path.read_bytes(), rng))
        outcomes.add(read_damaged(dataset))
        shutil.rmtree(dataset)
    assert outcomes - {"30 frames, whole"}


@pytest.mark.parametrize("layout", ["aloha", "jpeg", "robomimic"])
def test_damaged_hdf5_episodes(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    path = tmp_path / "a.hdf5"
    if layout == "robomimic":
        write_robomimic(path, {0: make_pictures(4), 1: make_pictures(4)})
    else:
        write_aloha(path, {"high": make_pictures(8), "low": make_pictures(8)}, layout == "jpeg", fps=50)
    data, outcomes = path.read_bytes(), set()
    for case in range(CASES):
        path.write_bytes(damage(data, random.Random(case)))
        outcomes.add(read_damaged(path))
    assert len(outcomes) > 1
