"""Builds the packages of this folder with colcon, in the virtual environment of `make ros2`, and installs them there.

Run it with the environment's Python. The interfaces of `definitions.toml` are generated beside them, because no wheel
carries these. ROS's own installation needs none of this: run colcon there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PREFIX = Path(sys.prefix)
WORKSPACE = PREFIX / "ros2_ws"
SITE = Path(sysconfig.get_path("purelib"))
PACKAGES = ("sam3_node_msgs", "sam3_node_ros", "sam3_node_bringup")

GENERATOR = r'ament_register_extension\(\s*"rosidl_generate_idl_interfaces"[^)]*\)'
CMAKE = """\
cmake_minimum_required(VERSION 3.8)
project({name})
find_package(ament_cmake REQUIRED)
find_package(rosidl_default_generators REQUIRED)
{finds}
rosidl_generate_interfaces(${{PROJECT_NAME}} {files} DEPENDENCIES {dependencies})
ament_export_dependencies(rosidl_default_runtime)
ament_package()
"""
MANIFEST = """\
<package format="3">
  <name>{name}</name>
  <version>{version}</version>
  <description>Interfaces of {name}, from definitions.toml</description>
  <maintainer email="sam3-node@example.com">sam3-node</maintainer>
  <license>Apache-2.0</license>
  <buildtool_depend>ament_cmake</buildtool_depend>
  <buildtool_depend>rosidl_default_generators</buildtool_depend>
{depends}
  <member_of_group>rosidl_interface_packages</member_of_group>
  <export><build_type>ament_cmake</build_type></export>
</package>
"""


def main() -> None:
    """Build and install. Exits with a line that says what is missing."""
    for program in ("cc", "c++", "make"):
        if not shutil.which(program):
            sys.exit(
                f"error: expected {program} to build Python messages, found none: apt-get install g++ make"
            )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        sys.exit("error: expected Python.h to build Python messages, found none: apt-get install python3-dev")
    correct_cmake()
    shutil.rmtree(WORKSPACE, ignore_errors=True)
    source = WORKSPACE / "src"
    for name, package in tomllib.loads((HERE / "definitions.toml").read_text()).items():
        write_package(source / name, name, package)
    for name in PACKAGES:
        (source / name).symlink_to(HERE / name)
    # colcon leaves the folder of the package to the environment of a shell
    (SITE / "sam3_node.pth").write_text(f"{HERE.parents[1]}\n{WORKSPACE}/build/sam3_node_ros\n")
    paths = {"CMAKE_PREFIX_PATH": str(PREFIX), "AMENT_PREFIX_PATH": str(PREFIX)}
    search = os.pathsep.join([str(PREFIX / "bin"), os.environ["PATH"]])
    command = [
        "colcon",
        "--log-base",
        str(WORKSPACE / "log"),
        "build",
        "--merge-install",
        "--symlink-install",
        "--install-base",
        str(PREFIX),
    ]
    options = [
        "--cmake-args",
        "-DBUILD_TESTING=OFF",
        "-DCMAKE_C_FLAGS=-O1",
        "-DCMAKE_CXX_FLAGS=-O0",
        "-Wno-dev",
    ]
    run = subprocess.run([*command, *options], cwd=WORKSPACE, env=os.environ | paths | {"PATH": search})
    sys.exit(run.returncode)


def correct_cmake() -> None:
    """Let the wheels' CMake files name this Python: they name the one that built the wheels.

    Interfaces for C++ are not generated: nothing here uses them, and they take half of the time.
    """
    headers = sysconfig.get_path("include")
    for path in (PREFIX / "share").rglob("*.cmake"):
        text = path.read_text()
        corrected = re.sub(r"/opt/python/[\w-]+/include/python[\d.]+\d", headers, text)
        corrected = re.sub(r"/opt/python/[\w-]+/lib/python[\d.]+/site-packages", str(SITE), corrected)
        if path.parent.parent.name.endswith("_cpp"):
            corrected = re.sub(GENERATOR, "", corrected)
        if corrected != text:
            path.write_text(corrected)


def write_package(folder: Path, name: str, package: dict[str, object]) -> None:
    """Write the package of some interfaces, for ament_cmake."""
    files = []
    for kind in ("msg", "srv"):
        for interface, text in dict(package.get(kind, {})).items():  # type: ignore[call-overload]
            path = folder / kind / f"{interface}.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
            files.append(f"{kind}/{path.name}")
    dependencies = list(package["dependencies"])  # type: ignore[call-overload]
    fields = {
        "name": name,
        "version": package["version"],
        "finds": "\n".join(f"find_package({one} REQUIRED)" for one in dependencies),
        "files": " ".join(files),
        "dependencies": " ".join(dependencies),
        "depends": "\n".join(f"  <depend>{one}</depend>" for one in dependencies),
    }
    (folder / "CMakeLists.txt").write_text(CMAKE.format(**fields))
    (folder / "package.xml").write_text(MANIFEST.format(**fields))


if __name__ == "__main__":
    main()
