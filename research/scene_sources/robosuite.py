"""Meshes of the robosuite package as further kinds of training objects, if it is installed.

Only its files are needed: pip install --no-deps robosuite. They are for training only, since each kind has one shape.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from pathlib import Path

import cv2
import numpy as np

from sam3_node.errors import MissingExtraError
from tools.scenes.textures import NAMED, draw_color, shade
from tools.scenes.meshes import Mesh
from tools.scenes.meshes import Maker, Part, Shape, gloss
from tools.scenes.textures import Texture, skin

FOLDER = "models/assets"
TEXTURE_SIZE = 256
FILES = {  # kind: mesh, texture (none: drawn), its colour's name
    "loaf": ("bread", "bread", "brown"),
    "soda can": ("can", "soda", "red"),
    "cereal packet": ("cereal", "cereal", "red"),
    "lemon": ("lemon", "lemon", "yellow"),
    "milk carton": ("milk", "", ""),
    "water bottle": ("bottle", "", ""),
}


@cache
def makers() -> dict[str, Maker]:
    """Return the makers by kind; raise MissingExtraError if robosuite is not installed."""
    spec = importlib.util.find_spec(
        "robosuite"
    )  # not imported: it imports large packages that are not needed here
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            "robosuite is not installed; its files are enough: pip install --no-deps robosuite"
        )
    folder = Path(spec.submodule_search_locations[0]) / FOLDER
    return {kind: partial(_make, folder, kind) for kind in FILES}


def _make(folder: Path, kind: str, rng: np.random.Generator) -> Shape:
    name, image, color_name = FILES[kind]
    mesh = _read_obj(folder / "objects/meshes" / f"{name}.obj")
    if not image:
        color_name, color = draw_color(rng)
        return Shape(color_name, (Part(mesh, texture=skin(rng, color), finish=gloss(rng)),))
    texture = _read_texture(folder / "textures" / f"{image}.png")
    if rng.random() < 0.6:  # in another colour
        color_name = str(rng.choice(list(NAMED)))
        grey = texture.mean(-1, keepdims=True) / max(float(texture.mean()), 1.0)
        texture = np.clip(grey * np.array(shade(rng, color_name)) * 255, 0, 255).astype(np.uint8)
    return Shape(color_name, (Part(mesh, texture=texture, finish=gloss(rng)),))


@cache
def _read_texture(path: Path) -> Texture:
    """Read a texture as RGB with its first row at v = 0; these files store that row at the bottom."""
    picture = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if picture is None:
        raise MissingExtraError(
            f"expected robosuite's texture {path}, found none: pip install --no-deps robosuite"
        )
    small = cv2.resize(picture, (TEXTURE_SIZE, TEXTURE_SIZE), interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(small[::-1, :, ::-1]).astype(np.uint8)


@cache
def _read_obj(path: Path) -> Mesh:
    """Read a Wavefront file of polygons with texture coordinates."""
    numbers: dict[str, list[list[float]]] = {"v": [], "vt": []}
    faces: list[list[tuple[int, int]]] = []
    for line in path.read_text().splitlines():
        kind, *words = line.split() or [""]
        if kind in numbers:
            numbers[kind].append([float(word) for word in words])
        elif kind == "f":
            corners = [(int(a) - 1, int(b) - 1) for a, b in (word.split("/")[:2] for word in words)]
            faces += [[corners[0], corners[i], corners[i + 1]] for i in range(1, len(corners) - 1)]
    indices = np.array(faces, np.int32)
    texcoords = np.array(numbers["vt"])[:, :2] % 1.0
    return Mesh(np.array(numbers["v"]), indices[..., 0], texcoords, indices[..., 1])
