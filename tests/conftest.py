"""Shared by all tests: one thread a process, since tests start several processes on few cores.

On a CPU, models run in float32 unless a test says otherwise.
"""

import ctypes.util
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# no test asserts time, nor draws other examples on each run
settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# MuJoCo chooses how it renders when it is first imported, which tests do before those that render
if ctypes.util.find_library("OSMesa") is not None:
    HAS_GPU = any(Path(node).exists() for node in ("/dev/dri/renderD128", "/dev/nvidia0"))
    os.environ.setdefault("MUJOCO_GL", "egl" if HAS_GPU else "osmesa")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # `model.dtype auto` takes bfloat16 beyond it

LONGEST_FIRST = (
    "replay/cluster/test_operator.py",
    "replay/cluster/test_scheduler.py",
    "replay/cluster/test_jobs.py",
    "console/test_live.py",
    "tools/test_gpu.py",
    "transport/test_restart.py",
    "replay/test_resume.py",
    "engines/test_inductor.py",
    "engines/test_inductor_groups.py",
    "engines/tensorrt/test_build.py",
    "replay/test_as_recorded.py",
    "cli/test_demo.py",
    "replay/test_bidirectional.py",
    "recording/test_recorder.py",
    "test_real_weights.py",
    "node/test_departures.py",
    "node/test_node.py",
)
"""Files that take longest: they begin first, so that no process waits for another one at the end."""


GPU_LIMIT_S = 20
"""Seconds of a test that needs a GPU: time on one is scarce, and a test that hangs must not cost that of the others."""


# what tests import stays to the end: garbage collections need not walk it, neither now nor in a test
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but only what tests make."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_LIMIT_S))

    def rank(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next(
            (n for n, name in enumerate(LONGEST_FIRST) if path.endswith("/" + name)), len(LONGEST_FIRST)
        )

    items.sort(key=rank)


@pytest.fixture(autouse=True)
def keep_denormals() -> Iterator[None]:
    """Stop flushing denormals to zero, as trainings do, after each test: others need IEEE arithmetic."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def lerobot_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with episodes. Tests only read it."""
    from tools.lerobot_recorded.recording import write_recording

    return write_recording(tmp_path_factory.mktemp("recording") / "pick.mcap")


@pytest.fixture(scope="session")
def lerobot_dataset(lerobot_recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset that `lerobot_recording` is converted to. Tests only read it."""
    from sam3_node.recording.lerobot.conversion import Converted, convert_recordings
    from sam3_node.settings import LeRobotSettings

    folder = tmp_path_factory.mktemp("dataset") / "pick"
    converted = convert_recordings([lerobot_recording], LeRobotSettings(), folder, lambda _: None)
    assert converted == Converted(2, 0, 0)
    return folder
