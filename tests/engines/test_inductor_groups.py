"""Packages of SAM 3.1, whose objects share memories: built by the command, passed by the gate, replayed as by torch."""

from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import save_file
from torch._inductor import config as inductor

from sam3_node.bags import read_masks
from sam3_node.cli import main as cli
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
from sam3_node.types import MaskFrame
from tests.engines.test_inductor import has_compiler
from tests.support.tabletop import TABLETOP

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
]
FRAMES = 10
OBJECTS = 18
"""More than share one memory."""


class Built(NamedTuple):
    """Weights, and the store with their packages."""

    weights: Path
    store: Path

    def command(self, *words: str, kind: str = "inductor") -> list[str]:
        options = {
            "model.name": self.weights,
            "model.device": "cpu",
            "model.threads": 1,
            "tracker.max_objects": OBJECTS,
            "detector.kind": "none",
            "engine.kind": kind,
            "engine.precision": "float32",
            "engine.folder": self.store,
            "engine.max_time": 0,  # a loaded machine decides otherwise
            "engine.fallback": "false",
        }
        return [*words, *(f"--{name}={value}" for name, value in options.items())]

    def replay(self, kind: str, out: Path) -> list[MaskFrame]:
        """Track boxes on the bundled recording by the command; return the masks."""
        corners = [(20 + number % 6 * 60, 20 + number // 6 * 70) for number in range(OBJECTS)]
        boxes = [f"--box={x},{y},{x + 50},{y + 50}" for x, y in corners]
        verb = ["replay", str(TABLETOP), f"--out={out}", f"--frames={FRAMES}", *boxes]
        assert cli.main(self.command(*verb, kind=kind)) == 0
        (file,) = out.rglob("masks.mcap")
        return list(read_masks(file))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("groups")
    built = Built(folder / "small.safetensors", folder / "engines")
    sizes = small_sizes(56, 32)._replace(read_layers=1, fuser_layers=1)
    save_file(random_tensors(sizes), built.weights)
    with inductor.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):  # which compiles sooner
        assert cli.main(built.command("engine", "build")) == 0
    return built


def test_a_replay_gives_the_masks_that_torch_gives(
    built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(built.command("engine", "check")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("passed: ")
    ours, theirs = (built.replay(kind, tmp_path / kind) for kind in ("inductor", "torch"))
    assert len(ours) == len(theirs) == FRAMES
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual.model == expected.model == "small.safetensors"
        assert len(actual.instances) == OBJECTS
        for mine, other in zip(actual.instances, expected.instances, strict=True):
            assert mine.id == other.id
            assert (mine.mask.full() != other.mask.full()).mean() < 1e-3
    assert any(instance.area for instance in expected.instances)
