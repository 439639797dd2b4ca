"""Replays from and to S3, on a server on loopback: a killed one continues, with the outputs of a local replay."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.cli.main import main
from sam3_node.errors import OutputError
from sam3_node.replay import run
from sam3_node.replay.shards import ShardLimits
from sam3_node.replay.store import LOCK, WORK, open_store
from tests.support.patience import PATIENCE_S
from tests.support.processes import forks
from tests.support.refuses import mentions, refuses
from tests.support.s3 import BUCKET, S3Server, serve_s3

NAMES = ("a.mcap", "b.mcap")
FRAMES = 8
"""Frames of each recording that are replayed."""
LIMITS = ShardLimits(frames=2)
OPTIONS = ("--frames", str(FRAMES), "--prompt", "box", "--outputs", "mcap,coco,png")
SECOND_SHARD = f"masks/b/{WORK}/parts/000001.masks"
"""What is stored when half of the second recording is done."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as found:
        yield found


def run_command(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """Run `sam3-node` with these arguments, and with small shards: the main function of a process."""
    os.environ |= environment
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    run.run_job = partial(run.run_job, limits=LIMITS)
    sys.exit(main(arguments))


def start_command(arguments: Sequence[str], server: S3Server, log: Path) -> BaseProcess:
    process = forks.Process(target=run_command, args=(arguments, server.environment, str(log)))
    process.start()
    return process


def read_files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def select_outputs(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what the replays were made for: neither their progress, nor their times."""
    return {
        name: data for name, data in files.items() if f"/{WORK}/" not in name and "summary.json" not in name
    }


def test_a_replay_from_and_to_s3_continues_after_a_kill(server: S3Server, tmp_path: Path) -> None:
    import fsspec

    bags = fsspec.filesystem("s3", endpoint_url=server.endpoint, key="testing", secret="testing")
    for name in NAMES:
        bags.put_file(str(TABLETOP), f"{BUCKET}/monday/{name}")
    urls = [f"s3://{BUCKET}/monday/{name}" for name in NAMES]
    arguments = ["replay", *urls, "-o", f"s3://{BUCKET}/masks", *OPTIONS]

    # the process dies before it learns that the shard is stored
    first = start_command(arguments, server, tmp_path / "first.log")
    server.on_stored = lambda key: first.kill() if key == SECOND_SHARD else None
    first.join(PATIENCE_S)
    assert first.exitcode == -signal.SIGKILL, (tmp_path / "first.log").read_text()
    halfway = server.read_all()
    assert "masks/a/summary.json" in halfway
    assert not any(name.startswith("masks/b/") for name in select_outputs(halfway))

    # the same command again: what is done is not stored again
    server.stored.clear()
    second = start_command(arguments, server, tmp_path / "second.log")
    second.join(PATIENCE_S)
    told = (tmp_path / "second.log").read_text()
    assert second.exitcode == 0, told
    assert mentions(told, f"s3://{BUCKET}/masks/a: was finished already")
    assert "Found credentials" not in told
    assert {key for key in server.stored if key.startswith("masks/a/")} == {f"masks/a/{LOCK}"}
    assert SECOND_SHARD not in server.stored
    results = server.read_all()
    assert json.loads(results["masks/b/summary.json"])["resumed_from"] == FRAMES // 2
    assert not any(name.endswith(LOCK) for name in results)

    # a local run in one go
    for name in NAMES:
        shutil.copyfile(TABLETOP, tmp_path / name)
    paths = [str(tmp_path / name) for name in NAMES]
    assert main(["replay", *paths, "-o", str(tmp_path / "out/masks"), *OPTIONS]) == 0
    expected = select_outputs(read_files(tmp_path / "out"))
    assert len([name for name in expected if name.endswith(".png")]) >= len(NAMES) * FRAMES
    found = {name: data for name, data in results.items() if name.startswith("masks/")}
    assert select_outputs(found) == expected


def test_a_bucket_that_is_missing_is_told(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    # a file system keeps the address that it found first
    s3fs.S3FileSystem.clear_instance_cache()
    store = open_store("s3://none/masks")
    with refuses(OutputError, field=("s3://none/masks", "bucket", "create it")), store.held():
        pass
    s3fs.S3FileSystem.clear_instance_cache()
