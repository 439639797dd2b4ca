"""Masks written to MCAP files and read back, whole and broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.errors import BagError, OutputError
from sam3_node.types import Instance, Mask, MaskFrame

pytest.importorskip("mcap")

from mcap.reader import make_reader

from sam3_node.bags import RecordingWriter, read_masks
from sam3_node.wire import pack_masks
from tests.support.recordings import read_with_flipped_bytes
from tests.support.refuses import refuses


def write(path: Path, frames: list[MaskFrame], encoding: Any = "rle") -> Path:
    """Write masks as the demonstration and a replay do."""
    with RecordingWriter(path, overwrite=True) as bag:
        for masks in frames:
            bag.write_masks(pack_masks(masks, encoding)[1], masks, masks.age_origin_ns)
    return path


def masks_at(seq: int, camera: str = "cam0") -> MaskFrame:
    full = np.random.default_rng(seq).random((48, 64)) > 0.5
    instance = Instance(3, "red mug", 0.75, "tracked", seq, 0, Mask.from_full(full))
    return MaskFrame(
        camera, seq, 1_000 + seq, 64, 48, 1_100 + seq, 1_200 + seq, 0, "nano", {"track": 5}, (), (instance,)
    )


def assert_same(found: MaskFrame, expected: MaskFrame) -> None:
    assert (found.camera, found.seq, found.capture_ns, found.published_ns) == (
        expected.camera,
        expected.seq,
        expected.capture_ns,
        expected.published_ns,
    )
    assert found.stages_us == expected.stages_us
    assert np.array_equal(found.instances[0].mask.full(), expected.instances[0].mask.full())


@pytest.mark.parametrize("encoding", ["rle", "bits+zstd"])
def test_masks_come_back_as_they_were_written(tmp_path: Path, encoding: str) -> None:
    written = [masks_at(0), masks_at(1, "left"), masks_at(2)]
    read = list(read_masks(write(tmp_path / "new" / "masks.mcap", written, encoding)))
    assert len(read) == 3
    for found, expected in zip(read, written, strict=True):
        assert_same(found, expected)


def test_any_mcap_reader_sees_topics_times_and_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "masks.mcap", [masks_at(7)])
    with path.open("rb") as file:
        ((_, channel, message),) = make_reader(file).iter_messages(topics=["masks/cam0"])
    assert (channel.topic, channel.message_encoding) == ("masks/cam0", "msgpack")
    assert (message.log_time, message.publish_time, message.sequence) == (1_007, 1_207, 7)


def test_a_truncated_file_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "masks.mcap"
    write(path, [masks_at(seq) for seq in range(600)], "bits+zstd")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    seqs: list[int] = []
    with refuses(BagError, field="masks.mcap"):
        seqs.extend(masks.seq for masks in read_masks(path))
    assert seqs == list(range(len(seqs)))
    assert len(seqs) > 200


@pytest.mark.parametrize(
    ("content", "found"),
    [(b"certainly not an MCAP file", ("begins", "otherwise")), (b"", "empty")],
)
def test_a_file_that_is_no_mcap_is_refused(
    tmp_path: Path, content: bytes, found: str | tuple[str, ...]
) -> None:
    path = tmp_path / "masks.mcap"
    path.write_bytes(content)
    with refuses(BagError, field=found):
        list(read_masks(path))
    with pytest.raises(BagError, match=r"cannot read .*none\.mcap"):
        list(read_masks(tmp_path / "none.mcap"))


def test_flipped_bytes_never_raise_anything_but_errors_of_this_package(tmp_path: Path) -> None:
    path = tmp_path / "masks.mcap"
    write(path, [masks_at(1)])
    read_with_flipped_bytes(path, lambda path: list(read_masks(path)))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(OutputError, field=("create", "folder")):
        RecordingWriter(tmp_path / "file" / "masks.mcap")
