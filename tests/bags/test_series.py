"""Which files belong to one recording."""

import shutil
from itertools import islice
from pathlib import Path

import pytest

from sam3_node.bags import open_bag
from sam3_node.bags.native import RECORDER
from sam3_node.bags.native.reader import TABLETOP, RecordingReader
from sam3_node.bags.native.series import group_by_recording, require_whole
from sam3_node.bags.native.writer import RecordingWriter, SplitRecordingWriter
from sam3_node.errors import BagError
from sam3_node.types import Frame
from tests.support.refuses import refuses


def list_frames(count: int) -> list[Frame]:
    return list(islice(RecordingReader([TABLETOP]).frames(), count))


def record(path: Path, began_ns: int, parts: int) -> list[Path]:
    """Write a recording of this many files, as the recorder does."""
    with SplitRecordingWriter(path, 0, 0, dict) as files:
        files.add_metadata(RECORDER, {"began_ns": began_ns})
        for frame in list_frames(parts):
            files.current().write_frame(frame, frame.capture_ns)
            files.split()
    return files.paths


def write(path: Path) -> Path:
    """Write a recording without a mark."""
    with RecordingWriter(path) as writer:
        for frame in list_frames(2):
            writer.write_frame(frame, frame.capture_ns)
    return path


def test_parts_of_a_recording_are_told_by_when_it_began(tmp_path: Path) -> None:
    pick = record(tmp_path / "pick.mcap", 1, 3)
    assert [path.name for path in pick[:3]] == ["pick.mcap", "pick_0001.mcap", "pick_0002.mcap"]
    place = record(tmp_path / "place.mcap", 2, 2)
    assert group_by_recording([*place, *pick]) == [pick, place]
    # a quota has deleted the first file
    assert group_by_recording(pick[1:]) == [pick[1:]]
    # a take that is named like a part
    take = record(tmp_path / "pick_0009.mcap", 3, 1)
    assert group_by_recording([*take, *pick]) == [pick, take]


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["take_0001", "take_0002"], 2),
        (["pick_20261127", "pick_20261128"], 2),
        (["pick", "pick_20261128"], 2),
        (["pick", "pick_0001", "pick_0002"], 1),
        (["pick", "pick_0002"], 2),
        (["monday", "tuesday"], 2),
    ],
)
def test_files_without_a_mark_are_parts_where_their_names_say_it_whole(
    tmp_path: Path, names: list[str], groups: int
) -> None:
    files = [write(tmp_path / f"{name}.mcap") for name in names]
    assert len(group_by_recording(files)) == groups
    if groups > 1:
        with refuses(BagError, field=(str(groups), files[0].name, "folder")):
            open_bag(tmp_path)
    else:
        assert len(list(open_bag(tmp_path))) == 2 * len(names)


def test_a_part_alone_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    pick = record(tmp_path / "pick.mcap", 1, 3)
    require_whole(pick)
    # a copy under another name is no other part
    shutil.copy(pick[0], tmp_path / "backup.mcap")
    require_whole(pick)
    with refuses(BagError, field=("1 of", "pick.mcap", "folder")):
        require_whole(pick[1:2])
