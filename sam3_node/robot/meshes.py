"""Convex hulls of the mesh files of a robot, read by a child process with limits.

`mesh_reader` is the child: it bounds the memory and the time of the libraries that read meshes. This module refuses
what need not be read at all: other formats, pipes and devices, and files that are too large.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import SettingsError
from ..files import check_regular, explain_os_error
from .hulls import Hull
from .mesh_reader import MAX_MESH_BYTES, MAX_MESH_S, HullAnswer

FORMATS = ("stl", "obj", "dae", "ply", "glb", "gltf")
"""Suffixes of the mesh files that are read. None of these formats is packed."""
MAX_MESHES_BYTES = 256 << 20
"""Size of all mesh files of a robot. More are refused before they are read."""
START_S = 60
"""Time for the start of the child on a busy machine, in seconds. After it and MAX_MESH_S a mesh, it is ended."""
_PACKAGE = Path(__file__).parents[2]
"""Folder from which the child imports this package."""


def read_hulls(paths: Sequence[Path]) -> dict[Path, Hull]:
    """Return the convex hull of each mesh file, thinned. Raises SettingsError that names the file."""
    # the same mesh may serve several links
    different = list(dict.fromkeys(paths))
    if not different:
        return {}
    total = sum(_check_mesh(path) for path in different)
    if total > MAX_MESHES_BYTES:
        raise SettingsError(
            f"robot.urdf: expected at most {MAX_MESHES_BYTES} bytes of meshes, found {total}; simplify the meshes"
        )

    hulls: dict[Path, Hull] = {}
    for path, line in zip(different, _ask_child(different), strict=False):
        answer: HullAnswer = json.loads(line)
        if "error" in answer:
            raise SettingsError(f"robot.urdf: cannot read the mesh {path}: {answer['error']}")
        hulls[path] = Hull(np.array(answer["corners"]), np.array(answer["centre"]), answer["growth"])
    if len(hulls) < len(different):
        raise SettingsError(
            f"robot.urdf: cannot read the mesh {different[len(hulls)]}: expected one that is read in {MAX_MESH_S} s, "
            "found one that ended its process; simplify it, or save it as a binary STL"
        )
    return hulls


def _check_mesh(path: Path) -> int:
    """Return the size of a mesh file in bytes. Raises SettingsError for what is not read at all."""
    if path.suffix[1:].lower() not in FORMATS:
        raise SettingsError(
            f"robot.urdf: expected meshes of the formats {', '.join(FORMATS)}, found {path}; convert it to a binary STL"
        )
    with explain_os_error(SettingsError, f"robot.urdf: cannot read the mesh {path}"):
        check_regular(path, MAX_MESH_BYTES)
        return path.stat().st_size


def _ask_child(paths: Sequence[Path]) -> list[bytes]:
    """Return a line for each mesh, fewer if one of them ended the child."""
    # -P: the folder of this process is no place to import from
    command = (sys.executable, "-P", "-m", f"{__package__}.mesh_reader")
    imports = os.pathsep.join((str(_PACKAGE), *filter(None, (os.environ.get("PYTHONPATH"),))))
    request = json.dumps([str(path.absolute()) for path in paths])
    try:
        done = subprocess.run(
            command,
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the readers tell of textures, which nobody looks at
            # threads would take memory that counts against the child's limit
            env={**os.environ, "PYTHONPATH": imports, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            timeout=START_S + MAX_MESH_S * len(paths),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
    else:
        printed = done.stdout
    # the end of the child may have cut its last line
    return printed.rpartition(b"\n")[0].splitlines()
