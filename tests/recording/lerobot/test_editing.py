"""Episodes of a dataset that are dropped, trimmed, split and renamed in a copy of it."""

from dataclasses import asdict
from pathlib import Path

import cv2
import pyarrow.parquet
import pytest

from sam3_node.bags import open_bag
from sam3_node.cli import main
from sam3_node.errors import OutputError
from sam3_node.recording.lerobot import editing, listing
from sam3_node.recording.lerobot.conversion import Converted, convert_recordings
from sam3_node.recording.lerobot.editing import Edits, write_copy
from sam3_node.recording.lerobot.records import RECORDS, read_records
from sam3_node.settings import LeRobotSettings
from sam3_node.wire import decode_image
from tests.support.refuses import mentions, refuses
from tools.lerobot_recorded.recording import MARKS, Mark, write_recording

NEW = "place it"
EDITS = Edits(trim={0: (0.2, 0.8)}, split={1: [0.5]}, tasks={1: NEW})
AS_RECORDED = (Mark(5, 11, MARKS[0].task), Mark(27, 32, NEW), Mark(32, 41, NEW))
"""Marks that make of the recording what EDITS make of its dataset."""
ROWS = [frame for mark in MARKS if mark.keep for frame in range(mark.first, mark.end)]
"""Frames of the dataset's rows."""
FRAMES = [frame for mark in AS_RECORDED for frame in range(mark.first, mark.end)]


def convert(recording: Path, folder: Path, **settings: object) -> Path:
    convert_recordings([recording], LeRobotSettings(**settings), folder, lambda _: None)  # type: ignore[arg-type]
    return folder


def read_rows(dataset: Path) -> list[dict[str, object]]:
    tables = sorted((dataset / "data").rglob("*.parquet"))
    return [row for table in tables for row in pyarrow.parquet.read_table(table).to_pylist()]


def list_files(dataset: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(dataset)): path.read_bytes() for path in dataset.rglob("*") if path.is_file()
    }


def test_a_copy_is_what_a_recording_with_such_marks_gives(lerobot_recording: Path, tmp_path: Path) -> None:
    source = convert(lerobot_recording, tmp_path / "source", pictures="png")
    before = list_files(source)
    write_copy(source, EDITS, tmp_path / "copy")
    assert list_files(source) == before
    other = write_recording(tmp_path / "other.mcap", AS_RECORDED)
    wanted = convert(other, tmp_path / "wanted", pictures="png")
    assert read_rows(tmp_path / "copy") == read_rows(wanted)
    assert (tmp_path / "copy/meta/info.json").read_bytes() == (wanted / "meta/info.json").read_bytes()
    assert (tmp_path / "copy/meta/sam3_masks.json").read_bytes() == (
        wanted / "meta/sam3_masks.json"
    ).read_bytes()
    records = zip(read_records(tmp_path / "copy" / RECORDS), read_records(wanted / RECORDS), strict=True)
    for found, expected in records:
        assert found.source.get("rows") == expected.source.get("rows")
        assert found.source["begin_ns"] == pytest.approx(expected.source["begin_ns"], abs=1000)
        fields = {name: value for name, value in asdict(expected).items() if name not in ("key", "source")}
        assert {name: asdict(found)[name] for name in fields} == fields | {"video_row": found.video_row}


def test_videos_are_shared_and_shown_from_the_right_frame(lerobot_dataset: Path, tmp_path: Path) -> None:
    write_copy(lerobot_dataset, EDITS, tmp_path / "copy")
    videos = sorted(path.relative_to(tmp_path / "copy") for path in (tmp_path / "copy").rglob("*.mp4"))
    assert len(videos) == 6
    inodes = {path.stat().st_ino for path in lerobot_dataset.rglob("*.mp4")}
    assert {(tmp_path / "copy" / path).stat().st_ino for path in videos} == inodes
    with open_bag(lerobot_dataset) as bag:
        pictures = {(frame.camera, ROWS[frame.seq]): decode_image(frame) for frame in bag}
    with open_bag(tmp_path / "copy") as bag:
        assert bag.episode_starts == (0, 6, 11)
        shown = [(frame.camera, FRAMES[frame.seq], decode_image(frame)) for frame in bag]
    assert len(shown) == 2 * len(FRAMES)
    for camera, frame, image in shown:
        assert (image == pictures[camera, frame]).all()


def test_dropped_episodes_stay_away_and_others_are_appended(lerobot_dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write_copy(lerobot_dataset, Edits(drop=frozenset({0})), copy)
    (kept,) = read_records(copy / RECORDS)
    assert (kept.number, kept.first_row, kept.length) == (0, 0, 14)
    marks = (*MARKS, Mark(42, 44, "another"))
    recording = write_recording(tmp_path / "more.mcap", marks)
    assert convert_recordings([recording], LeRobotSettings(), copy, lambda _: None) == Converted(1, 2, 0)
    assert [record.task for record in read_records(copy / RECORDS)] == [kept.task, "another"]
    # a copy of the copy still knows what was dropped first
    write_copy(copy, Edits(drop=frozenset({1})), tmp_path / "again")
    assert (
        convert_recordings([recording], LeRobotSettings(), tmp_path / "again", lambda _: None).appended == 0
    )


def test_version_2_drops_and_renames_but_cuts_no_video(lerobot_recording: Path, tmp_path: Path) -> None:
    source = convert(lerobot_recording, tmp_path / "source", version="2.1")
    modality = (source / "meta/modality.json").read_text().replace('"arm"', '"left"')
    (source / "meta/modality.json").write_text(modality)
    write_copy(source, Edits(drop=frozenset({0}), tasks={1: NEW}), tmp_path / "copy")
    files = list_files(tmp_path / "copy")
    videos = "videos/chunk-000/observation.images.front"
    assert files[f"{videos}/episode_000000.mp4"] == list_files(source)[f"{videos}/episode_000001.mp4"]
    assert files["meta/modality.json"] == modality.encode()
    assert {row["task_index"] for row in read_rows(tmp_path / "copy")} == {0}
    with refuses(OutputError, field=("3.0", "v2.1")):
        write_copy(source, Edits(trim={0: (0.2, None)}), tmp_path / "cut")


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (Edits(drop=frozenset({2})), ("episodes 0 to 1", "2")),
        (Edits(drop=frozenset({0, 1})), ("none",)),
        (Edits(trim={0: (0.5, 9.0)}), ("episode 0", "1.20 s", "9.00")),
        (Edits(trim={0: (0.5, 0.4)}), ("episode 0",)),
        (Edits(split={1: [0.0]}), ("episode 1",)),
    ],
)
def test_edits_that_do_not_fit_are_refused(
    edits: Edits, words: tuple[str, ...], lerobot_dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(OutputError) as raised:
        write_copy(lerobot_dataset, edits, tmp_path / "copy")
    assert mentions(str(raised.value), "expected", *words)
    assert not list(tmp_path.iterdir())


def test_a_copy_that_fails_leaves_nothing(
    lerobot_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(editing, "write_meta", fail)
    with refuses(OutputError, field="No space left"):
        write_copy(lerobot_dataset, EDITS, tmp_path / "copy")
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_a_video_is_not_copied(lerobot_dataset: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_copy(lerobot_dataset, Edits(tasks={0: NEW}), source)
    video = next(source.rglob("*.mp4"))
    video.unlink()
    video.symlink_to("/etc/hostname")
    with refuses(OutputError, field="symbolic link"):
        write_copy(source, EDITS, tmp_path / "copy")


@pytest.mark.parametrize("damaged", ["*.mp4", "*.parquet"])
def test_damaged_files_are_told_and_other_episodes_stay(
    damaged: str, lerobot_dataset: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    write_copy(lerobot_dataset, Edits(tasks={0: NEW}), source)
    folder = source / ("data" if damaged == "*.parquet" else "videos/observation.images.front")
    for harm in (b"", b"junk", None):
        path = sorted(folder.rglob(damaged))[1]
        good = path.read_bytes()
        path.unlink()  # the original has the same file
        if harm is None:
            path.write_bytes(sorted(folder.rglob(damaged))[0].read_bytes())
        else:
            path.write_bytes(harm)
        with refuses(OutputError, field="episode 1"):
            write_copy(source, EDITS, tmp_path / "copy")
        if damaged == "*.mp4":
            with refuses(OutputError, field="episode 1"):
                listing.draw_sheet(source)
        path.write_bytes(good)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_command_lists_draws_and_writes(
    lerobot_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.jpg"
    command = ["episodes", str(lerobot_dataset), "--pictures", str(sheet)]
    assert main.main(command) == 0
    listed = capsys.readouterr().out
    assert mentions(listed, "put the mug on the tray", "26 rows in 2 episodes")
    assert cv2.imread(str(sheet)).shape == (2 * (18 + 120), 8 * 160, 3)
    copy = str(tmp_path / "copy")
    assert (
        main.main(
            [*command, "--trim", "0=:0.8", "--split", "1=0.5", "--relabel", f"1={NEW}", "--write", copy]
        )
        == 0
    )
    assert mentions(capsys.readouterr().out, "rows 0 to 7", NEW, "22 rows in 3 episodes")
    assert main.main([*command, "--drop", "0"]) == 2
    assert mentions(capsys.readouterr().err, "--write NEW")
    assert main.main(["episodes", str(tmp_path)]) == 2
    assert mentions(capsys.readouterr().err, "expected a dataset that sam3-node has written")
    for wrong in (("--trim", "0=1"), ("--trim", "x=1:2"), ("--split", "0=nan"), ("--relabel", "0=")):
        with pytest.raises(SystemExit):
            main.main([*command, *wrong])


def test_a_damaged_list_of_dropped_episodes_is_told(lerobot_dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write_copy(lerobot_dataset, Edits(drop=frozenset({0})), copy)
    for damaged in ("{", "[]", '{"keys": ["a"]}', '{"keys": [-1]}'):
        (copy / "meta/sam3_dropped.json").write_text(damaged)
        with refuses(OutputError, field="sam3_dropped.json"):
            write_copy(copy, Edits(tasks={0: NEW}), tmp_path / "again")
