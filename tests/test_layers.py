"""The arrows of the design: imports point only downward, and heavy ones stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "sam3_node"

# from the bottom up; rooms of one layer do not know each other
LAYERS = (
    {"errors", "types", "signals", "closing"},
    {"settings", "geometry"},
    {
        "wire",
        "rasterize",
        "readout",
        "registry",
        "clock",
        "sidestream",
        "health",
        "supervisor",
        "visual",
        "models",
    },
    {"transport", "tracking", "detection", "bags"},
    {"prompts", "client", "cameras", "recorder", "search", "recent", "checkpoint", "engines"},
    {"pipeline", "watch", "record"},
    {"loading"},
    {"perception"},
    {"operations"},
    {"node", "replay"},
    {"group", "demo_results", "doctor", "cloud", "replay_live"},
    {"demo"},
    {"verbs", "engine_verbs", "calibrate_verbs", "replay_verbs"},
    {"cli"},
    {"__main__"},
)
ENGINES = (
    "models",
    "engines",
    "tracking",
    "detection",
    "search",
    "recent",
    "checkpoint",
    "pipeline",
    "loading",
    "perception",
    "operations",
    "prompts",
    "rasterize",
    "readout",
    "registry",
    "clock",
    "sidestream",
)
TORCH = (
    "models",
    "engines",
    "tracking",
    "detection",
    "search",
    "recent",
    "checkpoint",
    "pipeline",
    "loading",
    "perception",
    "prompts",
    "readout",
    "clock",
    "sidestream",
    "doctor",
)
FORBIDDEN = {
    "ultralytics",
    "yolov5",
    "yolo_world",
    "mmyolo",
    "msgpack_numpy",
    "pickle",
    "cloudpickle",
    "dill",
}


class Import(NamedTuple):
    """One imported module, by its full name; `deferred` when not at import time."""

    name: str
    deferred: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    return {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = ("sam3_node", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    tree = ast.parse(modules()[module].read_text())
    return tuple(walk(tree, module, deferred=False))


def walk(node: ast.AST, module: str, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, deferred) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(name, deferred) for name in targets(child, module))
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from walk(child, module, deferred or inside)


def targets(node: ast.ImportFrom, module: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        is_package = modules()[module].name == "__init__.py"
        parts = module.split(".")
        parent = parts[: len(parts) - node.level + is_package]
        base = ".".join([*parent, *([node.module] if node.module else [])])
    for alias in node.names:
        submodule = f"{base}.{alias.name}"
        yield submodule if submodule in modules() else base


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def layer(module: str) -> int:
    return next(index for index, rooms in enumerate(LAYERS) if room(module) in rooms)


def needed(module: str) -> set[str]:
    """Everything that importing a module imports, packages on the way included."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        for prefix in (".".join(name.split(".")[: end + 1]) for end in range(name.count(".") + 1)):
            if prefix not in found:
                found.add(prefix)
                if prefix in modules():
                    waiting += [item.name for item in imports_of(prefix) if not item.deferred]
    return found


def importers(*names: str, deferred: bool = True) -> set[str]:
    """The rooms that import any of these top-level packages."""
    return {
        room(module)
        for module in modules()
        for item in imports_of(module)
        if item.name.split(".")[0] in names and (deferred or not item.deferred)
    }


def test_every_module_has_its_layer() -> None:
    unknown = {room(module) for module in modules()} - set().union(*LAYERS) - {""}
    assert not unknown


@pytest.mark.parametrize("module", modules())
def test_imports_point_downward(module: str) -> None:
    if module == "sam3_node":
        return
    for item in imports_of(module):
        if item.name.startswith("sam3_node.") and room(item.name) != room(module):
            assert layer(item.name) < layer(module), f"{module} imports {item.name}"


def test_only_transport_knows_zeromq() -> None:
    assert importers("zmq") == {"transport"}


def test_only_the_cloud_knows_ray() -> None:
    naming = {room(name) for name, path in modules().items() if '"ray' in path.read_text()}
    assert naming | importers("ray") == {"cloud"}


def test_torch_stays_in_the_engines() -> None:
    assert importers("torch", "transformers", "safetensors") <= set(TORCH)


def test_engines_never_meet_transport() -> None:
    for module in modules():
        if room(module) in ENGINES:
            assert not {
                name for name in needed(module) if room(name) in ("transport", "cameras", "node", "client")
            }


@pytest.mark.parametrize("module", ["sam3_node.client", "sam3_node.transport", "sam3_node.wire"])
def test_a_policy_needs_neither_opencv_nor_torch(module: str) -> None:
    assert not needed(module) & {"cv2", "torch", "transformers", "scipy", "pydantic_settings"}


def test_a_camera_host_needs_no_torch() -> None:
    for module in modules():
        if room(module) in ("cameras", "watch", "recorder", "record", "visual", "bags", "cli", "verbs"):
            assert not needed(module) & {"torch", "transformers"}, module


@pytest.mark.parametrize("module", ["vocabulary", "vocabulary_build", "encoders"])
def test_a_vocabulary_needs_no_torch(module: str) -> None:
    assert not needed(f"sam3_node.detection.{module}") & {"torch", "transformers"}


def test_the_door_is_light() -> None:
    assert not needed("sam3_node.cli") & {"torch", "transformers", "cv2", "zmq", "sam3_node.node"}


def test_nothing_is_imported_that_the_licence_or_safety_forbids() -> None:
    assert not importers(*FORBIDDEN)
