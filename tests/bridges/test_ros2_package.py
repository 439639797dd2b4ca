"""The two packages of `launch/ros2`: what they describe exists, and the launch file sets all parameters."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from sam3_node_ros.link import Ros2Settings

from tests.support.paths import ROOT

ROS2 = ROOT / "launch/ros2"
NODE, MESSAGES = ROS2 / "sam3_node_ros", ROS2 / "sam3_node_msgs"
LAUNCH = NODE / "launch/sam3.launch.py"


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


@pytest.mark.parametrize("name", ["sam3_node_ros", "sam3_node_msgs"])
def test_a_package_has_its_name_the_project_s_version_and_licence(name: str) -> None:
    package = read_package(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [package.findtext(tag) for tag in ("name", "version", "license")]
    assert found == [name, project["version"], project["license"]]


def test_every_import_is_a_dependency() -> None:
    own = {"sam3_node", "sam3_node_ros", "numpy", *sys.stdlib_module_names}
    sources = [path.read_text() for path in (*NODE.glob("sam3_node_ros/*.py"), LAUNCH)]
    messages = {name for text in sources for name in re.findall(r'"(\w+_msgs|builtin_interfaces)/msg/', text)}
    imported = {name for text in sources for name in list_imports(text)}
    assert (imported - own) | messages == list_dependencies("sam3_node_ros")


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
    assert "bridge = {NAME}.bridge:main" in setup
    for name in ("package.xml", "resource/sam3_node_ros", "sam3_node_ros/bridge.py"):
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
        return lambda *arguments, **options: Recorded(kind, *arguments, **options)

    module = ModuleType(name)
    module.__getattr__ = find  # type: ignore[method-assign]
    module.__path__ = []
    return module


def test_the_launch_file_has_an_argument_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "launch",
        "launch.actions",
        "launch.events",
        "launch.substitutions",
        "launch_ros",
        "launch_ros.actions",
        "launch_ros.event_handlers",
        "launch_ros.events",
        "launch_ros.events.lifecycle",
        "launch_ros.parameter_descriptions",
        "lifecycle_msgs",
        "lifecycle_msgs.msg",
    ):
        monkeypatch.setitem(sys.modules, name, make_recording_module(name))
    spec = importlib.util.spec_from_file_location("sam3_launch", LAUNCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (entities,) = module.generate_launch_description().arguments
    arguments = {
        one.arguments[0]: one.options["default_value"]
        for one in entities
        if one.kind == "DeclareLaunchArgument"
    }
    defaults = {field.name: field.default for field in fields(Ros2Settings)}
    assert arguments == {"namespace": "", "name": "sam3_bridge"} | {
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
