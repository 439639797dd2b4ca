"""Tests of `doctor`: cameras, the robot's description, who sends poses, and an installation of the client alone."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sam3_node.cli import doctor
from sam3_node.errors import find_version
from sam3_node.settings import load_settings
from sam3_node.transport import PosePublisher
from sam3_node.types import JointState
from tests.support.patience import PATIENCE_S
from tests.support.processes import until
from tests.support.refuses import mentions

URDF = """<robot name="arm"><link name="base"/><link name="tip">
<collision><geometry>{geometry}</geometry></collision></link>
<joint name="lift" type="prismatic"><parent link="base"/><child link="tip"/><axis xyz="0 0 1"/>
<limit lower="0" upper="1" effort="1" velocity="1"/></joint></robot>"""
BOX = '<box size="0.1 0.1 0.1"/>'
LIGHT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"pydantic", "pydantic_core", "pydantic_settings", "cv2", "packaging", "torch"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from sam3_node.__main__ import main
sys.exit(main())
"""
"""A start of the command in an installation without the extra cli."""


def rows(name: str, **settings: object) -> list[doctor.CheckResult]:
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    return [row for row in doctor.run_checks(load_settings(overrides=overrides)) if row.name == name]


@pytest.mark.skipif(not hasattr(os, "getloadavg"), reason="Windows tells no load")
@pytest.mark.parametrize("load", [0.0, 1e4])
def test_busy_processors_are_told_with_what_a_node_does(monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    row = next(row for row in doctor.run_checks(load_settings()) if row.name == "cpu")
    assert mentions(row.detail, f"{load:.1f}", "processors")
    assert mentions(row.hint, "threads", "troubleshooting.md#slow") == (load > 0)


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("cuda", False)])
def test_a_nodes_threads_are_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, device: str, told: bool
) -> None:
    status = {"cameras": {}, "paused": False, "uptime_s": 3.0, "model": "nano", "device": device}
    choice = {"threads": 2, "threads_reason": "median time of a step"}
    answers = doctor.NodeAnswers(status | choice, {"sam3-node": find_version("sam3-node") or ""})
    monkeypatch.setattr(doctor, "_ask_node", lambda settings: answers)
    (row,) = rows("node")
    assert mentions(row.detail, "2 CPU threads", "median time of a step") == told


@pytest.mark.parametrize(
    ("gpu", "cameras", "status", "words"),
    [
        ("h100", 1, "ok", ("80 GB of H100", "16 objects")),
        ("rtx-4070", 4, "ok", ("12 GB of RTX 4070", "4 cameras")),
        ("4 GB", 4, "warn", ("4 GB of a GPU of 4 GB",)),
    ],
)
def test_the_memory_of_a_gpu_is_estimated_without_it(
    gpu: str,
    cameras: int,
    status: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda settings: iter(()))
    settings = load_settings(overrides={"tracker.max_cameras": str(cameras), "tracker.max_objects": "16"})
    assert doctor.run_doctor(settings, doctor.parse_gpu(gpu)) == 0
    row = capsys.readouterr().out.splitlines()[0]
    assert row.split()[:3] == [status, "gpu", "memory"]
    assert mentions(row, *words)


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    for text in ("H10", "", "0GB", "99999GB"):
        with pytest.raises(ValueError, match="H100"):
            doctor.parse_gpu(text)


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("scene:shapes", "ok", ("opens",)),
        ("bag:/no/such/file.mcap", "fix", ("/no/such/file.mcap",)),
        ("video:/no/such/file.mp4", "fix", ("/no/such/file.mp4",)),
        ("webcam:63", "fix", ("/dev/video63", "list")),
        ("senc:shapes", "fix", ("did you mean",)),
        ("rtsp://camera.invalid/1", "ok", ("not tried",)),
    ],
)
def test_the_source_of_the_camera_is_looked_at(source: str, status: str, words: tuple[str, ...]) -> None:
    (row,) = rows("camera.source", camera__source=source)
    assert row.status == status
    assert mentions(row.detail, *words)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SAM 3.1's tracker in a file and a folder, the whole of it in a folder, and what is neither."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
    from tests.support.sam31_detector import whole_tensors
    from tests.support.tiny_clip import write_tiny_clip

    folder = tmp_path_factory.mktemp("checkpoints")
    tracker = random_tensors(small_sizes())
    torch.save({"model": tracker}, folder / "tracker.pt")
    for name, tensors in (("tracker", tracker), ("whole", whole_tensors()), ("untold", whole_tensors())):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "sam3.1_multiplex.safetensors")
    write_tiny_clip(folder / "whole")
    (folder / "empty").mkdir()
    save_file({"layer.weight": torch.zeros(1)}, folder / "other.safetensors")
    (folder / "pointer.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "status", "words"),
    [
        ("tracker.pt", "", "ok", ("SAM 3.1", "112 px", "groups of 16", "masks is not calibrated")),
        ("tracker", "", "ok", ("SAM 3.1", "sam3.1_multiplex.safetensors", "16 MB")),
        ("empty", "", "fix", ("config.json", "sam3.1_multiplex.safetensors")),
        ("other.safetensors", "", "fix", ("expected the tensors of SAM 3.1", "found 1 tensors")),
        ("pointer.pt", "", "fix", ("git lfs pull",)),
        ("absent.pt", "", "fix", ("no file", "absent.pt", "SAM 3.1's checkpoint")),
        ("whole", "sam3-concept", "ok", ("SAM 3.1", "its tokenizer beside it", "names is not calibrated")),
        ("untold", "sam3-concept", "fix", ("expected a tokenizer", "nobody is logged in")),
        ("tracker", "sam3-concept", "fix", ("SAM 3.1's detector", "take the whole checkpoint")),
        ("whole", "grounding-dino", "fix", ("--detector.kind sam3-concept",)),
        ("tracker.pt", "yolo-world", "fix", ("no folder", "weights convert")),
    ],
)
@pytest.mark.usefixtures("no_login")
def test_weights_in_one_file_are_described_without_loading(
    checkpoints: Path, name: str, kind: str, status: str, words: tuple[str, ...]
) -> None:
    path = str(checkpoints / name)
    if kind:
        row = rows("weights", detector__name=path, detector__kind=kind)[1]
    else:
        row = rows("weights", model__name=path)[0]
    assert row.status == status, row
    assert mentions(row.detail, *words)


def test_a_calibration_of_names_is_read(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    row = rows("weights", detector__name_calibration=path)[1]
    assert row.status == "fix"
    assert mentions(row.detail, str(path))
    path.write_text('{"detectors": ["nano"], "bias": 0, "weights": {}}')
    assert rows("weights", detector__name_calibration=path)[1].status == "ok"


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in to the hub, and its cache is empty."""
    weight_files = pytest.importorskip("sam3_node.models.weight_files")
    monkeypatch.setattr(weight_files.huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(weight_files, "find_file", lambda *args, **options: None)


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("sam3-concept", "warn", ("facebook/sam3.1 is gated", "nobody is logged in")),
        ("grounding-dino", "fix", ("SAM 3.1's checkpoint", "--detector.kind sam3-concept")),
        ("yolo-world", "fix", ("no folder facebook/sam3.1", "weights convert")),
    ],
)
@pytest.mark.usefixtures("no_login")
def test_sam31_on_the_hub_as_a_detector(kind: str, status: str, words: tuple[str, ...]) -> None:
    row = rows("weights", detector__name="facebook/sam3.1", detector__kind=kind)[1]
    assert row.status == status, row
    assert mentions(row.detail, *words)


@pytest.mark.usefixtures("no_login")
def test_sam31_in_the_cache_is_found_by_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_files = pytest.importorskip("sam3_node.models.weight_files")
    monkeypatch.setattr(
        weight_files,
        "find_file",
        lambda name, file, **options: file if file == "sam3.1_multiplex.pt" else None,
    )
    row = rows("weights", model__name="facebook/sam3.1")[0]
    assert row.status == "ok"
    assert mentions(row.detail, "facebook/sam3.1, in the cache of the hub", "masks is not calibrated")


def test_the_robots_description_is_read_with_its_meshes_and_base(tmp_path: Path) -> None:
    pytest.importorskip("yourdfpy")
    whole = tmp_path / "whole.urdf"
    whole.write_text(URDF.format(geometry=BOX))
    (row,) = rows("robot.urdf", robot__urdf=str(whole))
    assert row.status == "ok"
    assert mentions(row.detail, "lift")
    for gap in rows("robot", robot__urdf=str(whole)):
        assert gap.status == "warn"
    assert len(rows("robot", robot__urdf=str(whole))) == 2
    # a base that there is not, a mesh that there is not, and a file that there is not
    (row,) = rows("robot.urdf", robot__urdf=str(whole), robot__base="bench")
    assert row.status == "fix"
    assert mentions(row.detail, "bench")
    broken = tmp_path / "broken.urdf"
    broken.write_text(URDF.format(geometry='<mesh filename="none.stl"/>'))
    for path, named in ((broken, "none.stl"), (tmp_path / "none.urdf", "none.urdf")):
        (row,) = rows("robot.urdf", robot__urdf=str(path))
        assert row.status == "fix"
        assert mentions(row.detail, named)


def test_joints_that_the_sender_lacks_are_named(tmp_path: Path) -> None:
    pytest.importorskip("yourdfpy")
    urdf = tmp_path / "arm.urdf"
    urdf.write_text(URDF.format(geometry=BOX))
    endpoint = f"ipc://{tmp_path}/poses"
    (row,) = rows("spatial.poses", spatial__poses=endpoint)
    assert (row.status, mentions(row.detail, "nothing")) == ("warn", True)
    with PosePublisher(endpoint) as robot:
        stop = threading.Event()
        name = ["shoulder"]

        def send() -> None:
            while not stop.is_set():
                robot.send(JointState("robot", time.time_ns(), {name[0]: 0.1}))
                time.sleep(0.02)

        def listen() -> doctor.CheckResult:
            (row,) = rows("spatial.poses", spatial__poses=endpoint, robot__urdf=str(urdf))
            return row

        sending = threading.Thread(target=send)
        sending.start()
        try:
            # on a busy machine, nothing may come in the time in which the doctor listens
            until(lambda: mentions(listen().hint, "robot.urdf", "lift"), "the joint is missed")
            name[0] = "lift"
            until(lambda: listen().status == "ok", "the joint is found")
        finally:
            stop.set()
            sending.join()


def run_light(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        (("opencv-python-headless",), "ok", ()),
        (("opencv-python",), "ok", ()),
        (("opencv-python", "opencv-python-headless"), "fix", ("overwrite", "opencv-python-headless")),
    ],
)
def test_any_one_build_of_opencv_will_do(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], status: str, words: tuple[str, ...]
) -> None:
    find_version = doctor.find_version

    def pretend(name: str) -> str | None:
        if name in doctor.OPENCV_BUILDS:
            return "4.14.0.94" if name in installed else None
        return find_version(name)

    monkeypatch.setattr(doctor, "find_version", pretend)
    (row,) = rows("cv2")
    assert row.status == status
    assert mentions(row.detail, *words)
    (extras,) = rows("extras")
    assert mentions(extras.detail, "cli")


def test_help_and_doctor_work_without_the_extra_of_the_commands() -> None:
    shown = run_light("run", "--help")
    assert shown.returncode == 0
    assert mentions(shown.stdout, "PerceptionClient", "sam3-node[cli]", "sam3-node doctor")
    checked = run_light("doctor")
    assert checked.returncode == 0, checked.stderr
    assert mentions(checked.stdout, "pyzmq", "sam3-node[cli]", "works")
    assert run_light("--version").returncode == 0
    alone = run_light()
    assert alone.returncode == 2
    assert mentions(alone.stderr, "sam3-node doctor")
    assert "Traceback" not in alone.stderr
    refused = run_light("status")
    assert refused.returncode == 2
    assert mentions(refused.stderr, "sam3-node[cli]")
