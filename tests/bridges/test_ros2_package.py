"""The packages of `launch/ros2`: what they describe exists, and the launch files set all parameters."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from sam3_node_ros.link import Ros2Settings

from tests.support.paths import ROOT

ROS2 = ROOT / "launch/ros2"
NODE, MESSAGES, BRINGUP = (ROS2 / f"sam3_node_{name}" for name in ("ros", "msgs", "bringup"))
OPTIONAL = {"isaac_ros_segment_anything2_interfaces"}


def read_package(name: str) -> ElementTree.Element:
    return ElementTree.parse(ROS2 / name / "package.xml").getroot()


def list_dependencies(name: str) -> set[str]:
    tags = ("depend", "exec_depend", "buildtool_depend")
    return {str(found.text) for tag in tags for found in read_package(name).findall(tag)}


def list_imports(text: str) -> set[str]:
    """Return the top-level packages that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    return found


@pytest.mark.parametrize("name", [NODE.name, MESSAGES.name, BRINGUP.name])
def test_a_package_has_its_name_the_project_s_version_and_licence(name: str) -> None:
    package = read_package(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [package.findtext(tag) for tag in ("name", "version", "license")]
    assert found == [name, project["version"], project["license"]]


def test_every_import_is_a_dependency() -> None:
    own = {"sam3_node", "sam3_node_ros", "numpy", *sys.stdlib_module_names, *OPTIONAL}
    sources = [path.read_text() for path in NODE.glob("sam3_node_ros/*.py")]
    messages = {name for text in sources for name in re.findall(r'"(\w+_msgs|builtin_interfaces)/msg/', text)}
    imported = {name for text in sources for name in list_imports(text)}
    libraries = {"python3-numpy", "python3-opencv", "python3-zmq"}
    assert (imported - own) | messages | libraries == list_dependencies("sam3_node_ros")
    launched = {name for path in BRINGUP.glob("launch/*.py") for name in list_imports(path.read_text())}
    started = {"ament_cmake", "rviz2", "sam3_node_ros"}
    assert (launched - {*sys.stdlib_module_names}) | started == list_dependencies("sam3_node_bringup")


def test_every_definition_that_is_generated_names_its_dependencies() -> None:
    for name, package in tomllib.loads((ROS2 / "definitions.toml").read_text()).items():
        texts = [text for kind in ("msg", "srv") for text in package.get(kind, {}).values()]
        used = set(re.findall(r"^(\w+)/\w+", "\n".join(texts), flags=re.MULTILINE)) - {name}
        assert used == set(package["dependencies"])


def test_every_service_is_generated_with_its_dependencies() -> None:
    cmake = (MESSAGES / "CMakeLists.txt").read_text()
    services = sorted(MESSAGES.glob("srv/*.srv"))
    assert re.findall(r'"srv/(\w+)\.srv"', cmake) == [path.stem for path in services]
    used = set(
        re.findall(r"^(\w+)/\w+", "\n".join(path.read_text() for path in services), flags=re.MULTILINE)
    )
    (named,) = re.findall(r"DEPENDENCIES ([\w ]+)", cmake)
    assert set(named.split()) == used
    assert used <= list_dependencies("sam3_node_msgs")
    assert used <= set(re.findall(r"find_package\((\w+)", cmake))


def test_the_installed_files_exist() -> None:
    setup = (NODE / "setup.py").read_text()
    assert 'NAME = "sam3_node_ros"' in setup
    for name in ("bridge", "player"):
        assert f"{name} = {{NAME}}.{name}:main" in setup
    for name in (
        "package.xml",
        "resource/sam3_node_ros",
        "sam3_node_ros/bridge.py",
        "sam3_node_ros/player.py",
    ):
        assert (NODE / name).exists()
    assert "$base/lib/sam3_node_ros" in (NODE / "setup.cfg").read_text()


class Recorded:
    """An object of launch: its class and its arguments."""

    def __init__(self, kind: str, /, *arguments: Any, **options: Any) -> None:
        self.kind, self.arguments, self.options = kind, arguments, options


def make_recording_module(name: str) -> ModuleType:
    """Return a module whose classes and functions return what they were called with."""

    def find(kind: str) -> Any:
        if kind == "Transition":
            return SimpleNamespace(TRANSITION_CONFIGURE=1, TRANSITION_ACTIVATE=3)
        if kind == "get_package_share_directory":
            return lambda name: str(ROS2 / name)
        return lambda *arguments, **options: Recorded(kind, *arguments, **options)

    module = ModuleType(name)
    module.__getattr__ = find  # type: ignore[method-assign]
    module.__path__ = []
    return module


def describe(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Return what a launch file starts, evaluated without launch."""
    for module in (
        *(
            "ament_index_python",
            "ament_index_python.packages",
            "launch",
            "launch.actions",
            "launch.conditions",
        ),
        *("launch.events", "launch.launch_description_sources", "launch.substitutions", "launch_ros"),
        *(
            "launch_ros.actions",
            "launch_ros.event_handlers",
            "launch_ros.events",
            "launch_ros.events.lifecycle",
        ),
        *("launch_ros.parameter_descriptions", "lifecycle_msgs", "lifecycle_msgs.msg"),
    ):
        monkeypatch.setitem(sys.modules, module, make_recording_module(module))
    spec = importlib.util.spec_from_file_location("sam3_launch", BRINGUP / f"launch/{name}.launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (entities,) = module.generate_launch_description().arguments
    return entities


def list_arguments(entities: list[Recorded]) -> dict[str, str]:
    return {
        one.arguments[0]: one.options["default_value"]
        for one in entities
        if one.kind == "DeclareLaunchArgument"
    }


def test_the_launch_file_has_an_argument_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    entities = describe("sam3", monkeypatch)
    defaults = {field.name: field.default for field in fields(Ros2Settings)} | {"use_sim_time": False}
    assert list_arguments(entities) == {"namespace": "", "name": "sam3_bridge", "rviz": "False"} | {
        name: str(value) for name, value in defaults.items()
    }
    (node,) = [one for one in entities if one.kind == "LifecycleNode"]
    (parameters,) = node.options["parameters"]
    assert {name: value.options["value_type"] for name, value in parameters.items()} == {
        name: type(value) for name, value in defaults.items()
    }
    (handler,) = [one for one in entities if one.kind == "RegisterEventHandler"]
    assert handler.arguments[0].options["goal_state"] == "inactive"
    assert (node.options["package"], node.options["executable"]) == ("sam3_node_ros", "bridge")
    (rviz,) = [one for one in entities if one.kind == "Node"]
    assert Path(rviz.options["arguments"][1]).exists()
    lines = (BRINGUP / "config/sam3.yaml").read_text().splitlines()
    given = dict(line.strip().split(": ", 1) for line in lines if line.startswith("    "))
    assert {name: text.strip('"') for name, text in given.items()} == {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in defaults.items()
    }


def test_the_demo_gives_the_topics_of_the_player_to_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    entities = describe("demo", monkeypatch)
    assert list_arguments(entities) == {"recording": "", "rviz": "True"}
    (player,) = [one for one in entities if one.kind == "Node"]
    (bridge,) = [one for one in entities if one.kind == "IncludeLaunchDescription"]
    topics = {name: value for name, value in bridge.options["launch_arguments"] if name != "rviz"}
    assert topics.keys() <= {field.name for field in fields(Ros2Settings)}
    source = (NODE / "sam3_node_ros/player.py").read_text()
    assert all(topic.split("/")[-1] in source for topic in topics.values())
    assert (player.options["package"], player.options["executable"]) == ("sam3_node_ros", "player")


def test_the_view_of_rviz_shows_topics_that_the_node_has() -> None:
    shown = set(re.findall(r"Value: sam3_bridge/(\w+)", (BRINGUP / "rviz/sam3.rviz").read_text()))
    published = set(re.findall(r'"~/(\w+)"', (NODE / "sam3_node_ros/bridge.py").read_text()))
    assert shown
    assert shown <= published
