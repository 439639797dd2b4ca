"""Edits of a dataset that are kept in a file beside it until the copy is written."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from sam3_node.errors import OutputError, RequestError
from sam3_node.recording.lerobot import editing, pending
from sam3_node.recording.lerobot.editing import Edits, write_copy
from sam3_node.recording.lerobot.pending import EpisodeEdit, PendingEdits, join_edits, name_edits, read_edits
from tests.recording.lerobot.test_editing import NEW, list_files
from tests.support.processes import forks
from tests.support.refuses import refuses

EDITS = (
    EpisodeEdit(episode=0, begin_s=0.2, end_s=0.8),
    EpisodeEdit(episode=1, split_s=0.5),
    EpisodeEdit(episode=1, task=NEW),
)


@pytest.fixture
def dataset(lerobot_dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lerobot_dataset, tmp_path / "pick"))


def keep(dataset: Path) -> PendingEdits:
    kept = PendingEdits(dataset)
    for edit in EDITS:
        kept.add(edit)
    return kept


def test_edits_are_kept_taken_back_and_written_as_the_command_does(dataset: Path, tmp_path: Path) -> None:
    before = list_files(dataset)
    kept = keep(dataset)
    kept.add(EpisodeEdit(episode=0, dropped=True))
    assert {piece.episode.number for piece in kept.read().pieces} == {1}
    # another process goes on
    other = PendingEdits(dataset)
    assert other.undo(4).edits == kept.read().edits
    written = other.write(other.suggest_name(), 3)
    assert written.folder == tmp_path / "pick-2"
    write_copy(
        dataset, Edits(trim={0: (0.2, 0.8)}, split={1: [0.5]}, tasks={1: NEW}), tmp_path / "by the command"
    )
    assert list_files(tmp_path / "pick-2") == list_files(tmp_path / "by the command")
    assert list_files(dataset) == before
    assert not name_edits(dataset).exists()
    assert (kept.read().edits, kept.suggest_name()) == ((), "pick-3")


def test_a_restored_episode_is_as_it_was() -> None:
    dropped = EpisodeEdit(episode=1, dropped=True)
    restored = EpisodeEdit(episode=1, restored=True)
    found = join_edits((*EDITS, dropped, restored))
    assert found == Edits(trim={0: (0.2, 0.8)})
    assert join_edits((*EDITS, dropped, restored, EDITS[1])).split == {1: [0.5]}


@pytest.mark.parametrize(
    "edit",
    [
        EpisodeEdit(episode=0),
        EpisodeEdit(episode=0, dropped=True, restored=True),
        EpisodeEdit(episode=0, split_s=0.5, begin_s=0.1),
        EpisodeEdit(episode=0, task="two\nlines"),
        EpisodeEdit(episode=2, dropped=True),
        EpisodeEdit(episode=0, end_s=99.0),
        EpisodeEdit(episode=0, begin_s=0.9, end_s=0.2),
        EpisodeEdit(episode=0, split_s=0.1),  # not in what stays
        EpisodeEdit(episode=1, split_s=0.5),  # twice
    ],
)
def test_an_edit_that_does_not_fit_is_not_kept(dataset: Path, edit: EpisodeEdit) -> None:
    kept = keep(dataset)
    before = name_edits(dataset).read_bytes()
    with refuses((RequestError, OutputError)):
        kept.add(edit)
    assert name_edits(dataset).read_bytes() == before


def test_the_last_episode_stays_and_version_2_is_not_cut(lerobot_recording: Path, tmp_path: Path) -> None:
    from tests.recording.lerobot.test_editing import convert

    kept = PendingEdits(convert(lerobot_recording, tmp_path / "pick", version="2.1"))
    with refuses(OutputError, field="3.0"):
        kept.add(EDITS[0])
    kept.add(EpisodeEdit(episode=0, dropped=True))
    with refuses(OutputError, field="none"):
        kept.add(EpisodeEdit(episode=1, dropped=True))


def test_what_others_have_done_meanwhile_is_not_written_unseen(dataset: Path) -> None:
    kept = keep(dataset)
    PendingEdits(dataset).add(EpisodeEdit(episode=0, restored=True))
    for change in (lambda: kept.undo(3), lambda: kept.write("pick-2", 3)):
        with refuses(RequestError, field=("4", "3")):
            change()
    with refuses(OutputError, field="pick"):
        kept.write("pick", 4)
    with refuses(OutputError, field="name"):
        kept.write("../pick-2", 4)
    assert len(kept.read().edits) == 4


def test_edits_are_bounded(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep(dataset)
    monkeypatch.setattr(pending, "MAX_BYTES", name_edits(dataset).stat().st_size)
    with refuses(RequestError, field="bytes"):
        kept.add(EDITS[2])
    monkeypatch.setattr(pending, "MAX_EDITS", 3)
    with refuses(RequestError, field="3"):
        kept.add(EDITS[2])
    assert len(kept.read().edits) == 3


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"edits": [{"episode": 0, "dropped": true}]}',  # of no episode's key
        '{"edits": [{"episode": 0, "key": 1, "dropped": true}]}',  # of another dataset
        '{"edits": [{"episode": -1, "dropped": true}]}',
        '{"edits": [{"episode": 0, "begin_s": NaN}]}',
        '{"edits": [{"episode": 0}]}',
    ],
)
def test_a_file_of_other_edits_is_refused_and_stays(dataset: Path, content: str) -> None:
    path = name_edits(dataset)
    path.write_text(content)
    with refuses(OutputError, field="pick.edits.json"):
        PendingEdits(dataset)
    assert path.read_text() == content


def test_edits_that_do_not_fit_the_episodes_any_more_are_told(dataset: Path) -> None:
    keep(dataset)
    path = name_edits(dataset)
    content: dict[str, Any] = json.loads(path.read_text())
    content["edits"][0]["end_s"] = 50.0
    path.write_text(json.dumps(content))
    with refuses(OutputError, field=("pick.edits.json", "episode 0")):
        PendingEdits(dataset)


def _write_until_killed(dataset: Path) -> None:
    editing.write_meta = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    PendingEdits(dataset).write("pick-2", len(EDITS))


def test_a_kill_leaves_the_old_dataset_and_the_edits(dataset: Path, tmp_path: Path) -> None:
    keep(dataset)
    before = list_files(dataset)
    edits = read_edits(name_edits(dataset))
    process = forks.Process(target=_write_until_killed, args=(dataset,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list_files(dataset) == before
    assert read_edits(name_edits(dataset)) == edits
    assert not (tmp_path / "pick-2").exists()
    assert PendingEdits(dataset).write("pick-2", len(EDITS)).folder.is_dir()


def test_a_copy_that_fails_keeps_the_edits(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep(dataset)

    def fail(*_: object) -> None:
        # nothing changes while a copy is being written
        with refuses(RequestError, field="written"):
            kept.add(EDITS[2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(editing, "write_meta", fail)
    with refuses(OutputError, field="No space left"):
        kept.write("pick-2", 3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["pick", "pick.edits.json"]
    assert len(kept.add(EpisodeEdit(episode=1, restored=True)).edits) == 4
