"""Packages that torch compiles ahead of time: built, compared, served, and refused, all on a CPU.

Compiling the smallest of trackers takes most of a minute, so one is built for all tests that need it, and `make
test-engines` alone runs these.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from sam3_node.cli import main as cli
from sam3_node.engines.engine_store import MANIFEST, EngineStore, StoredEngine, compute_key
from sam3_node.engines.inductor import InductorRun
from sam3_node.engines.slot import REPORT, check_tracker, read_report
from sam3_node.engines.specs import STAGES, DtypeAdapter, as_tuple, tracker_stages
from sam3_node.errors import EngineError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.loading import load_model
from sam3_node.settings import Settings, load_settings
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.engines.test_validation import ALWAYS
from tests.support.node_rig import Rig, ids, masks_where
from tests.support.rectangles import rectangle_clip
from tests.support.refuses import refuses
from tests.support.tiny import noise_clip, random_source

CPU = torch.device("cpu")
PROMPTS = [ObjectPrompt(number, box=(10, 10, 40 + 10 * number, 60)) for number in (1, 2, 3)]
NO_COMPILER = {"CXX": "/no/such/compiler", "PATH": "/no/such/folder"}


def has_compiler() -> bool:
    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
pytestmark = pytest.mark.timeout(1200)


class Kept(NamedTuple):
    """Weights, the store with their packages, and a folder of images to compare engines on."""

    weights: Path
    store: Path
    clip: Path

    def options(self, **other: Any) -> dict[str, Any]:
        chosen = {
            "model.name": str(self.weights),
            "model.device": "cpu",
            "engine.kind": "inductor",
            "engine.precision": "float32",
            "engine.folder": str(self.store),
            "engine.max_time": "0",  # a loaded machine decides otherwise
            "detector.kind": "none",
        }
        return chosen | {name.replace("__", "."): value for name, value in other.items()}

    def settings(self, **other: Any) -> Settings:
        return load_settings(overrides=self.options(**other))

    def command(self, *verb: str, **other: Any) -> list[str]:
        return [*verb, *(f"--{name}={value}" for name, value in self.options(**other).items())]

    @property
    def built(self) -> StoredEngine:
        return next(EngineStore(self.store).all())


def shallow_source() -> Any:
    """The tiny tracker with one layer of each kind: a third less to compile."""
    source: Any = random_source("sam3", presence=ALWAYS)
    source.config.memory_attention_num_layers = 1
    source.config.mask_decoder_config.num_hidden_layers = 1
    source.config.vision_config.backbone_config.num_hidden_layers = 1
    for module in (source.memory_attention, source.mask_decoder.transformer, source.vision_encoder.backbone):
        module.layers = module.layers[:1]
    return source


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Return weights and a clip, with a store that is empty."""
    folder = tmp_path_factory.mktemp("inductor")
    given = Kept(folder / "shallow", folder / "engines", folder / "clip")
    shallow_source().save_pretrained(given.weights)
    given.clip.mkdir()
    for number, frame in enumerate(rectangle_clip().frames):
        cv2.imwrite(str(given.clip / f"{number}.png"), frame)
    return given


@pytest.fixture(scope="module")
def kept(given: Kept) -> Kept:
    """Return the same with the tracker's packages, which the gate has checked."""
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    with inductor.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):  # which compiles sooner
        assert cli.main(given.command("engine", "build", tracker__max_objects=2)) == 0
    check_tracker(given.settings(), given.clip)
    return given


@pytest.fixture
def copied(kept: Kept, tmp_path: Path) -> Kept:
    """Return the same packages in a store that a test may change."""
    shutil.copytree(kept.store, tmp_path / "engines")
    return kept._replace(store=tmp_path / "engines")


def served(kept: Kept, **other: Any) -> TrackerModel:
    settings = kept.settings(**other)
    return load_model(settings.model, settings.tracker, settings.engine)


@pytest.mark.engines
def test_packages_pass_the_gate_and_are_listed(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    report = read_report(kept.built)
    assert report.passed
    assert report.plans == kept.built.manifest.plans
    assert all(row.cosine > 0.9999 for row in report.outputs)
    assert report.tracks.mean_iou > 0.999
    assert cli.main(kept.command("engine", "list")) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[:5] == [kept.built.folder.name, "shallow", "float32", "112", "64"]
    assert f"cpu  inductor {torch.__version__}" in row
    assert row.endswith("passed")
    assert cli.main(kept.command("engine", "check", str(kept.clip))) == 0


@pytest.mark.engines
@torch.inference_mode()
def test_a_tracker_gives_the_masks_that_torch_gives(kept: Kept) -> None:
    model = served(kept, engine__fallback=False)
    reference = load_tracker(str(kept.weights))
    assert model.name == reference.name
    assert all(isinstance(run, DtypeAdapter) and isinstance(run.run, InductorRun) for run in model.stages)
    ours, theirs = (Tracker(each, max_objects=4) for each in (model, reference))
    for number, pixels in enumerate(noise_clip(model.image_size, 6)):
        prompts = PROMPTS[number : number + 1]  # 1, 2, then 3 objects, which a batch of 4 holds
        actual = ours.step(pixels, prompts)
        expected = theirs.step(pixels, prompts)
        assert actual.ids == expected.ids
        torch.testing.assert_close(actual.scores, expected.scores, atol=1e-3, rtol=0)
        different = ((actual.logits > 0) != (expected.logits > 0)).float().mean()
        assert different < 0.002


@pytest.mark.engines
@torch.inference_mode()
@pytest.mark.parametrize("objects", [1, 5])
def test_one_package_is_for_any_number_of_objects(kept: Kept, objects: int) -> None:
    model = load_tracker(str(kept.weights))
    stages = tracker_stages(model)
    for name in STAGES:
        run = InductorRun(kept.built.read_plan(name), stages[name], CPU)
        inputs = stages[name].examples(objects)
        expected = as_tuple(stages[name].module(*inputs))
        strided = [tensor.transpose(0, -1).contiguous().transpose(0, -1) for tensor in inputs]
        for given in (inputs, strided):
            for left, right in zip(as_tuple(run(*given)), expected, strict=True):
                assert left.dtype == right.dtype
                torch.testing.assert_close(left.float(), right.float(), atol=0.02, rtol=0.02)


@pytest.mark.engines
def test_what_a_package_does_not_take_is_refused(kept: Kept) -> None:
    stage = tracker_stages(load_tracker(str(kept.weights)))["decode"]
    run = InductorRun(kept.built.read_plan("decode"), stage, CPU)
    read, fine, middle = stage.examples(2)
    for inputs in (
        (read, fine),
        (read.double(), fine, middle),
        (read[:, :1], fine, middle),
        (read[:0], fine, middle),
    ):
        with pytest.raises(EngineError, match=r"^decode: (.*expected|built for 1 to 64 objects, found 0)"):
            run(*inputs)
    with refuses(EngineError, field=("1", "64", "65", "objects")):
        run(*stage.examples(65))


@pytest.mark.engines
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", "2.0.0", ("version", "2.0.0")),
        ("cpu", "avx512 0123abcd Another", ("cpu", "avx512", "0123abcd")),
        ("gpu", "sm90", ("gpu", "sm90")),
    ],
)
def test_packages_of_another_machine_or_torch_do_not_serve(
    copied: Kept, field: str, value: str, said: str | tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    path = copied.built.folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["key"][field] = value
    path.write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING):
        model = served(copied)
    assert model.name.startswith("shallow (torch: no engines in ")
    assert model.stages.encode is model.encode_stage
    assert "build them: sam3-node engine build" in caplog.text
    with refuses(EngineError, field=said):
        served(copied, engine__fallback=False)


@pytest.mark.engines
def test_a_damaged_package_does_not_serve(copied: Kept) -> None:
    path = copied.built.folder / "read.plan"
    package = bytearray(path.read_bytes())
    package[len(package) // 2] ^= 1
    path.write_bytes(package)
    model = served(copied)
    assert model.name.startswith("shallow (torch: ")
    assert model.stages.read is model.memory_attention
    with refuses(EngineError, field=("read.plan", "sha256")):
        served(copied, engine__fallback=False)


def test_what_is_no_package_does_not_load(given: Kept, tmp_path: Path) -> None:
    settings = given.settings(engine__folder=str(tmp_path))
    key = compute_key(load_tracker(str(given.weights)), settings)
    EngineStore(tmp_path).save(key, dict.fromkeys(STAGES, b"no package"), dict.fromkeys(STAGES, 1.0))
    with refuses(EngineError, field="encode"):
        check_tracker(settings, given.clip)


@pytest.mark.engines
def test_a_refusal_by_the_gate_is_kept_and_torch_serves(copied: Kept) -> None:
    strict = {"engine__min_cosine": 1.0, "engine__min_iou": 1.0}
    path = copied.built.folder / REPORT
    report = json.loads(path.read_text())
    report["outputs"][0]["cosine"] = 0.5
    path.write_text(json.dumps(report))
    for _ in range(2):
        assert served(copied, **strict).name.startswith("shallow (torch: engines refused by the gate: encode")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as rig:
        yield rig


@pytest.mark.engines
def test_a_node_starts_from_packages_without_a_compiler(kept: Kept, rig: Rig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    rig.environment |= {
        f"SAM3_{name.upper().replace('.', '__')}": value for name, value in kept.options().items()
    }
    rig.environment |= {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TMPDIR": str(unpacked),
        "SAM3_ENGINE__FALLBACK": "false",
        **NO_COMPILER,
    }
    node = rig.node()
    rig.camera()
    with rig.client() as client:
        masks_where(client, lambda masks: True, "masks")
        added = client.add_object(box=(60, 60, 160, 160)).id
        tracked = masks_where(client, lambda masks: added in ids(masks), "the object")
        later = masks_where(client, lambda masks: masks.seq > tracked.seq + 3, "later masks")
    assert later.model == "shallow"
    assert ids(later) == [added]
    node.kill()
    assert not list(cache.rglob("*.cpp"))
    assert not list(unpacked.rglob("*.so"))


@needs_compiler
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"engine__precision": "float16"}, "takes float32, bfloat16 on cpu, found float16"),
        ({"engine__precision": "fp8"}, "takes float32, bfloat16 on cpu, found fp8"),
        ({"gpu": "sm89"}, "builds for this machine alone: expected sm89 here, found cpu"),
        ({"scales": "absent.json"}, "absent.json"),
    ],
)
def test_a_build_that_cannot_be_is_refused(
    given: Kept, other: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "engines"
    assert cli.main(given.command("engine", "build", engine__folder=folder, **other)) == 2
    assert said in capsys.readouterr().err
    assert not folder.exists()


def test_a_build_without_a_compiler_says_what_to_install(
    given: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "engines"
    with inductor.patch({"cpp.cxx": (None, NO_COMPILER["CXX"])}):
        assert cli.main(given.command("engine", "build", engine__folder=folder)) == 2
    assert "expected a C++ compiler to build with, found none; install g++" in capsys.readouterr().err
    assert not folder.exists()
