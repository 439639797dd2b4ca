"""The real bindings of five versions of TensorRT have what the package uses; no GPU.

The bindings are small. They are downloaded and imported, each in a process of its own, over stand-ins for TensorRT's
libraries, which are 2 GB. `make test-engines` does this; where the package index cannot be reached, it is skipped.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.engines
VERSIONS = ("10.3.0", "10.8.0.43", "10.16.1.11", "11.0.0.114", "11.4.0.106")
SOURCES = ROOT / "sam3_node" / "engines" / "tensorrt"
OBJECTS = {
    "builder.py": {
        "builder": "Builder",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "config": "IBuilderConfig",
        "profile": "IOptimizationProfile",
        "layer": "ILayer",
        "tensor": "ITensor",
        "cache": "ITimingCache",
    },
    "runtime.py": {
        "engine": "ICudaEngine",
        "_engine": "ICudaEngine",
        "context": "IExecutionContext",
        "runtime": "Runtime",
    },
}
"""Names of variables and attributes of the two modules, and the class of the library that they hold."""
RTX_ONLY = {
    "Builder": (),
    "ICudaEngine": ("create_runtime_config",),
    "IExecutionContext": ("is_stream_capturable",),
    "IBuilderConfig": ("num_compute_capabilities", "set_compute_capability"),
    "": ("ComputeCapability", "DynamicShapesKernelSpecializationStrategy"),
}
"""What is asked of TensorRT-RTX alone."""
TOOLS = ("cc", "nm", "readelf")

CHILD = """
import json, logging, sys
import tensorrt_bindings as api

sys.modules["tensorrt"] = api
from sam3_node.engines.tensorrt.builder import find_library, get_logger, make_monitor, start_library
from sam3_node.errors import EngineError

def describe(owner, name):
    scope = getattr(api, owner, None) if owner else api
    return (getattr(scope, name).__doc__ or "") if hasattr(scope, name) else None

said, library = [], find_library()
logger = get_logger(api)
logger.log(logger.ERROR, "no driver")
for kind in ("Builder", "Runtime"):
    try:
        start_library(library, kind)
    except EngineError as error:
        said.append(str(error))
monitor = make_monitor(api)
monitor.phase_start("all", None, 2)
go_on = monitor.step_complete("all", 0)
docs = [describe(*used) for used in json.loads(sys.argv[1])]
print(json.dumps({
    "version": library.version, "said": said, "docs": docs, "fraction": monitor.fraction, "go_on": go_on,
    "monitor": isinstance(monitor, api.IProgressMonitor), "logger": isinstance(logger, api.ILogger),
}))
"""


class Use(NamedTuple):
    """An attribute that the package uses; `owner` is a class of the library, empty for the module itself.

    arguments: the number of positional arguments of a call; None for no call, or where the number varies.
    """

    owner: str
    name: str
    arguments: int | None


@cache
def find_uses() -> list[Use]:
    """Return what the package's two modules use of plain TensorRT."""
    uses = set[Use]()
    for file, objects in OBJECTS.items():
        tree = ast.parse((SOURCES / file).read_text())
        calls = {
            node.func: len(node.args)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and not any(isinstance(arg, ast.Starred) for arg in node.args)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (owner := _find_owner(node.value, objects)) is not None:
                uses.add(Use(owner, node.attr, calls.get(node)))
    return sorted((use for use in uses if use.name not in RTX_ONLY.get(use.owner, ())), key=str)


def _find_owner(node: ast.expr, objects: dict[str, str]) -> str | None:
    """Return the class of the library that an expression holds, "" for its module; None for anything else."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if name == "api":
        return ""
    if isinstance(node, ast.Attribute) and _find_owner(node.value, {}) == "":
        return None if name in RTX_ONLY[""] else name  # a class of the module
    return objects.get(name)


def read_arities(doc: str, name: str) -> Iterator[range]:
    """Yield the numbers of arguments, without self, that each signature in a docstring of pybind11 takes."""
    for parameters in re.findall(rf"^(?:\d+\. )?{name}\((.*)\) ->", doc, re.MULTILINE):
        plain = parameters
        while "[" in plain:
            plain = re.sub(r"\[[^\[\]]*\]", "", plain)
        each = [part for part in plain.split(", ") if part and not part.startswith("self")]
        yield range(sum(" = " not in part for part in each), len(each) + 1)


def make_stand_ins(folder: Path) -> Path:
    """Make libraries of TensorRT whose functions return null, as the bindings in `folder` need them."""
    module = folder / "tensorrt_bindings" / "tensorrt.so"
    libraries = folder / "libraries"
    libraries.mkdir()
    needed = re.findall(r"\[(lib(?:nvinfer|nvonnx)\S*)\]", _run("readelf", "-d", module))
    symbols = [line.split()[-1].split("@")[0] for line in _run("nm", "-D", "-u", module).splitlines()]
    names = [name for name in symbols if re.match(r"(?:create|get|init)\w*(?:Infer|Onnx|Plugin)", name)]
    assert "createInferBuilder_INTERNAL" in names
    source = libraries / "null.c"
    for index, library in enumerate(needed):
        functions = [] if index else names
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions))
        _run("cc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", libraries / library, source)
    return libraries


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


def test_the_sources_show_what_is_used() -> None:
    uses = set(find_uses())
    assert len(uses) > 40
    assert {
        Use("IExecutionContext", "set_device_memory", 2),
        Use("ICudaEngine", "device_memory_size_v2", None),
        Use("BuilderFlag", "TF32", None),
        Use("IBuilderConfig", "set_timing_cache", 2),
        Use("", "IProgressMonitor", None),
    } <= uses
    assert {use.owner for use in uses} >= {name for names in OBJECTS.values() for name in names.values()}


def test_signatures_are_read_from_docstrings() -> None:
    overloads = ("self: a.B, x: Callable[[int, str], int], y: int = 3", "self: a.B")
    signatures = [f"{number}. run({given}) -> int" for number, given in enumerate(overloads, 1)]
    doc = "\n".join(["run(*args)", "Overloaded function.", "", *signatures])
    assert list(read_arities(doc, "run")) == [range(1, 3), range(0, 1)]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bindings_have_what_the_package_uses(version: str, tmp_path: Path) -> None:
    found = ask_bindings(version, tmp_path)
    assert found["version"].startswith(version[:6])
    for use, doc in zip(find_uses(), found["docs"], strict=True):
        assert doc is not None, f"{use.owner}.{use.name} is absent"
        arities = list(read_arities(doc, use.name))
        if use.arguments is not None and arities:
            assert any(use.arguments in arity for arity in arities), f"{use}: {doc}"
    assert found["monitor"]
    assert found["logger"]
    assert (found["fraction"], found["go_on"]) == (0.5, True)
    assert len(found["said"]) == 2
    assert all("no driver" in text and "tensorrt-cu12" in text for text in found["said"])


def ask_bindings(version: str, folder: Path) -> dict[str, Any]:
    """Download the bindings of a version, and let a process of their own describe them."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} to make stand-ins for libraries")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command.append(f"tensorrt_cu12_bindings=={version}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"no bindings {version} from the package index: {done.stderr.strip()[-200:]}")
    zipfile.ZipFile(wheels[0]).extractall(folder)
    paths = {"LD_LIBRARY_PATH": str(make_stand_ins(folder)), "PYTHONPATH": f"{folder}:{ROOT}"}
    asked = json.dumps([(use.owner, use.name) for use in find_uses()])
    command = [sys.executable, "-c", CHILD, asked]
    run = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer
