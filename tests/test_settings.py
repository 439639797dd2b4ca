"""Tests of the settings: precedence of the layers, errors that name the field, and generated documentation."""

import itertools
from operator import attrgetter
from pathlib import Path

import pytest
from pydantic import ValidationError

from sam3_node.cli.main import main
from sam3_node.errors import SettingsError
from sam3_node.settings import (
    RobotSettings,
    Settings,
    SpatialSettings,
    describe_robot_gaps,
    load_settings,
    options,
)
from tests.support.refuses import mentions
from tests.support.tables import each_row


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options():
        monkeypatch.delenv("SAM3_" + option.name.upper().replace(".", "__"), raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "profile.toml"
    path.write_text(text)
    return path


def load_error(profile: Path | None = None, **overrides: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(profile, {name.replace("__", "."): value for name, value in overrides.items()})
    return str(caught.value)


def test_the_command_line_overrides_the_environment_and_that_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = write(tmp_path, '[camera]\nname = "profile"\nfps = 10\n[tracker]\nbank_size = 15\n')
    monkeypatch.setenv("SAM3_CAMERA__NAME", "environment")
    monkeypatch.setenv("SAM3_TRACKER__BANK_SIZE", "30")
    settings = load_settings(profile, {"camera.name": "line"})
    assert settings.camera.name == "line"
    assert settings.tracker.bank_size == 30
    assert settings.camera.fps == 10
    assert settings.camera.loop is False


def test_hub_names_and_wrong_types_in_a_profile_are_not_changed(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "[model]\nname = 'facebook/sam3'")).model.name == "facebook/sam3"
    home = load_settings(write(tmp_path, "[engine]\nfolder = '~/engines'")).engine.folder
    assert home == Path.home() / "engines"
    for text in ("camera = 3", "[engine]\nfolder = 3", "[camera]\ncalibration = 3", "[model]\nname = 3"):
        load_error(write(tmp_path, text))


def test_settings_that_a_robot_lacks_are_named(tmp_path: Path) -> None:
    spatial = SpatialSettings(poses="tcp://127.0.0.1:5553", calibration=(tmp_path / "c.toml",))
    robot = RobotSettings(urdf=tmp_path / "arm.urdf")
    assert describe_robot_gaps(RobotSettings(), SpatialSettings()) == ()
    assert describe_robot_gaps(robot, spatial) == ()
    poses, calibration = describe_robot_gaps(robot, SpatialSettings())
    assert mentions(poses, "spatial.poses")
    assert mentions(calibration, "spatial.calibration", "hand_eye")


def test_a_container_is_seven_numbers() -> None:
    given = load_settings(overrides={"spatial.container": "0.5,0,0.02,90,0.36,0.26,0.12"})
    assert given.spatial.container == (0.5, 0.0, 0.02, 90.0, 0.36, 0.26, 0.12)
    assert load_settings().spatial.container == ()
    for wrong in ("0.5", "0,0,0,0,0.3,0.2,0", "0,0,0,nan,0.3,0.2,0.1"):
        assert mentions(load_error(spatial__container=wrong), "spatial.container", "seven")


def test_variables_of_kubernetes_for_a_service_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {
        "SERVICE_HOST": "10.0.0.7",
        "SERVICE_PORT": "5551",
        "SERVICE_PORT_MASKS": "5551",
        "PORT": "tcp://10.0.0.7:5551",
        "PORT_5551_TCP": "tcp://10.0.0.7:5551",
        "PORT_5551_TCP_PROTO": "tcp",
        "PORT_5551_TCP_PORT": "5551",
        "PORT_5551_TCP_ADDR": "10.0.0.7",
    }
    for end, value in links.items():
        monkeypatch.setenv(f"SAM3_NODE_{end}", value)
    assert load_settings() == Settings()
    # of another name, or without the Service, they are misspelt settings
    monkeypatch.setenv("SAM3_NODE_PORTS", "1")
    assert mentions(load_error(), "SAM3_NODE_PORTS")
    monkeypatch.delenv("SAM3_NODE_PORTS")
    monkeypatch.delenv("SAM3_NODE_SERVICE_HOST")
    assert mentions(load_error(), "SAM3_NODE_PORT")


def test_text_is_converted_to_the_type_of_its_field() -> None:
    overrides = {"model.compile": "true", "camera.fps": "12.5", "transport.frames": "ipc://a, ipc://b,"}
    settings = load_settings(None, overrides)
    assert settings.model.compile is True
    assert settings.camera.fps == 12.5
    assert settings.transport.frames == ("ipc://a", "ipc://b")


def test_lists_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_TRANSPORT__FRAMES", "ipc://a,ipc://b")
    assert load_settings().transport.frames == ("ipc://a", "ipc://b")


def test_an_error_names_field_value_and_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = write(tmp_path, "[tracker]\nbank_size = 1\n")
    monkeypatch.setenv("SAM3_MODEL__THREADS", "many")
    text = load_error(profile, camera__fps="fast")
    assert "tracker.bank_size" in text
    assert f"found 1 in {profile}" in text
    assert "model.threads" in text
    assert mentions(text, "'many'", "environment")
    assert "camera.fps" in text
    assert mentions(text, "'fast'", "command line")


@each_row(
    ("text", "named"),
    [
        ("[tracker]\nbank = 3", "tracker.bank"),
        ("[trucker]\nbank_size = 3", "trucker"),
        ("tracker = 3", "tracker"),
        ("[camera]\nname = 'a/b'", "camera.name"),
        ("[camera]\nname = '..'", "camera.name"),
        ("[record]\ncameras = ['.']", "record.cameras.0"),
        ("[camera]\nfps = nan", "camera.fps"),
        ("[transport]\nframes = []", "transport.frames"),
        ("[model]\ndevice = 'tpu'", "model.device"),
        ("[spatial]\ncalibration = 3", "spatial.calibration"),
        ("[group]\ncameras = 3", "group.cameras"),
        ("[snapshot]\npath = [1]", "snapshot.path"),
    ],
)
def test_a_wrong_profile_is_refused_by_field(tmp_path: Path, text: str, named: str) -> None:
    assert f"{named}: " in load_error(write(tmp_path, text))


@pytest.mark.parametrize("text", ["[tracker", "\x00", "a = 1\na = 2"])
def test_an_invalid_toml_file_is_refused(tmp_path: Path, text: str) -> None:
    assert mentions(load_error(write(tmp_path, text)), "profile.toml", "TOML")


def test_invalid_json_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_GROUP__CAMERAS", "{")
    text = load_error()
    assert "group" in text
    assert "Source" not in text, "no names of classes"


def test_settings_created_directly_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_CAMERA__NAME", "environment")
    assert Settings().camera.name == "cam0"


def test_every_field_has_a_help_text() -> None:
    for option in options():
        assert option.help.endswith("."), option.name


@pytest.mark.parametrize(
    "old", ["detector.doubt", "detector.lost_s", "engine.least_cosine", "engine.least_iou"]
)
def test_a_name_from_before_the_first_release_is_refused(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, name = old.split(".")
    refused = f"{old}: no setting has this name"
    assert refused in load_error(write(tmp_path, f"[{section}]\n{name} = 0.5\n"))
    assert refused in load_error(**{old: "0.5"})
    with pytest.raises(ValidationError):
        Settings(**{section: {name: 0.5}})
    variable = f"SAM3_{section}__{name}".upper()
    monkeypatch.setenv(variable, "0.25")
    assert f"{variable}: no setting has this name" in load_error()


def test_the_command_line_refuses_a_name_from_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--detector.doubt", "2"])
    assert "--detector.doubt" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--help-settings"])
    assert "detector.doubt" not in capsys.readouterr().out


@each_row(
    ("text", "nearest"),
    [
        ("[tracker]\nbank_sise = 3", "bank_size"),
        ("[trucker]\nbank_size = 3", "tracker"),
        ("[model]\nbank_size = 3", "tracker.bank_size"),
        ("[camera]\nencoding = 'jpg'", "jpeg"),
        ("[engine]\nkind = 'tensor-rt'", "tensorrt"),
        ("[transport]\ndelivery = 'Newest'", "newest"),
        ("[[group.cameras]]\nsorce = 'webcam:0'", "source"),
        ("[group]\nprocesses = ['camera', 'nod']", "node"),
    ],
)
def test_a_misspelt_name_in_a_profile_is_answered_with_the_nearest(
    tmp_path: Path, text: str, nearest: str
) -> None:
    assert f"did you mean {nearest}?" in load_error(write(tmp_path, text))


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("SAM3_MODEL_NAME", "SAM3_MODEL__NAME"),
        ("SAM3_MODLE__NAME", "SAM3_MODEL__NAME"),
        ("SAM3_TRACKER__BANK", "SAM3_TRACKER__BANK_SIZE"),
        ("sam3_camera__nam", "SAM3_CAMERA__NAME"),
    ],
)
def test_an_unknown_variable_is_an_error_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str
) -> None:
    monkeypatch.setenv(variable, "3")
    text = load_error()
    assert variable in text
    assert f"did you mean {nearest}?" in text


def test_variables_of_other_programs_sections_and_any_case_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SAM_MODEL", "3")
    monkeypatch.setenv("SAM3_CAMERA", '{"name": "left"}')
    monkeypatch.setenv("sam3_camera__fps", "7")
    camera = load_settings().camera
    assert (camera.name, camera.fps) == ("left", 7)


def test_a_missing_profile_is_named_and_answered_with_the_nearest(tmp_path: Path) -> None:
    assert "nowhere.toml" in load_error(tmp_path / "nowhere.toml")
    profile = write(tmp_path, "")
    assert f"did you mean {profile}?" in load_error(tmp_path / "profil.toml")


PATHS = """
[transport]
keys = "keys"
[camera]
calibration = "wrist.toml"
source = "images:photos"
[model]
name = "../weights"
[engine]
folder = "engines"
scales = "fp8/scales.json"
recipe = "recipe.toml"
[detector]
name = "./detector"
vocabulary = "words.safetensors"
text_encoder = "clip"
[spatial]
calibration = ["a.toml", "/etc/b.toml", "~/c.toml"]
[record]
out = "recordings"
[snapshot]
path = "node.snapshot"
[console]
certificate = "tls/chain.pem"
key = "tls/key.pem"
[[group.cameras]]
calibration = "/etc/left.toml"
source = "webcam:0"
[[group.cameras]]
source = "bag:table.mcap"
[[group.cameras]]
source = "video:../a.mp4"
"""


def test_every_path_of_a_profile_starts_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path.parent)
    relative = write(tmp_path, PATHS).relative_to(tmp_path.parent)
    settings = load_settings(relative)
    expected = {
        "transport.keys": tmp_path / "keys",
        "camera.calibration": tmp_path / "wrist.toml",
        "camera.source": f"images:{tmp_path}/photos",
        "model.name": f"{tmp_path}/../weights",
        "engine.folder": tmp_path / "engines",
        "engine.scales": tmp_path / "fp8/scales.json",
        "engine.recipe": tmp_path / "recipe.toml",
        "detector.name": f"{tmp_path}/detector",
        "detector.vocabulary": tmp_path / "words.safetensors",
        "detector.text_encoder": tmp_path / "clip",
        "spatial.calibration": (tmp_path / "a.toml", Path("/etc/b.toml"), Path("/home/somebody/c.toml")),
        "record.out": tmp_path / "recordings",
        "snapshot.path": tmp_path / "node.snapshot",
        "console.certificate": tmp_path / "tls/chain.pem",
        "console.key": tmp_path / "tls/key.pem",
    }
    assert {name: attrgetter(name)(settings) for name in expected} == expected
    cameras = settings.group.cameras
    sources = ["webcam:0", f"bag:{tmp_path}/table.mcap", f"video:{tmp_path}/../a.mp4"]
    assert [camera.source for camera in cameras] == sources
    assert cameras[0].calibration == Path("/etc/left.toml")
    line = load_settings(relative, {"camera.calibration": "here.toml", "model.name": "./here"})
    assert (line.camera.calibration, line.model.name) == (Path("here.toml"), "./here")


def test_every_field_that_holds_paths_is_marked(tmp_path: Path) -> None:
    """A field of type Path without the mark would start at the working directory."""
    for name, section in Settings.model_fields.items():
        assert isinstance(section.annotation, type)
        for field, info in section.annotation.model_fields.items():
            if "Path" in str(info.annotation):
                is_list = "tuple" in str(info.annotation)
                text = f"[{name}]\n{field} = {['here'] if is_list else 'here'!r}\n"
                found = getattr(getattr(load_settings(write(tmp_path, text)), name), field)
                assert found == ((tmp_path / "here",) if is_list else tmp_path / "here"), f"{name}.{field}"


def test_other_layers_start_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SAM3_SNAPSHOT__PATH", "node.snapshot")
    monkeypatch.setenv("SAM3_SPATIAL__CALIBRATION", "a.toml,~/b.toml")
    monkeypatch.setenv("SAM3_CAMERA", '{"calibration": "~/c.toml", "source": "bag:~/d.mcap"}')
    settings = load_settings(write(tmp_path, PATHS), {"engine.scales": "s.json", "model.name": "./w"})
    assert settings.snapshot.path == Path("node.snapshot")
    assert settings.spatial.calibration == (Path("a.toml"), Path("/home/somebody/b.toml"))
    assert settings.camera.calibration == Path("/home/somebody/c.toml")
    assert settings.camera.source == "bag:/home/somebody/d.mcap"
    assert settings.engine.scales == Path("s.json")
    assert settings.model.name == "./w"
    assert settings.engine.recipe == tmp_path / "recipe.toml"


def test_names_and_empty_paths_of_a_profile_stay(tmp_path: Path) -> None:
    text = """
[model]
name = "facebook/sam3"
[detector]
name = "nano"
vocabulary = ""
[snapshot]
path = ""
[transport]
keys = ""
[spatial]
calibration = "a.toml,b.toml"
[camera]
source = "realsense:123456"
[[group.cameras]]
source = "realsense:take.db3"
calibration = "left.toml"
[[group.cameras]]
source = "rtsp://camera/stream"
"""
    settings = load_settings(write(tmp_path, text))
    assert (settings.model.name, settings.detector.name) == ("facebook/sam3", "nano")
    assert {settings.detector.vocabulary, settings.snapshot.path, settings.transport.keys} == {None}
    assert settings.spatial.calibration == (tmp_path / "a.toml", tmp_path / "b.toml")
    left, right = settings.group.cameras
    assert settings.camera.source == "realsense:123456"
    assert (left.source, left.calibration) == (f"realsense:{tmp_path}/take.db3", tmp_path / "left.toml")
    assert right.source == "rtsp://camera/stream"


@each_row(
    ("first", "second"),
    [
        ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:6000"),
        ("tcp://localhost:6000", "tcp://127.0.0.1:6000"),
        ("tcp://LOCALHOST:6000", "tcp://127.0.0.1:06000"),
        ("tcp://*:6000", "tcp://127.0.0.1:6000"),
        ("tcp://0.0.0.0:6000", "tcp://*:6000"),
        ("tcp://[::]:6000", "tcp://[::1]:6000"),
        ("tcp://[::]:6000", "tcp://127.0.0.1:6000"),
        ("tcp://[0:0::1]:6000", "tcp://[::1]:6000"),
        ("tcp://[::ffff:127.0.0.1]:6000", "tcp://127.0.0.1:6000"),
        ("tcp://127.1:6000", "tcp://127.0.0.1:6000"),
        ("tcp://robot:6000", "tcp://Robot:6000"),
        ("ipc:///tmp/a", "ipc:///tmp//a"),
        ("ipc:///tmp/b/../a", "ipc:///tmp/a"),
        ("ipc://@a", "ipc://@a"),
    ],
)
def test_one_endpoint_for_two_settings_is_refused(first: str, second: str) -> None:
    for name, other in itertools.combinations(("frames", "masks", "control"), 2):
        said = load_error(**{f"transport__{name}": first, f"transport__{other}": second})
        assert f"transport.{name} and transport.{other}: expected an endpoint each" in said
        assert first in said
        assert second in said
    poses = {"transport__masks": first, "spatial__poses": second}
    assert mentions(load_error(**poses), "transport.masks", "spatial.poses")
    several = {"transport__frames": f"ipc:///tmp/z,{first}", "transport__masks": second}
    assert mentions(load_error(**several), "transport.frames", "transport.masks")


@each_row(
    ("first", "second"),
    [
        ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:6001"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("ipc://*", "ipc://*"),
        ("tcp://10.0.0.11:6000", "tcp://10.0.0.12:6000"),
        ("tcp://10.0.0.11:6000", "tcp://*:6000"),  # of a camera on another machine
        ("tcp://127.0.0.1:6000", "tcp://127.0.0.2:6000"),
        ("tcp://[::1]:6000", "tcp://127.0.0.1:6000"),
        ("ipc:///tmp/a", "ipc:///tmp/b"),
        ("ipc://@a", "ipc://a"),
    ],
)
def test_different_endpoints_are_accepted(first: str, second: str) -> None:
    overrides = {"transport.frames": first, "transport.masks": second, "transport.control": "ipc:///tmp/c"}
    assert load_settings(None, overrides).transport.masks == second
