"""Tests of the command line: light imports, complete help, one line for each error, and text safe for a terminal."""

import io
import itertools
import json
import re
import shlex
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sam3_node import gpu_memory
from sam3_node.cli import doctor, requests, services
from sam3_node.cli import main as cli
from sam3_node.cli.main import main
from sam3_node.cli.parser import load_examples
from sam3_node.cli.progress import printable
from sam3_node.errors import DeviceError, ProcessError, RequestError
from sam3_node.settings import Settings, load_settings, options
from sam3_node.transport import ControlClient
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import Mask
from sam3_node.wire import Reply, Request, encode_mask
from tests.support.command_line import command_parser
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tests.support.tables import each_row
from tools.bench.processes import free_ports
from tools.docs.command_line import commands

COMMANDS = re.findall(
    r"\w+",
    "run camera watch object segment prompt demo doctor status pause resume reset vocabulary weights engine calibrate",
)


def sam3_node(*arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sam3_node", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has imported what it needs."""
    out = io.StringIO()
    errors = io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom sam3_node.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'cv2', 'zmq'} & set(sys.modules)))"
    )
    done = run_code(code)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in COMMANDS:
        assert re.search(rf"^    {command}\s", done.stdout, re.MULTILINE)


def test_every_setting_is_an_option_with_its_help() -> None:
    text = " ".join(run_here("run", "--help-settings").stdout.split())
    for option in options():
        if option.is_text:
            assert f"--{option.name}" in text
            assert " ".join(option.help.split()[:4]) in text


def test_version() -> None:
    assert sam3_node("--version").stdout.startswith("sam3-node ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "--tracker.bank_size", "1"), "tracker.bank_size"),
        (("run", "--profile", "nowhere.toml"), "nowhere.toml"),
        (("run", "--transport.masks", "nonsense"), "nonsense"),
        (("camera", "hologram:0"), "hologram"),
        (("camera", "video:nowhere.mp4"), "nowhere.mp4"),
        (("object", "add", "--mask", "nowhere.png"), "nowhere.png"),
        (("camera", "bag:nowhere.mcap"), "nowhere.mcap"),
        (("camera", "bag:."), "bag:."),
        (("camera", "webcam:99"), "webcam:99"),
        (("camera", "README.mp4"), "video:README.mp4"),
        (("watch", "--transport.masks", "nonsense"), "nonsense"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments: tuple[str, ...], named: str) -> None:
    done = run_here(*arguments)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("sam3-node: error: ")]
    assert len(lines) == 1
    assert named in lines[0]
    assert "Traceback" not in done.stderr


def test_a_request_without_a_node_is_an_error() -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    done = sam3_node("status", "--timeout", "0.5", "--transport.control", endpoint)
    assert done.returncode == 3
    assert endpoint in done.stderr
    assert mentions(done.stderr, "500 ms")


def fail(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command that fails with 2 prints on stderr."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = int(str(error.code))
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["wach"], "watch"),
        (["object", "ad"], "add"),
        (["watch", "--overlya", "a.mp4"], "--overlay"),
        (["camera", "--camera.fsp=3"], "--camera.fps"),
        (["camera", "--camera.encoding", "jpg"], "jpeg"),
        (["run", "--detector.kind", "groundingdino"], "grounding-dino"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"did you mean {nearest}?" in fail(arguments, capsys)


LISTED = {" ".join(words[1:]): parser for words, parser in commands(command_parser())}


@each_row("command", LISTED)
def test_every_command_has_examples_that_can_be_typed(command: str) -> None:
    examples, used = (load_examples()[kind] for kind in ("examples", "settings"))
    text = LISTED[command].format_help()
    assert examples[command]
    for line in examples[command]:
        assert f"\n  {line}\n" in text
        assert line.startswith(f"sam3-node {command}")
        args = command_parser().parse(shlex.split(line, comments=True)[1:])
        assert args.parser.prog == f"sam3-node {command}"
        overrides = {name: value for name, value in vars(args).items() if "." in name}
        load_settings(overrides=overrides)
    assert all(f"--{name} " in text for name in used.get(command, ()))
    assert examples.keys() - {""} == LISTED.keys()


def test_the_settings_of_one_group_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help-settings", "health"])
    text = capsys.readouterr().out
    assert ("--health.bind" in text, "--model.name" in text) == (True, False)
    assert mentions(fail(["run", "--help-settings", "helth"], capsys), "did you mean health")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["replay", "a.mcap", "-o", "o", "--from", "soon"], "--from"),
        (["replay", "a.mcap", "-o", "o", "--topics", ","], "--topics"),
        (["object", "remove", "x"], "expected a whole number, found 'x'"),
        (["object", "points", "1", "--count", "20000"], "expected an integer in 1..10000, found '20000'"),
        (["object", "add", "--point", "1,2,3"], "expected 2 numbers"),
        (["segment", "--box", "a,b,c,d"], "expected 4 numbers"),
        (["prompt", "mug", "--most", "mug"], "expected NAME=NUMBER, found 'mug'"),
        (["fly"], "'fly'"),
        (["status", "--timeout", "0"], "expected seconds"),
        (["status", "--timeout", "nan"], "expected seconds"),
        (["calibrate", "check", "a.toml", "--limit", "x"], "expected a number, found 'x'"),
        (["watch", "--profile", "PROFILE"], "group: expected a table of fields"),
    ],
)
def test_an_error_names_no_function_or_class(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text("group = 3\n")
    message = fail([str(profile) if word == "PROFILE" else word for word in arguments], capsys)
    assert expected in message
    assert not re.search(r"\b_\w+|invalid \w+ value|[a-z]Settings\b|Source\b", message)


@pytest.mark.parametrize("command", ["reset", "object add", "watch"])
def test_help_shows_what_concerns_the_command_and_where_the_settings_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, found in (("--help", False), ("--help-settings", True)):
        with pytest.raises(SystemExit):
            cli.main([*command.split(), option])
        text = capsys.readouterr().out
        assert ("--tracker.bank_size" in text) is found
        assert "--help-settings" in text


@pytest.mark.parametrize(
    ("prompt", "advice"),
    [
        (("--exclude", "3,3"), "a point inside the object, or a box"),
        (("--box", "0.1,0.2,0.5,0.6"), "multiply the fractions"),
        (("--box", "10,10,10.5,40"), "mark a larger part"),
    ],
)
def test_a_prompt_that_cannot_be_meant_is_refused_before_it_is_sent(
    prompt: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["object", "add"], ["segment"]):
        assert advice in fail([*command, *prompt], capsys)


def test_a_part_is_listed_and_chosen_under_an_id_of_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        mask = {"mask": encode_mask(Mask.from_full(np.eye(9, dtype=bool)), "rle")}
        masks = [{**mask, "score": score} for score in (0.9, 0.5)]
        return Reply(request.id, {"id": 7, "camera": "cam0", "seq": 3, **masks[0], "masks": masks})

    endpoint = f"ipc://{tmp_path}/control"
    common = ("--point", "4,5", "--transport.control", endpoint, "--request-id", "pick-17")
    with ControlServer(endpoint, answer):
        assert cli.main(["segment", "--multimask", *common]) == 0
        lines = [line.split()[:5] for line in capsys.readouterr().out.splitlines()[1:]]
        assert lines == [["0", "seq", "3", "score", "0.900"], ["1", "seq", "3", "score", "0.500"]]
        assert cli.main(["object", "add", "--seq", "3", "--choice", "1", *common]) == 0
    assert [request.request_id for request in asked] == ["pick-17"] * 2
    assert (asked[0].args["multimask"], asked[1].args["choice"]) == (True, 1)


@pytest.mark.parametrize("prompt", [("--point", "0.4,0.5"), ("--box", "0,0,1,1")])
def test_a_prompt_in_the_first_pixel_is_warned_about(
    prompt: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    assert cli.main(["segment", *prompt, "--timeout", "0.1", "--transport.control", endpoint]) == 3
    assert mentions(caplog.text, "WARNING", "first pixel", "multiply")


@pytest.mark.parametrize(
    "arguments",
    [
        ("watch", "--overlay"),
        ("segment", "--point", "3,3", "--out"),
        ("demo", "--out"),
        ("vocabulary", "build", "mug", "-o"),
        ("calibrate", "fp8", "nowhere.mcap", "-o"),
    ],
)
def test_outputs_are_checked_before_the_start(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "folder" / "out.mp4"
    assert f"cannot create the folder {tmp_path}/file/folder" in fail([*arguments, str(path)], capsys)
    folder = tmp_path / "a.mp4" / "overlay.mp4"
    folder.mkdir(parents=True)
    path = folder.parent if arguments[0] == "demo" else folder
    assert "overlay.mp4" in fail([*arguments, str(path)], capsys)


def test_an_overlay_replaces_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.mp4").write_text("earlier")
    assert "exists already" in fail(["watch", "--overlay", str(tmp_path / "a.mp4")], capsys)
    assert mentions(fail(["watch", "--overlay", str(tmp_path / "a.gif")], capsys), ".mp4")


def test_doctor_reports_the_core(tmp_path: Path) -> None:
    done = run_here(
        "doctor", "--transport.masks", f"ipc://{tmp_path}/masks", "--transport.control", "tcp://127.0.0.1:*"
    )
    assert done.returncode == 0, done.stdout
    names = "python", "pyzmq", "extras", "cv2", "realsense", "keys", "weights", "transport.masks", "clock"
    for name in names:
        assert f"  {name} " in done.stdout
    assert done.stdout.splitlines()[-1] == "the core works"
    assert not (tmp_path / "masks").exists()


def test_doctor_says_what_was_chosen_for_the_gpu_and_estimates_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = pytest.importorskip("sam3_node.engines.options")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    small = SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=8e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: small)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("sam3_node.engines.fast_torch.identify_setup", lambda settings: "a setup")
    settings = load_settings(overrides={"engine.folder": str(tmp_path), "tracker.max_objects": "64"})
    first, memory = options_of(settings)
    assert mentions(first.detail, "sam3-node tune")
    assert memory.status == "warn"
    trial = options.Trial({"model.compile": True}, {4: 7.0})
    options.Tuning((4,), (trial,), 0, "2026-11-26").save(options.find_path(settings))
    assert mentions(options_of(settings)[0].detail, "7.0 ms with 4 objects")


def options_of(settings: Settings) -> list[doctor.CheckResult]:
    """Return what the doctor says of options and memory of the GPU; the checks behind them do not run."""
    before = itertools.takewhile(lambda row: row.name != "realsense", doctor.run_checks(settings))
    return [row for row in before if row.name in ("options", "gpu memory")]


def test_doctor_asks_for_the_gpu_that_the_settings_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = row_of(load_settings(overrides={"model.device": "cuda:1"}), "gpu")
    assert asked.status == "fix"
    assert mentions(asked.detail, "model.device", "cuda:1")
    auto = load_settings(overrides={"model.device": "auto"})
    assert {row_of(auto, name).status for name in ("torch", "gpu")} <= {"ok", "warn"}


@pytest.mark.parametrize("token", [None, "hf_secret"])
def test_doctor_warns_of_gated_weights_without_a_login(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_files = pytest.importorskip("sam3_node.models.weight_files")
    monkeypatch.setattr(weight_files.huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(weight_files, "find_file", lambda *args, **options: None)
    check = row_of(load_settings(overrides={"model.name": "facebook/sam3"}), "weights")
    assert (check.status == "warn") == (token is None)
    assert mentions(check.hint, "hf auth login") == (token is None)


def test_the_estimate_of_memory_counts_the_bank_as_it_is() -> None:
    memory = pytest.importorskip("sam3_node.tracking.memory")
    tiny = pytest.importorskip("tests.support.tiny")
    model = tiny.tiny_model(hidden=64, size=56)
    for bank_size in (3, 7, 15):
        bank = memory.MemoryBank(model, 2, bank_size, memory.get_rule("confident"), history=1)
        slots = bank.features.shape[1]
        more = gpu_memory.estimate_gpu_gb(66, bank_size) - gpu_memory.estimate_gpu_gb(64, bank_size)
        assert more == pytest.approx(2 * slots * 72 * 72 * 64 * 2 / 1e9)


def test_the_estimate_of_groups_counts_their_bank_as_it_is() -> None:
    pytest.importorskip("torch")
    from sam3_node.models.sam31 import random_model
    from sam3_node.perception.catch_up import MAX_CORRECTIONS
    from sam3_node.tracking import Tracker

    model = random_model(56, 32)
    assert model.slots == gpu_memory.GROUP_OBJECTS
    grid = 72 / model.grid[0]
    for bank_size in (3, 7, 15):
        bank = Tracker(model, 64, bank_size, history=1, corrections=MAX_CORRECTIONS).bank
        # as many channels and tokens as at full size, in bfloat16
        features = bank.bank.features.nbytes * grid**2 * 256 / 32 / 2 / 1e9
        sheets = bank._logits.nbytes * grid**2 / 2 / 1e9
        both = [gpu_memory.estimate_groups_gpu_gb(64, bank_size, cameras) for cameras in (1, 2)]
        assert both[1] - both[0] - gpu_memory.CACHE_GB == pytest.approx(features + sheets)
    counts = [gpu_memory.estimate_groups_gpu_gb(objects) for objects in (1, 16, 17)]
    assert counts[0] == counts[1] < counts[2]


def test_doctor_reports_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = run_here("doctor", "--transport.control", endpoint)
    row = next(line for line in done.stdout.splitlines() if "transport.control" in line)
    assert row.startswith("warn")


def test_doctor_checks_the_files_that_the_settings_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.toml"
    damaged.write_text("version = 1\nintrinsics = 3\n")
    options = {"spatial.calibration": damaged, "transport.keys": tmp_path, "model.name": "./absent"}
    assert cli.main(["doctor", *(f"--{name}={value}" for name, value in options.items())]) == 1
    printed = capsys.readouterr().out
    rows = [line.split(maxsplit=2) for line in printed.splitlines()]
    assert {name for status, name, _ in rows if status == "fix"} == {"keys", "calibration", "weights"}
    assert all(text in printed for text in ("intrinsics: expected a table", "./absent"))


def row_of(settings: Settings, name: str) -> doctor.CheckResult:
    """Return the first row by this name of what the doctor finds; the checks behind it do not run."""
    return next(row for row in doctor.run_checks(settings) if row.name == name)


def test_doctor_asks_the_running_node() -> None:
    state = {"paused": False, "uptime_s": 63.2, "model": "nano", "device": "cpu"}
    with ControlServer("tcp://127.0.0.1:0", lambda request: Reply(request.id, state)) as server:
        settings = load_settings(overrides={"transport.control": server.endpoint})
        for version, status in ((doctor.find_version("sam3-node"), "ok"), ("0.0.1", "warn")):
            state |= {"versions": {"sam3-node": version}, "cameras": {"left": {"masks_age_ms": 120.4}}}
            row = row_of(settings, "node")
            assert row.status == status
            for part in ("running for 63 s", str(version), "nano", "left masks 120 ms old"):
                assert part in row.detail
        # a node with a fault holds its endpoints, too; a refusal of long ago is no news
        state["versions"] = {"sam3-node": doctor.find_version("sam3-node")}
        for silent_s, status in ((0.2, "warn"), (3600.0, "ok")):
            found = {"frames": 3, "last_error": "no stamp", "silent_s": silent_s}
            state["frames_refused"] = {"left": found}
            rows = list(doctor.run_checks(settings))
            assert [row.status for row in rows if row.name == "node"] == [status]
            assert not [row for row in rows if row.name.startswith("transport.")]


@pytest.mark.parametrize(
    ("command", "code", "start"), [("doctor", 0, "warn  torch "), ("run", 2, "sam3-node: error: ")]
)
def test_without_torch_the_extra_is_named(command: str, code: int, start: str) -> None:
    without = "import sys\nsys.modules['torch'] = None\nfrom sam3_node.cli.main import main\n"
    done = run_code(f"{without}sys.exit(main(['{command}']))")
    assert done.returncode == code, done.stderr
    (row,) = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(start)]
    assert mentions(row, "pip install 'sam3-node[node]'", "pip install -e '.[node]'")


def test_doctor_does_not_advise_what_needs_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """lerobot would bring an older torch into the node's environment."""
    lines = [
        *(f'absent-{extra}>=1; extra == "{extra}"' for extra in ("bags", "dev", "lerobot-policy", "hdf5")),
        'pyzmq>=99; extra == "old"',
        "sam3-node[bags]; extra == 'gym'",
        "pyzmq>=26",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    assert row_of(Settings(), "pyzmq").status == "ok"
    assert row_of(Settings(), "pyzmq [old]").status == "warn"
    extras = row_of(Settings(), "extras")
    assert extras.detail == "old"
    assert extras.hint.startswith("not installed: bags, hdf5; pip install")


@pytest.mark.parametrize(
    ("version", "bounds", "status"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", "ok"),
        ("2.14.0", "<2.14,>=2.11", "warn"),
        ("4.14.0.94", ">=4.14,<5", "ok"),
        ("5.0", ">=4.14,<5", "warn"),
        ("1.0.8rc1", ">=1.0.8", "ok"),
        ("27", "", "ok"),
        ("4.14.0-12-gabcdef", ">=4.14,<5", "warn"),
    ],
)
def test_version_bounds(monkeypatch: pytest.MonkeyPatch, version: str, bounds: str, status: str) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [f'thing{bounds}; extra == "more"'])
    monkeypatch.setattr(doctor, "find_version", lambda name: version)
    assert row_of(Settings(), "thing [more]").status == status


@pytest.mark.parametrize(("major", "advice"), [(7, ["model.dtype auto", "float16"]), (8, [])])
def test_doctor_says_what_a_gpu_without_bfloat16_takes(
    major: int, advice: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name="a GPU", major=major, minor=5, total_memory=16 << 30)
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    detail = row_of(Settings(), "gpu 0").detail
    assert f"capability {major}.5, 16 GiB" in detail
    assert [word for word in ("model.dtype auto", "float16") if word in detail] == advice


def test_doctor_hints_at_the_udev_rules_where_the_sdk_finds_no_camera(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        doctor, "list_realsense", lambda: iter(["realsense:831612  D435, USB 3.2", "  colour"])
    )
    found = row_of(Settings(), "realsense")
    assert (found.status, found.detail, found.hint) == ("ok", "realsense:831612  D435, USB 3.2", "")
    monkeypatch.setattr(doctor, "list_realsense", lambda: iter([]))
    none = row_of(Settings(), "realsense")
    assert none.status == "ok"
    assert "udev rules" in none.hint


def test_without_a_file_the_vocabulary_of_the_detector_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    assert main(["vocabulary", "list"]) == 0
    head, *phrases = capsys.readouterr().out.splitlines()
    assert "nano_detector" in head
    assert "red mug" in phrases


def run_against_server(result: object, *arguments: str) -> tuple[Request, str]:
    """Return the first request of a command, and its output when the reply is `result`. Others are refused."""
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        if len(asked) > 1:
            return Reply.failed(request.id, RequestError("expected one request"))
        return Reply(request.id, result)

    with ControlServer("tcp://127.0.0.1:0", answer) as server:
        done = run_here(*arguments, "--transport.control", server.endpoint)
    assert done.returncode == 0, done.stderr
    return asked[0], done.stdout


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        (("pause",), {}),
        (("resume",), {}),
        (("reset",), {}),
        (("reset", "--camera", "a"), {"camera": "a"}),
        (("status",), {}),
    ],
)
def test_the_node_is_paused_resumed_reset_and_asked(arguments: tuple[str, ...], args: dict[str, str]) -> None:
    request, printed = run_against_server({"paused": False}, *arguments)
    assert (request.op, request.args) == (arguments[0], args)
    assert (json.loads(printed) if printed else None) == (
        {"paused": False} if arguments == ("status",) else None
    )


def test_any_request_can_be_sent() -> None:
    reply = {"id": 3, "camera": "left", "label": "blue mug"}
    request, printed = run_against_server(reply, "request", "rename_object", "id=3", "label=blue mug")
    assert (request.op, request.args) == ("rename_object", {"id": 3, "label": "blue mug"})
    assert json.loads(printed) == reply


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("rename_object", "id=x", "label=mug"), "expected 'id' to be an integer"),
        (("rename_object", "id"), "expected NAME=VALUE, found 'id'"),
        (("rename_object", "name=mug"), "unknown argument 'name'; expected id, label, camera, epoch"),
    ],
)
def test_a_wrong_request_is_not_sent(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["request", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_the_list_of_objects_names_their_cameras() -> None:
    line = {"id": 1, "label": "cup", "state": "occluded", "score": 0.5, "age": 12, "frames_since_seen": 3}
    objects = [{"camera": camera, **line} for camera in ("left", "right")]
    printed = run_against_server({"objects": objects}, "object", "list")[1].splitlines()
    assert [row.split()[:3] for row in printed] == [["left", "1", "cup"], ["right", "1", "cup"]]
    assert printed[0].endswith("age 12  unseen for 3")


LOST = {
    **{
        "camera": "left",
        "epoch": 1,
        "id": 3,
        "label": "mug",
        "state": "lost",
        "in_view": False,
        "age_s": 12.5,
    },
    **{"seq": 9, "capture_ns": 17, "box": [1, 2, 3, 4], "frame": "base", "position_m": [0.5, 0.0, 0.125]},
    **{"held": True, "hidden_by": "robot", "has_picture": True},
}


def test_places_are_printed_a_line_each() -> None:
    seen = {"in_view": True, "state": "tracked", "held": False, "hidden_by": None, "position_m": None}
    never = {"id": 5, "age_s": None, "box": None, "state": "tentative"}
    objects = [LOST | {"id": 4} | seen, LOST, LOST | seen | never | {"in_view": False}]
    request, printed = run_against_server({"objects": objects}, "where", "mug", "--camera", "left")
    assert (request.op, request.args) == ("where", {"label": "mug", "camera": "left"})
    assert [" ".join(line.split()) for line in printed.splitlines()] == [
        "left 4 mug tracked in view box 1,2,3,4",
        "left 3 mug lost seen 12.5 s ago at 0.500 0.000 0.125 m in base held hidden by robot",
        "left 5 mug tentative not seen yet",
    ]


def test_places_of_an_id_are_json_and_none_are_unknown() -> None:
    request, printed = run_against_server({"objects": [LOST]}, "where", "3", "--json")
    assert request.args == {"id": 3}
    (shown,) = json.loads(printed)
    assert LOST.items() <= shown.items()
    assert run_against_server({"objects": []}, "where")[1] == "unknown\n"


def test_the_picture_of_the_first_place_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Request] = []
    objects = [LOST]
    picture = {"id": 3, "camera": "left", "seq": 9, "capture_ns": 17, "box": [0, 0, 9, 9], "jpeg": b"JPEG"}

    def answer(request: Request) -> Reply:
        asked.append(request)
        return Reply(request.id, picture if request.op == "picture" else {"objects": objects})

    endpoint = f"ipc://{tmp_path}/control"
    command = ["where", "mug", "--picture", str(tmp_path / "mug.jpg"), "--transport.control", endpoint]
    with ControlServer(endpoint, answer):
        assert cli.main(command) == 0
        assert (tmp_path / "mug.jpg").read_bytes() == b"JPEG"
        assert asked[1].args == {"id": 3, "camera": "left", "epoch": 1}
        objects.clear()
        assert cli.main(command) == 2
    assert "unknown" in capsys.readouterr().out


def test_an_object_is_added_by_looks() -> None:
    reply = {"id": 4, "camera": "wrist", "epoch": 1}
    looks = ("--like", "3", "--like-camera", "left", "--camera", "wrist")
    request, printed = run_against_server(reply, "object", "add", *looks)
    assert (request.op, printed) == ("add_like", "4\n")
    assert request.args == {"like": 3, "like_camera": "left", "camera": "wrist"}


def test_adding_prints_the_id_and_refining_the_mask() -> None:
    assert run_against_server({"id": 4, "camera": "cam0"}, "object", "add", "--point", "5,6")[1] == "4\n"
    mask = encode_mask(Mask.from_full(np.ones((4, 6), dtype=np.bool_)))
    reply = {"id": 4, "camera": "cam0", "seq": 9, "score": 0.5, "mask": mask}
    request, printed = run_against_server(
        reply, "object", "refine", "4", "--point", "5,6", "--exclude", "1,1"
    )
    assert request.args == {"id": 4, "points": [[5.0, 6.0], [1.0, 1.0]], "labels": [1, 0]}
    assert printed == "seq 9  score 0.500  area 24  box 0,0,6,4\n"


def test_names_go_with_their_limits() -> None:
    limits = ("--score", "red mug=0.4", "--most", "bottle=2", "--most", "red mug=1")
    request, printed = run_against_server({"prompts": []}, "prompt", "red mug", "bottle", *limits)
    assert (request.op, printed) == ("set_prompts", "")
    assert request.args == {
        "prompts": ["red mug", "bottle"],
        "scores": {"red mug": 0.4},
        "most": {"bottle": 2, "red mug": 1},
    }


def test_a_failed_gpu_has_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("the GPU has failed")

    monkeypatch.setattr(services, "run", fail)
    assert cli.main(["run"]) == cli.DEVICE_FAILED == 4


def test_the_last_lines_of_a_process_stay_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ProcessError("node ended with exit code 3; its last lines:\n  one\n  two")

    monkeypatch.setattr(requests, "status", fail)
    assert cli.main(["status"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "sam3-node: error: node ended with exit code 3; its last lines:",
        "  one",
        "  two",
    ]


def test_escape_sequences_and_directions_are_replaced() -> None:
    assert printable("mug\x1b[2J\u202egum\r\x07 \u4e2d\u6587\n") == "mug?[2J?gum?? \u4e2d\u6587?"
    assert printable("two\nlines\r", line_feeds=True) == "two\nlines?"


FOUND = {"id": 1, "state": "tracked", "score": 0.5, "age": 1, "frames_since_seen": 0}
TRACKED = FOUND | {"camera": "c\x1b[1m", "label": "cup\x1b[31m\u202e"}


@pytest.mark.parametrize(
    ("answer", "code", "shown"),
    [
        (RequestError("no\x1b]0;title\x07 object"), 2, "sam3-node: error: no?]0;title? object\n"),
        ({"objects": [TRACKED]}, 0, "c?[1m           1  cup?[31m? "),
    ],
)
def test_texts_of_the_node_cannot_control_the_terminal(
    answer: Any, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*_: object, **__: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ControlClient, "call_within", call)
    assert main(["object", "list"]) == code
    printed = capsys.readouterr()
    assert (printed.out + printed.err).startswith(shown)
