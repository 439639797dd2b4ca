"""What is installed, what this machine can do, and what to fix. Runs without any optional dependency."""

from __future__ import annotations

import importlib
import operator
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import install_advice
from ..settings import Settings

PYTHON = ">=3.11"
OPENCV = ">=4.14,<5"
OPENCV_BUILDS = (
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
    "opencv-contrib-python-headless",
)
COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
CLOCK_MARKS = ("/run/systemd/timesync/synchronized", "/run/chrony/chronyd.pid", "/var/run/ntpd.pid")


class Row(NamedTuple):
    """One finding. `warn` limits something, `fix` keeps the core from working; `advice` says what to do."""

    name: str
    status: Literal["ok", "warn", "fix"]
    found: str
    advice: str = ""


def run_doctor(settings: Settings) -> int:
    """Print all findings; 0 when none must be fixed, else 1."""
    rows = list(examine(settings))
    width = max(len(row.name) for row in rows)
    for row in rows:
        advice = f"  -> {row.advice}" if row.advice else ""
        print(f"{row.status:<4}  {row.name:<{width}}  {row.found}{advice}")
    broken = sum(row.status == "fix" for row in rows)
    print(f"{broken} to fix" if broken else "the core works")
    return 1 if broken else 0


def examine(settings: Settings) -> Iterator[Row]:
    """All findings, one after the other."""
    yield _python()
    yield from _dependencies()
    yield from _opencv()
    yield from _torch()
    yield Row("cpu", "ok", f"{_cpus()} threads for this process")
    for name, endpoint in (("masks", settings.transport.masks), ("control", settings.transport.control)):
        yield _endpoint(f"transport.{name}", endpoint)
    yield _clock()


def _python() -> Row:
    version = ".".join(map(str, sys.version_info[:3]))
    if satisfies(version, PYTHON):
        return Row("python", "ok", version)
    return Row("python", "fix", f"{version}, expected {PYTHON}", "install Python 3.11 or newer")


class Requirement(NamedTuple):
    """One line of the package's metadata: `extra` is empty for the core."""

    name: str
    bounds: str
    extra: str


def parse_requirement(line: str) -> Requirement:
    """`torch<2.14,>=2.11; extra == "node"` taken apart."""
    what, _, marker = line.partition(";")
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^)]*)\)?", what)
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    assert match is not None
    return Requirement(match[1], match[2].strip(), extra[1] if extra else "")


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version lies within bounds such as `>=2.11,<2.14`; pre-release tags do not count."""
    have = _release(version)
    for bound in filter(None, map(str.strip, bounds.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*(.+)", bound)
        if match is not None and not COMPARISONS[match[1]](have, _release(match[2])):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else [0]
    return tuple(parts + [0] * (4 - len(parts)))


def _dependencies() -> Iterator[Row]:
    try:
        lines = metadata.requires("sam3-node") or []
    except metadata.PackageNotFoundError:
        yield Row("sam3-node", "warn", "not installed, run from its source", "pip install -e '.[node]'")
        return
    yield Row("sam3-node", "ok", metadata.version("sam3-node"))
    for requirement in map(parse_requirement, lines):
        if requirement.name != "sam3-node" and requirement.extra != "dev":
            yield _dependency(requirement)


def _dependency(requirement: Requirement) -> Row:
    name, bounds, extra = requirement
    title = f"{name} [{extra}]" if extra else name
    advice = install_advice(extra) if extra else f"pip install '{name}{bounds}'"
    bad: Literal["warn", "fix"] = "warn" if extra else "fix"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Row(title, bad, "not installed", advice)
    if not satisfies(version, bounds):
        return Row(title, bad, f"{version}, expected {bounds}", f"pip install '{name}{bounds}'")
    return Row(title, "ok", version)


def _opencv() -> Iterator[Row]:
    builds = [name for name in OPENCV_BUILDS if _is_installed(name)]
    if len(builds) > 1:
        advice = f"pip uninstall {' '.join(builds)}, then pip install 'opencv-python{OPENCV}'"
        yield Row("cv2", "fix", f"{' and '.join(builds)} overwrite each other", advice)
        return
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError as error:
        advice = "on a machine without a display: apt-get install libgl1 libglib2.0-0"
        yield Row("cv2", "fix", f"does not import: {error}", advice)
        return
    if satisfies(cv2.__version__, OPENCV):
        yield Row("cv2", "ok", cv2.__version__)
    else:
        found = f"{cv2.__version__}, expected {OPENCV}"
        yield Row("cv2", "fix", found, f"pip install 'opencv-python{OPENCV}'")


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _torch() -> Iterator[Row]:
    """torch is imported only here, and may be absent: a camera or a policy does not need it."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        advice = f"to run the node: {install_advice('node')}"
        yield Row("torch", "warn", f"does not import: {error}", advice)
        return
    yield Row("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} CPU threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(torch, index)
    elif shutil.which("nvidia-smi"):
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        advice = "install the torch build for this machine's CUDA, and check nvidia-smi"
        yield Row("gpu", "warn", f"nvidia-smi is here, but torch, built for {built}, finds no device", advice)
    else:
        yield Row("gpu", "warn", "none: models run on the CPU", "fine for nano and tests; SAM 3 needs a GPU")


def _gpu(torch: object, index: int) -> Row:
    cuda = torch.cuda  # type: ignore[attr-defined]
    properties = cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    found = f"{properties.name}, capability {capability}, {memory}"
    if properties.major < 8:
        return Row(f"gpu {index}", "warn", found, "no bfloat16 before 8.0: use --model.dtype float16")
    return Row(f"gpu {index}", "ok", found)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _endpoint(name: str, endpoint: str) -> Row:
    """Whether the node could bind there now."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if scheme == "ipc":
        folder = Path(place).parent
        problem = "" if os.access(folder, os.W_OK) else f"{folder} is not a writable folder"
    elif scheme == "tcp" and (port.isdigit() or port == "*"):
        problem = _port_problem("" if host == "*" else host, 0 if port == "*" else int(port))
    else:
        problem = "expected tcp://host:port or ipc://path"
    if not problem:
        return Row(name, "ok", f"{endpoint} is free")
    return Row(
        name, "warn", f"{endpoint}: {problem}", f"fine if a node runs there; else choose another --{name}"
    )


def _port_problem(host: str, port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return f"cannot be bound: {error}"
    return ""


def _clock() -> Row:
    """Ages across machines are only as good as their clocks' agreement."""
    if any(Path(mark).exists() for mark in CLOCK_MARKS):
        return Row("clock", "ok", "kept in step by a time service")
    advice = (
        "run chrony or systemd-timesyncd where cameras are on other machines: ages compare the two clocks"
    )
    return Row("clock", "warn", "no time service seen", advice)
