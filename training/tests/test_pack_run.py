"""One run from a pack: two seeds that a kill interrupts, validation while they train, and the export of their mean."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sam3_node.errors import ModelError
from tests.support.refuses import refuses
from tools.command import read_json_lines
from tools.scenes.clips import list_clips, read_clip, write_clip
from tools.vos.sequences import UNKNOWN
from training.nano.export import read_checkpoint
from training.pack.__main__ import main
from training.pack.run import describe, ships

PARTS = ("rendered", "tracks")
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def packed(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of rectangles, of which one is in doubt on a frame."""
    root = tmp_path_factory.mktemp("packed")
    for folder in ("rendered", "tracks"):
        for name in list_clips(scenes):
            clip = read_clip(scenes, name)
            objects = [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}]
            clip = replace(clip, meta={**clip.meta, "objects": objects})
            write_clip(root / folder, name, clip)
    (root / "tracks" / UNKNOWN).write_text(json.dumps({"a": [[2, 1], [3, 1]]}))
    parts = [word for part in PARTS for word in ("--part", f"{part}={root / part}:2")]
    pack = root / "pack.zip"
    assert main([str(scenes), *parts, "--tracks", str(root / "tracks"), "-o", str(pack)]) == 0
    return pack


def words_of_run(pack: Path, folder: Path, minutes: float) -> list[str]:
    options = {"run": folder, "minutes": minutes, "device": "cpu", "workers": 1, "many": 0.05, "every": 1}
    return [str(pack), *(str(word) for name, value in options.items() for word in (f"--{name}", value))]


def steps_of(folder: Path) -> list[int]:
    """The steps of both seeds' checkpoints."""
    return [read_checkpoint(folder / f"seed-{seed}" / "last.pt")["progress"]["step"] for seed in (0, 1)]


def test_a_run_that_is_killed_goes_on_and_exports_each_seed_and_their_mean(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "training.pack", *words_of_run(packed, folder, minutes=60)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=environment)
    ends = time.monotonic() + PATIENCE_S
    while {line["seed"] for line in read_json_lines(folder / "validation.jsonl")} != {0, 1}:
        assert running.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.2)
    running.kill()
    running.wait()
    # the seeds' processes end by themselves: the logs grow no more
    time.sleep(3)
    before = steps_of(folder)
    logs = [folder / f"seed-{seed}" / "log.jsonl" for seed in (0, 1)]
    sizes = [log.stat().st_size for log in logs]
    time.sleep(2)
    assert [log.stat().st_size for log in logs] == sizes
    assert min(before) > 0

    spent = max(read_checkpoint(log.with_name("last.pt"))["progress"]["seconds"] for log in logs)
    assert main(words_of_run(packed, folder, minutes=(spent + 0.5) / 60)) == 0
    after = steps_of(folder)
    assert all(now > then for now, then in zip(after, before, strict=True))
    exported = [load_file(folder / f"seed-{seed}" / "export" / "model.safetensors") for seed in (0, 1)]
    mean = load_file(folder / "mean" / "model.safetensors")
    name = "mask_decoder.mask_tokens.weight"
    assert not torch.equal(exported[0][name], exported[1][name])
    torch.testing.assert_close(mean[name], (exported[0][name] + exported[1][name]) / 2, atol=2e-3, rtol=0)
    lines = read_json_lines(folder / "validation.jsonl")
    assert all(0 <= line[part] <= 1 for line in lines for part in PARTS)
    table = json.loads((folder / "candidates.json").read_text())
    assert {"in the package", "seed 0", "seed 1", "mean of the seeds", "half mean, half package"} == set(
        table
    )
    assert "| in the package |" in capsys.readouterr().out


def test_weights_ship_if_no_part_loses_or_the_real_ones_gain_much() -> None:
    base = {"rendered": 0.7, "robots": 0.8, "moved": 0.5}
    assert ships(base, {"rendered": 0.7, "robots": 0.795, "moved": 0.52})
    assert not ships(base, {"rendered": 0.7, "robots": 0.78, "moved": 0.55})
    assert ships(base, {"rendered": 0.65, "robots": 0.8, "moved": 0.61})
    assert not ships(base, dict(base))
    with refuses(ModelError, field="moved"):
        ships(base, {"rendered": 0.7})


def test_the_table_says_what_ships() -> None:
    table = describe({"in the package": {"moved": 0.5}, "seed 0": {"moved": 0.6}})
    assert table.splitlines()[-1] == "| seed 0 | 0.600 | 0.600 | yes |"
