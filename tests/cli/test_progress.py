"""Progress on a terminal and in a log: of tasks in units, and of steps of an engine build."""

import io
import re
from contextlib import closing
from pathlib import Path

import pytest

from sam3_node.cli import main as cli
from sam3_node.cli import replay
from sam3_node.cli.progress import ProgressBar, format_duration
from sam3_node.cli.replay import describe_progress
from sam3_node.replay.cluster.scheduler import RunProgress
from sam3_node.replay.store import Summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_a_line_for_each_finished_task() -> None:
    out = io.StringIO()
    bar = ProgressBar(out=out)
    for done in range(1, 11):
        bar("replaying", done, 10)
    bar("writing mcap", 10, 10)
    bar("writing coco", 3, None)
    bar.close()
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["replaying: 10/10 frames", "writing mcap: 10/10 frames"]


def test_a_log_has_lines_while_a_task_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sam3_node.cli.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    bar = ProgressBar(out=out)
    for done in range(10):
        now[0] = 4.0 * done
        bar("replaying", done, 100)
    assert out.getvalue().splitlines() == [
        "replaying: 3/100 frames, 0.2 frames/s, 6:28 left",
        "replaying: 6/100 frames, 0.2 frames/s, 6:16 left",
        "replaying: 9/100 frames, 0.2 frames/s, 6:04 left",
    ]


def test_a_terminal_has_one_line_for_each_task() -> None:
    out = Terminal()
    bar = ProgressBar(out=out)
    bar("replaying", 1, 2)
    bar("replaying", 2, 2)
    bar("writing mcap", 2, 2)
    bar.close()
    bar.close()
    first, second, rest = out.getvalue().split("\n")
    assert "2/2" in first.split("\r")[-1]
    assert "writing mcap" in second
    assert not rest


def test_a_note_replaces_the_rate() -> None:
    terminal = Terminal()
    log = io.StringIO()
    for out in (terminal, log):
        bar = ProgressBar("recordings", out)
        bar("replaying", 0, 2, "3 workers")
        bar("replaying", 2, 2, "1 workers")
        bar.close()
    assert log.getvalue() == "replaying: 2/2 recordings, 1 workers\n"
    assert "3 workers" in terminal.getvalue()
    assert "1 workers" in terminal.getvalue().split("\r")[-1]


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (187, "3:07"), (7387, "2:03:07")])
def test_durations_are_formatted_as_a_clock(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_progress_of_many_recordings_is_one_line() -> None:
    line = describe_progress(RunProgress(1, 3, 2, 120, 40.0, 65.0))
    assert line == "2 workers, 120 frames, 40.0 frames/s, 1:05 left"
    assert "left" not in describe_progress(RunProgress(3, 3, 0, 120, 40.0, 0.0))


def test_steps_are_shown_in_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sam3_node.cli.progress.time.monotonic", lambda: now[0])
    terminal = Terminal()
    log = io.StringIO()
    for out in (terminal, log):
        with closing(ProgressBar("%", out)) as bars:
            for title in ("encode", "read"):
                for now[0], fraction in ((0.0, 0.0), (4.0, 0.25), (30.0, 1.0)):
                    bars.report(title, fraction)
    assert "encode:   0%|" in terminal.getvalue()
    lines = log.getvalue().splitlines()
    assert lines == [f"{title}: 100/100 %, 3.3 %/s, done in 30.0 s" for title in ("encode", "read")]


def test_names_of_recordings_and_their_results_cannot_rewrite_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # two recordings: each is named in what is said about it
    paths = [tmp_path / f"\x1b[31m{number}.mcap" for number in range(2)]
    for path in paths:
        path.write_bytes(b"no recording")
    arguments = ["replay", *map(str, paths), "-o", str(tmp_path / "out"), "--everything"]
    assert cli.main(arguments) != 0
    named = ("\x1b[31m", "every", "forward", "\x1b]0;x\x07", "cpu")
    summary = Summary(*named, 1, 0, 0, {"\x1b[2J": 1}, {}, seconds=1.0, frames_per_s=1.0)
    summary.notes.append("found \u202e\x1b[1A")
    replay._print(*summary.lines())
    with closing(ProgressBar()) as bar:
        bar("\x1b[31m", 1, 1, "\x1b[2K")
    printed = capsys.readouterr()
    assert "?[31m" in printed.out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", printed.out + printed.err.replace("\r", ""))
