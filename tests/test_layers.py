"""Tests of the architecture: imports point downward, heavy imports stay in place, files and functions are short."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "sam3_node"
ROS2_PACKAGE = ROOT / "launch/ros2/sam3_node_ros/sam3_node_ros"
SOURCES = sorted(
    path for folder in ("sam3_node", "launch", "tests", "tools") for path in (ROOT / folder).rglob("*.py")
)
# the aim is 700 and 50; these leave room for what reads better in one piece
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 65

# from the bottom up; units of one layer do not import each other
LAYERS = (
    {"addresses", "errors", "palette_png", "resources", "resumable"},
    {"schema"},
    {"types"},
    {"files"},
    {"settings", "geometry", "gpu_memory", "unfinished_requests"},
    {"wire", "models", "visualization", "processes"},
    {"transport", "tracking", "detection", "bags", "calibration", "robot"},
    {"client", "cameras", "recording", "engines"},
    {"perception"},
    {"bridges", "console", "mcp", "node"},
    {"replay"},
    {"cli"},
    {"__main__"},
)
TORCH = ("models", "tracking", "detection", "engines", "perception")
LIGHT = (
    "cameras",
    "recording",
    "console",
    "bridges",
    "mcp",
    "visualization",
    "bags",
    "calibration",
    "robot",
    "cli",
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


CHANGE_FILES = {
    "cli/doctor.py": "the socket that it has just bound",
    "processes/notify.py": "the socket that it has bound, in a private folder",
    "engines/engine_store.py": "a folder that `describe_exposure` has found to be private",
    "engines/inductor.py": "the same",
    "engines/tune.py": "the same: a file of `keep`",
    "transport/security.py": "the same: keys",
}
"""Modules that rename or delete files themselves, and what they change."""
PATH_METHODS = {
    "unlink",
    "write_text",
    "write_bytes",
    "rename",
    "replace",
    "rmdir",
    "symlink_to",
    "hardlink_to",
}
OS_FUNCTIONS = {"remove", "unlink", "rename", "renames", "replace", "rmdir", "truncate", "symlink", "link"}
SHUTIL_QUESTIONS = {"disk_usage", "which", "get_terminal_size"}


class Import(NamedTuple):
    """One imported module, by its full name; `deferred` when not at import time."""

    name: str
    deferred: bool


class Source(NamedTuple):
    """What the tests look at in a file."""

    lines: int
    functions: dict[str, int]
    """Lines of each function, by its place and name."""
    classes: tuple[str, ...]
    imports: tuple[Import, ...]
    """Imports of a module of the package that are not for types alone."""
    names: frozenset[str]
    """Modules that a module of the package names in any import, also for types alone."""
    packages: frozenset[str]
    """Top-level packages of all imports."""
    changes: tuple[str, ...]
    """Calls that write over, rename or delete a file; those of a new file, opened with "x", are none."""


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its full name."""
    return {compute_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def compute_name(path: Path) -> str:
    parts = ("sam3_node", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def read_source(path: Path) -> Source:
    """Parse a file once for all tests. The trees of all files would take 300 MB, so they are not kept."""
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    module = compute_name(path) if path.is_relative_to(PACKAGE) else ""
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported += [node.module or "" for node in froms if not node.level]
    return Source(
        text.count("\n"),
        {
            f"{path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        },
        tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        tuple(walk(tree, module, deferred=False)) if module else (),
        frozenset(name for node in froms for name in targets(node, module)) if module else frozenset(),
        frozenset(name.split(".")[0] for name in imported),
        tuple(
            f"line {node.lineno}: {ast.unparse(node)}"
            for node in nodes
            if module and isinstance(node, ast.Call) and changes_file(node)
        ),
    )


def changes_file(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open" and is_writing(call.args[1:2], call.keywords)
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    if owner == "shutil":
        return function.attr not in SHUTIL_QUESTIONS
    if owner == "os":
        return function.attr in OS_FUNCTIONS
    # of texts and other values, these methods have other arguments
    if function.attr in ("rename", "replace"):
        return len(call.args) == 1 and not call.keywords
    return function.attr in PATH_METHODS or (
        function.attr == "open" and is_writing(call.args[:1], call.keywords)
    )


def is_writing(arguments: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    """Return True if a call of `open` may change what is there. The arguments begin with the mode."""
    modes = [*arguments, *(keyword.value for keyword in keywords if keyword.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return any(re.fullmatch(r"[rwabt+]{1,3}", text) and set(text) & set("wa+") for text in texts)


def list_imports(module: str) -> tuple[Import, ...]:
    return read_source(modules()[module]).imports


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


@cache
def list_siblings(module: str) -> frozenset[str]:
    """Return the modules of the same package that a module names in any import, also for types alone."""
    names = read_source(modules()[module]).names
    return frozenset(name for name in names & modules().keys() - {module} if unit(name) == unit(module))


def unit(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def layer(module: str) -> int:
    return next(index for index, units in enumerate(LAYERS) if unit(module) in units)


def needed(module: str) -> set[str]:
    """Return all modules that are imported with a module, including its parent packages."""
    imported: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        for prefix in (".".join(name.split(".")[: end + 1]) for end in range(name.count(".") + 1)):
            if prefix not in imported:
                imported.add(prefix)
                if prefix in modules():
                    waiting += [item.name for item in list_imports(prefix) if not item.deferred]
    return imported


def importers(*names: str, deferred: bool = True) -> set[str]:
    """Return the units that import any of these top-level packages."""
    return {
        unit(module)
        for module in modules()
        for item in list_imports(module)
        if item.name.split(".")[0] in names and (deferred or not item.deferred)
    }


def find_circle(module: str, list_next: Callable[[str], Iterable[str]]) -> list[str] | None:
    """Return a path from a module back to itself along the imports that `list_next` returns, or None."""
    waiting = [[module]]
    seen = {module}
    while waiting:
        path = waiting.pop()
        for name in list_next(path[-1]):
            if name == module and len(path) > 1:
                return [*path, module]
            if name not in seen:
                seen.add(name)
                waiting.append([*path, name])
    return None


def list_needed_at_import(module: str) -> list[str]:
    """Return the modules of this project that are imported with a module."""
    return [item.name for item in list_imports(module) if item.name in modules() and not item.deferred]


def test_every_module_has_its_layer() -> None:
    unknown = {unit(module) for module in modules()} - set().union(*LAYERS) - {""}
    assert not unknown


def test_imports_point_downward() -> None:
    upward = [
        f"{module} imports {item.name}"
        for module in modules().keys() - {"sam3_node"}
        for item in list_imports(module)
        if item.name.startswith("sam3_node.") and unit(item.name) != unit(module)
        if layer(item.name) >= layer(module)
    ]
    assert not upward, "\n".join(sorted(upward))


def test_no_import_circle() -> None:
    assert not [path for module in modules() if (path := find_circle(module, list_needed_at_import))]


def test_no_import_circle_inside_a_package() -> None:
    """Imports for types alone and imports in functions count: a circle of files is one file, however it is hidden."""
    circles = [" -> ".join(path) for module in modules() if (path := find_circle(module, list_siblings))]
    assert not circles, "\n".join(circles)


def test_no_two_classes_have_one_name() -> None:
    classes = Counter(name for path in modules().values() for name in read_source(path).classes)
    assert not [name for name, count in classes.items() if count > 1]


def test_files_and_functions_stay_short() -> None:
    sources = {path: read_source(path) for path in SOURCES}
    long = [f"{path}: {file.lines} lines" for path, file in sources.items() if file.lines > MAX_FILE_LINES]
    for file in sources.values():
        functions = file.functions.items()
        long += [f"{function}: {lines} lines" for function, lines in functions if lines > MAX_FUNCTION_LINES]
    assert not long, "\n".join(long)


def test_only_transport_imports_zeromq() -> None:
    assert importers("zmq") == {"transport"}


def test_only_the_cluster_imports_ray() -> None:
    naming = {name for name, path in modules().items() if '"ray' in path.read_text()}
    importing = {
        name for name in modules() for item in list_imports(name) if item.name.split(".")[0] == "ray"
    }
    assert all(name.startswith("sam3_node.replay.cluster") for name in naming | importing)


def test_torch_stays_in_the_perception_stack() -> None:
    assert importers("torch", "transformers", "safetensors") - {"cli"} <= set(TORCH)
    named = {name for name in modules() for item in list_imports(name) if item.name.split(".")[0] == "torch"}
    assert {name for name in named if unit(name) == "cli"} <= {"sam3_node.cli.doctor"}


def test_trackers_load_without_transformers() -> None:
    """Its import takes as long as all else until a node is ready, and half a second alone."""
    assert importers("transformers") == {"detection"}
    assert "transformers" not in needed("sam3_node.node.node")


def test_only_models_and_the_plan_of_a_step_know_the_kind_of_a_model() -> None:
    asked = re.compile(
        r"\.(static_shapes|is_compiled)\b|\b(not|and|or|if) [\w.]*\.has_memory\b|\.slots (==|!=|>|<) \d|\bmodel_type =="
    )
    found = {
        name
        for name, path in modules().items()
        if unit(name) != "models" and asked.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"sam3_node.tracking.propagation"}


def test_perception_never_meets_transport() -> None:
    for module in modules():
        if unit(module) in TORCH:
            assert not {
                name for name in needed(module) if unit(name) in ("transport", "cameras", "node", "client")
            }


HEAVY = {"cv2", "torch", "transformers", "scipy", "pydantic_settings"}


@pytest.mark.parametrize("module", ["client", "transport", "wire"])
def test_a_policy_needs_neither_opencv_nor_torch(module: str) -> None:
    assert not needed(f"sam3_node.{module}") & HEAVY


def test_the_ros_node_needs_neither_opencv_nor_torch() -> None:
    trees = [ast.parse(path.read_text()) for path in ROS2_PACKAGE.glob("*.py")]
    for tree in trees:
        tree.body = [node for node in tree.body if not getattr(node, "level", 0)]
    imported = {item.name for tree in trees for item in walk(tree, "", deferred=False) if not item.deferred}
    assert "sam3_node.client" in imported
    assert not set().union(imported, *map(needed, imported)) & HEAVY


def test_a_camera_host_needs_no_torch() -> None:
    for module in modules():
        if unit(module) in LIGHT:
            assert not needed(module) & {"torch", "transformers"}, module


@pytest.mark.parametrize("module", ["vocabulary", "phrases", "detectors"])
def test_a_vocabulary_needs_no_torch(module: str) -> None:
    assert not needed(f"sam3_node.detection.{module}") & {"torch", "transformers"}


def test_the_command_line_starts_light() -> None:
    assert not needed("sam3_node.cli.main") & {"torch", "transformers", "cv2", "zmq", "sam3_node.node.node"}


def test_no_number_is_bounded_by_the_least_denormal() -> None:
    """msgspec's `gt` of a float lets 0 in where a process flushes denormals: `schema.fields.ABOVE_0` does not."""
    assert not [path for path in PACKAGE.rglob("*.py") if re.search(r"\bMeta\([^)]*\bgt=", path.read_text())]


def test_forbidden_packages_are_not_imported() -> None:
    assert not importers(*FORBIDDEN)


def test_only_files_and_private_folders_are_changed_in_place() -> None:
    """Other modules write, rename and delete by `files`, which follows no link and leaves no half of a file."""
    found = {
        path.relative_to(PACKAGE).as_posix(): read_source(path).changes
        for path in modules().values()
        if read_source(path).changes
    }
    del found["files.py"]
    unexpected = {path: changes for path, changes in found.items() if path not in CHANGE_FILES}
    assert not unexpected, f"use the functions of files.py: {unexpected}"
    assert not set(CHANGE_FILES) - set(found), "these change no files: remove them from CHANGE_FILES"


def test_nothing_imports_the_laboratory() -> None:
    assert not [path for path in SOURCES if "training" in read_source(path).packages]
