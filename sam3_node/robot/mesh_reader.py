"""The child process of `meshes`: reads mesh files, which may be hostile, and prints their convex hulls.

It reads a JSON list of paths from its standard input, and prints one line of JSON for each: {corners, centre, growth},
or {error}. The libraries that read meshes allocate what a file of some kilobytes declares: nested instances, accessors
without data, archives in the place of XML. So this process has limits of memory and processor time.
"""

import json
import math
import resource
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from ..files import read_regular
from .hulls import Points, thin_hull

MAX_MESH_BYTES = 32 << 20
"""Size of a mesh file, and of each file that a glTF names. A larger one is refused before it is read."""
MAX_TRIANGLES = 500_000
"""Triangles of a mesh, its repeated parts counted each time. A mesh with more is refused."""
MAX_MEMORY_BYTES = 1 << 30
"""Memory of this process. A mesh that needs more to be read is refused."""
MAX_MESH_S = 10
"""Processor time for one mesh, in seconds. A mesh that needs more ends this process, and is refused."""


class MeshError(Exception):
    """Raised when a mesh is not what is expected."""


def main() -> None:
    """Print the hull of each mesh."""
    # libraries may print, but only hulls are for the caller
    answers = sys.stdout
    sys.stdout = sys.stderr
    paths = json.load(sys.stdin)
    import trimesh.convex  # before memory is limited by what a mesh may take

    _set_limit(resource.RLIMIT_DATA, MAX_MEMORY_BYTES)
    for path in paths:
        # the limit of processor time counts from the start of the process
        used = resource.getrusage(resource.RUSAGE_SELF)
        _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + MAX_MESH_S)
        print(json.dumps(_answer(trimesh, Path(path))), file=answers, flush=True)


class HullAnswer(TypedDict, total=False):
    """The line about a mesh: its hull, or what is wrong with it."""

    corners: list[list[float]]
    centre: list[float]
    growth: float
    error: str


def _answer(trimesh: Any, path: Path) -> HullAnswer:
    try:
        hull = thin_hull(np.array(trimesh.convex.convex_hull(_read_corners(trimesh, path)).vertices))
        return {"corners": hull.corners.tolist(), "centre": hull.centre.tolist(), "growth": hull.growth}
    except MemoryError:
        return {
            "error": f"expected a mesh that {MAX_MEMORY_BYTES >> 20} MiB suffice to read, found a larger one"
        }
    except Exception as error:  # the readers of meshes raise errors of many kinds
        return {"error": str(error)[:300] or repr(error)}


def _read_corners(trimesh: Any, path: Path) -> Points:
    """Return the corners of all triangles of a file, [n, 3]."""

    class Neighbours(trimesh.resolvers.FilePathResolver):  # type: ignore[misc]
        """The files beside a mesh: buffers of a glTF."""

        def get(self, name: str) -> bytes:
            folder = path.parent.resolve()
            file = (folder / name).resolve()
            if not file.is_relative_to(folder):
                raise MeshError(
                    f"expected files in {folder} alone, found {name:.200}; put them beside the mesh"
                )
            return read_regular(file, MAX_MESH_BYTES)

    data = read_regular(path, MAX_MESH_BYTES)
    # the reader of COLLADA would unpack it, whatever its name
    if zipfile.is_zipfile(BytesIO(data)):
        raise MeshError("expected a mesh, found a zip archive; unpack it, or convert it to a binary STL")
    scene = trimesh.load_scene(
        BytesIO(data), file_type=path.suffix[1:].lower(), resolver=Neighbours(str(path))
    )
    corners = []
    triangles = 0
    for node in scene.graph.nodes_geometry:
        scene_from_mesh, name = scene.graph[node]
        mesh = scene.geometry[name]
        triangles += len(getattr(mesh, "faces", ()))
        if triangles > MAX_TRIANGLES:
            raise MeshError(f"expected at most {MAX_TRIANGLES} triangles, found more; simplify the mesh")
        if hasattr(mesh, "faces"):
            unit_m = _read_unit(mesh) if path.suffix.lower() == ".dae" else 1.0
            corners.append(unit_m * trimesh.transform_points(mesh.vertices, scene_from_mesh))
    if not triangles:
        raise MeshError("expected triangles, found none")
    found: Points = np.concatenate(corners)
    if not np.isfinite(found).all():
        raise MeshError("expected finite coordinates, found others")
    return found


def _read_unit(mesh: Any) -> float:
    """Return the metres of a unit of a COLLADA mesh, as its file says. The transforms of its nodes have the same unit.

    trimesh notes the unit as "meters" or "0.001 * meters", and changes no coordinate.
    """
    number, mark, _ = str(mesh.metadata.get("units", "")).partition("*")
    unit_m = float(number) if mark else 1.0
    # also false for what is not a number
    if not 0 < unit_m < math.inf:
        raise MeshError(f"expected a unit of metres above 0, found {unit_m}; correct its <unit meter>")
    return unit_m


def _set_limit(kind: int, value: int) -> None:
    """Set a limit to a value, unless the system's own is lower."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or value <= hard:
        resource.setrlimit(kind, (value, hard))


if __name__ == "__main__":
    main()
