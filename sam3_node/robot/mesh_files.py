"""Find the files that a URDF means by the names of its meshes.

ROS names them package://NAME/PATH, and NAME is a package: a folder of that name, or one whose package.xml says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from ..errors import SettingsError
from ..files import read_regular

MAX_TRIED = 8
"""Paths that a message lists. A deep folder has many above it."""
MAX_PACKAGE_BYTES = 1 << 20
"""Size of a package.xml. A larger one names no package."""
_NAMED = ("package", "model")
"""Schemes whose names begin with a package (ROS) or a model (Gazebo)."""
_URI = re.compile(r"(\w[\w+.-]*)://(.*)", re.DOTALL)
_PACKAGE_NAME = re.compile(rb"<name>\s*([^<\s]+)\s*</name>")
_LISTS = ("ROS_PACKAGE_PATH", "GAZEBO_MODEL_PATH", "GZ_SIM_RESOURCE_PATH")
"""Variables with folders that have packages or models in them, or are ones."""


def find_mesh(path: Path, name: str) -> Path:
    """Return the file that the URDF `path` means by the name of a mesh.

    Raises SettingsError with the paths that were tried.
    """
    tried: list[str] = []
    for file in _list_candidates(path, name):
        if file.is_file():
            return file
        tried.append(str(file))
    shown = ", ".join(tried[:MAX_TRIED])
    if len(tried) > MAX_TRIED:
        shown += f" and {len(tried) - MAX_TRIED} more"
    package = re.match(rf"(?:{'|'.join(_NAMED)})://([^/]+)", name)
    advice = "put it there, or correct its name"
    if package is not None:
        advice = (
            f"put the folder {package[1]:.80} beside the URDF or above it, or name the folder that has it in "
            "ROS_PACKAGE_PATH"
        )
    raise SettingsError(
        f"robot.urdf: expected the mesh {name:.200} near {path}, found no such file; tried "
        f"{shown or 'no path'}; {advice}"
    )


def _list_candidates(path: Path, name: str) -> Iterator[Path]:
    """Yield the paths that the name of a mesh may mean, the likeliest first."""
    folder = path.absolute().parent
    uri = _URI.fullmatch(name)
    scheme = uri[1].lower() if uri else ""
    if uri and scheme in _NAMED:
        package, _, rest = unquote(uri[2]).partition("/")
        for root in _list_packages(folder, package):
            yield root / rest
    elif uri and scheme == "file":
        # a whole path, or one beside the URDF, as exporters of CAD write it
        yield folder / uri[2]
        yield folder / unquote(uri[2])
    elif not uri:
        for root in (folder, *folder.parents):
            yield root / name


def _list_packages(folder: Path, package: str) -> Iterator[Path]:
    """Yield the folders that may be a package, seen from the folder of a URDF."""
    # a downloaded repository has a name of its own, and says in package.xml which package it is
    above = (folder, *folder.parents)
    for root in above:
        if root.name == package or _read_package_name(root) == package:
            yield root
    for root in above:
        yield root / package
    for variable in _LISTS:
        for entry in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            if Path(entry).name == package:
                yield Path(entry)
            yield Path(entry) / package
    for entry in filter(None, os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep)):
        yield Path(entry) / "share" / package


def _read_package_name(folder: Path) -> str | None:
    """Return the name that a folder's package.xml gives; None if there is none."""
    try:
        text = read_regular(folder / "package.xml", MAX_PACKAGE_BYTES)
    except OSError:
        return None
    found = _PACKAGE_NAME.search(text)
    return found[1].decode("utf-8", "replace") if found else None
