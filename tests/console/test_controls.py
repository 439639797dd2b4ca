"""Tests of the console's requests that need no browser."""

from pathlib import Path

from sam3_node.console.controls import MAX_BEGUN, MAX_LINE, RESULT, Controls, RecorderLines
from sam3_node.settings import Settings
from sam3_node.transport.control_server import ControlServer
from sam3_node.wire import Reply


def test_a_picture_is_text_for_the_page(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    settings = Settings(transport={"control": endpoint})  # type: ignore[arg-type]
    crop = {"id": 1, "seq": 2, "capture_ns": 3, "box": [0, 0, 9, 9], "jpeg": b"JPEG"}
    with (
        ControlServer(endpoint, lambda request: Reply(request.id, crop)),
        Controls(settings, dict, lambda: None) as controls,
    ):
        shown = controls.call("picture", {"id": 1})
    assert shown == crop | {"box": [0, 0, 9, 9], "jpeg": "SlBFRw=="}


def test_the_output_of_a_long_recording_is_not_kept() -> None:
    lines = RecorderLines()
    for number in range(1000):
        print(f"{number} frames, {'x' * 2 * MAX_LINE}", file=lines, flush=True)
    print("1000 frames", file=lines)
    assert lines.shown == "1000 frames"
    lines.write("x" * 10 * MAX_BEGUN)  # a line without an end
    kept = [value for value in vars(lines).values() if isinstance(value, str)]
    assert sum(map(len, kept)) <= 2 * MAX_LINE + MAX_BEGUN
    assert lines.getvalue() == ""


def test_the_line_of_the_finished_recording_is_shown_to_the_end() -> None:
    lines = RecorderLines()
    assert lines.shown == ""
    print("\nno node answers yet", file=lines)
    assert lines.shown == "no node answers yet"
    print(f"{RESULT}5 frames in a.mcap", file=lines)
    print("5.0 frames/s", file=lines)
    assert lines.shown == f"{RESULT}5 frames in a.mcap"


def test_a_long_line_of_the_result_is_found_though_it_comes_in_parts() -> None:
    lines = RecorderLines()
    for part in (RESULT, "a" * 2 * MAX_LINE, ".mcap", "\n", "5.0 frames/s\n"):
        lines.write(part)
    assert lines.shown.endswith("a.mcap")
    assert len(lines.shown) == MAX_LINE
