"""The packages of `launch/ros2`: what they describe exists, and the launch files set all parameters."""

import ast
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest
from sam3_node_ros.link import Ros2Settings

from tests.support.paths import ROOT

ROS2 = ROOT / "launch/ros2"
NODE, MESSAGES, BRINGUP = (ROS2 / f"sam3_node_{name}" for name in ("ros", "msgs", "bringup"))
OPTIONAL = {
    "ffmpeg_image_transport_msgs",
    "foxglove_msgs",
    "isaac_ros_segment_anything2_interfaces",
    "moveit_msgs",
}


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
    assert (imported | messages) - own | libraries == list_dependencies("sam3_node_ros")
    launched = {name for path in BRINGUP.glob("launch/*.py") for name in list_imports(path.read_text())}
    started = {"ament_cmake", "rviz2", "sam3_node_ros"}
    assert (launched - {*sys.stdlib_module_names}) | started == list_dependencies("sam3_node_bringup")


def test_every_definition_that_is_generated_names_its_dependencies() -> None:
    for name, package in tomllib.loads((ROS2 / "definitions.toml").read_text()).items():
        texts = [text for kind in ("msg", "srv") for text in package.get(kind, {}).values()]
        used = set(re.findall(r"^(\w+)/\w+", "\n".join(texts), flags=re.MULTILINE)) - {name}
        assert used == set(package["dependencies"])


def test_every_message_and_service_is_generated_with_its_dependencies() -> None:
    """`make ros2` shows that the packages build and install what they name."""
    files = [*sorted(MESSAGES.glob("msg/*.msg")), *sorted(MESSAGES.glob("srv/*.srv"))]
    texts = "\n".join(path.read_text() for path in files)
    used = set(re.findall(r"^(\w+)/\w+", texts, flags=re.MULTILINE))
    assert used <= list_dependencies("sam3_node_msgs")
    cmake = (MESSAGES / "CMakeLists.txt").read_text()
    assert re.findall(r'"(?:msg|srv)/(\w+)\.(?:msg|srv)"', cmake) == [path.stem for path in files]
    generated = re.search(r"DEPENDENCIES (.+)", cmake)
    assert generated is not None
    assert set(generated[1].split()) == used


def describe(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the calls of launch's classes, by their names, when a launch file is evaluated."""
    calls = MagicMock()
    calls.get_package_share_directory = lambda package: str(ROS2 / package)
    text = (BRINGUP / f"launch/{name}.launch.py").read_text()
    for module in re.findall(
        r"^from ((?:launch|lifecycle_msgs|ament_index_python)[\w.]*)", text, re.MULTILINE
    ):
        for end in re.finditer(r"\.|$", module):  # and its packages
            monkeypatch.setitem(sys.modules, module[: end.start()], calls)
    scope: dict[str, Any] = {}
    exec(text, scope)
    scope["generate_launch_description"]()
    return calls


def list_arguments(calls: Any) -> dict[str, str]:
    return {one.args[0]: one.kwargs["default_value"] for one in calls.DeclareLaunchArgument.call_args_list}


def test_the_launch_file_has_an_argument_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = describe("sam3", monkeypatch)
    defaults = {field.name: field.default for field in fields(Ros2Settings)} | {"use_sim_time": False}
    texts = {name: str(value) for name, value in defaults.items()}
    assert list_arguments(calls) == {"namespace": "", "name": "sam3_bridge", "rviz": "False"} | texts
    node = calls.LifecycleNode.call_args.kwargs
    assert (node["package"], node["executable"]) == ("sam3_node_ros", "bridge")
    assert node["parameters"][0].keys() == defaults.keys()
    kinds = [one.kwargs["value_type"] for one in calls.ParameterValue.call_args_list]
    assert kinds == list(map(type, defaults.values()))
    assert calls.OnStateTransition.call_args.kwargs["goal_state"] == "inactive"
    assert Path(calls.Node.call_args.kwargs["arguments"][1]).exists()
    lines = (BRINGUP / "config/sam3.yaml").read_text().splitlines()
    given = dict(line.strip().split(": ", 1) for line in lines if re.match("    [^#]", line))
    found = {name: text.strip('"').replace("true", "True") for name, text in given.items()}
    assert {name: text.replace("false", "False") for name, text in found.items()} == texts


def test_the_demo_gives_the_topics_of_the_player_to_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = describe("demo", monkeypatch)
    assert list_arguments(calls) == {"recording": "", "rviz": "True"}
    topics = dict(calls.IncludeLaunchDescription.call_args.kwargs["launch_arguments"])
    assert topics.keys() <= {field.name for field in fields(Ros2Settings)} | {"rviz"}
    source = (NODE / "sam3_node_ros/player.py").read_text()
    assert all(str(topic).split("/")[-1] in source for name, topic in topics.items() if name != "rviz")
    player = calls.Node.call_args.kwargs
    assert (player["package"], player["executable"]) == ("sam3_node_ros", "player")


def test_the_view_of_rviz_shows_topics_that_the_node_has() -> None:
    shown = set(re.findall(r"Value: sam3_bridge/(\w+)", (BRINGUP / "rviz/sam3.rviz").read_text()))
    published = set(re.findall(r'"~/(\w+)"', (NODE / "sam3_node_ros/bridge.py").read_text()))
    assert shown
    assert shown <= published
