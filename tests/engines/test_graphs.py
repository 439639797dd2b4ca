"""CUDA graphs, which are captured once for each shape, and the cache folder of torch.compile."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler._cache import CacheArtifactManager
from torch.utils._python_dispatch import TorchDispatchMode

from sam3_node.engines import inductor
from sam3_node.engines.inductor import (
    CACHE_VARIABLE,
    CapturedGraph,
    CompiledArtifacts,
    GraphedStage,
    Inputs,
    keep_compiled,
    use_graphs,
)
from sam3_node.engines.validation import without_tf32
from sam3_node.models.sam.probes import relative_error
from sam3_node.models.sam.stages import EncodeLimits, ReadLimits, Run, Stages
from sam3_node.models.sam.tracker_model import TrackerModel
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.tiny import noise_clip, random_source, stages_of, tiny_model

FAMILIES = ("sam3", "sam2", "edgetam")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Tape:
    """A stand-in for CUDA graph capture: a replay reads and writes fixed tensors, whatever the call got."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(self, run: Run, inputs: Inputs) -> CapturedGraph:
        self.captures += 1
        outputs = run(*inputs)

        def replay() -> None:
            actual = run(*inputs)
            pairs = [(outputs, actual)] if isinstance(actual, Tensor) else zip(outputs, actual, strict=True)
            for place, value in pairs:
                place.copy_(value)

        return CapturedGraph(outputs, replay)


def on_tape(model: TrackerModel) -> Tape:
    tape = Tape()
    model.stages = Stages(*(GraphedStage(run, tape) for run in model.stages))
    model.static_shapes = True
    return tape


def with_kernels(dtype: torch.dtype) -> TrackerModel:
    """Return a tracker on the GPU that runs our kernels, if it is half precision, else torch's operations."""
    pytest.importorskip("triton")
    model = stages_of(random_source("sam3").to(dtype), "tiny").to("cuda")
    if dtype != torch.float32:
        model.use_kernels()
    return model


@gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_in_graphs_track_as_float32_does(compiled: bool) -> None:
    model = with_kernels(torch.bfloat16)
    if compiled:
        model.compile(backend="eager")
    use_graphs(model)
    found = tracked(model, 3, frames=24)
    expected = tracked(with_kernels(torch.float32), 3, frames=24)
    assert (found > 0).eq(expected > 0).float().mean() > 0.97


def tracked(model: TrackerModel, objects: int, frames: int = 5) -> Tensor:
    """Return the logits of all frames; each of the first frames adds one object."""
    tracker = Tracker(model, max_objects=objects)
    actual = []
    for number, pixels in enumerate(noise_clip(model.image_size, frames)):
        prompts = [ObjectPrompt(number, points=[[30.0 + 10 * number, 40.0]])] if number < objects else []
        tracks = tracker.step(pixels.to(model.device, model.dtype), prompts)
        actual.append(torch.zeros(objects, *model.mask_size))
        actual[-1][: len(tracks.ids)] = tracks.logits.float().cpu()
    return torch.stack(actual)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tracker_of_replayed_stages_gives_the_same(family: str) -> None:
    source = random_source(family)
    plain = stages_of(source)
    taped = stages_of(source)
    tape = on_tape(taped)
    assert (tracked(taped, 3) - tracked(plain, 3)).abs().max() < 1e-4
    assert tape.captures == 1 + 3 * 3, "encode once, the others for 1, 2 and 3 objects"
    tracked(taped, 3)
    assert tape.captures == 10


def test_an_encoder_in_graphs_takes_several_images_and_threads() -> None:
    model = stages_of(random_source("sam3"))
    clip = noise_clip(model.image_size, 4)
    pairs = [torch.cat(clip[:2]), torch.cat(clip[2:])]
    expected = [model.encode_together(pair) for pair in pairs]
    tape = on_tape(model)
    assert model.encode_limits == EncodeLimits(many_images=True, runs_beside=True)
    # all calls share one buffer of inputs and one of outputs
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda number: model.encode_together(pairs[number % 2]), range(20)))
    for number, features in enumerate(found):
        for one, other in zip(features, expected[number % 2], strict=True):
            assert torch.equal(one.top, other.top)
    assert tape.captures == 1
    model.encode(clip[0])
    assert tape.captures == 2, "one image has a graph of its own"


class Copies(TorchDispatchMode):
    """Notes the addresses that a block of code copies to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            self.targets.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


# of torch's read, and of kernels, which take the whole bank
@pytest.mark.engines
@pytest.mark.parametrize("any_width", [True, False])
@torch.inference_mode()
def test_a_bank_is_gathered_straight_into_the_input_of_a_graph(any_width: bool) -> None:
    source = random_source("sam3")
    direct = stages_of(source)
    copied = stages_of(source)
    for model in (direct, copied):
        on_tape(model)
        model.stages.read.limits = ReadLimits(any_width)
    read = direct.stages.read
    copied.stages.read.find_buffer = None
    trackers = [Tracker(model, max_objects=4) for model in (direct, copied)]
    addresses = dict[Any, int]()
    for number, pixels in enumerate(noise_clip(direct.image_size, 14)):
        prompts = [ObjectPrompt(number, points=[[30.0 + 10 * number, 40.0]])] if number < 4 else []
        if number == 11:
            for tracker in trackers:
                tracker.remove(1)
        for place in read._inputs.values():  # nothing of the step before may be read
            place.fill_(float("nan") if place.is_floating_point() else 1)
        with Copies() as copies:
            mine = trackers[0].step(pixels, prompts)
        theirs = trackers[1].step(pixels, prompts)
        assert mine.ids == theirs.ids
        assert torch.equal(mine.logits, theirs.logits)
        now = {key: place.data_ptr() for key, place in read._inputs.items()}
        assert addresses.items() <= now.items(), "a captured address stays"
        assert not copies.targets & {address for (number, *_), address in addresses.items() if number == 1}
        addresses = now
    shapes = {tuple(shape[:2]) for number, shape, _ in addresses if number == 1}
    assert {objects for objects, _ in shapes} == {1, 2, 3, 4}
    assert (len({width for _, width in shapes}) > 1) == any_width


def test_the_caller_owns_the_outputs() -> None:
    run = GraphedStage(lambda x: (x + 1, x * 2), Tape())
    first = run(torch.ones(2))
    kept = [tensor.clone() for tensor in first]
    run(torch.zeros(2))
    assert all(torch.equal(now, then) for now, then in zip(first, kept, strict=True))


def test_an_encoder_that_begins_to_share_its_trunk_is_not_captured_again() -> None:
    model = tiny_model()
    tape = on_tape(model)
    pixels = noise_clip(model.image_size, 1)[0]
    assert model.encode(pixels).trunk is None
    captures = tape.captures
    assert captures > 0
    model.share_trunk()
    assert model.encode(pixels).trunk is not None
    assert tape.captures == captures


def test_a_cpu_has_no_graphs() -> None:
    model = tiny_model()
    before = model.stages
    use_graphs(model)
    assert model.stages is before
    assert not model.static_shapes


@gpu
@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_give_what_eager_stages_give(family: str, compiled: bool) -> None:
    plain, captured = (stages_of(random_source(family)).to("cuda") for _ in range(2))
    if compiled:
        captured.compile(backend="eager")  # machine code takes minutes, and is the compiler's own affair
    use_graphs(captured)
    assert captured.static_shapes
    with without_tf32():
        for _ in range(2):
            assert relative_error(tracked(captured, 3), tracked(plain, 3)) < 1e-3


@gpu
@needs_gpu
def test_features_of_earlier_frames_stay_as_they_were() -> None:
    model = tiny_model().to("cuda")
    use_graphs(model)
    first, second = noise_clip(model.image_size, 2)
    features = model.encode(first)
    kept = [tensor.clone() for tensor in features[:3]]
    model.encode(second)
    assert all(torch.equal(now, then) for now, then in zip(features[:3], kept, strict=True))


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "restored afterwards")
    monkeypatch.delenv(CACHE_VARIABLE)


@pytest.mark.parametrize("cached", [False, True])
def test_the_cache_is_in_the_folder_of_engines(tmp_path: Path, cached: bool) -> None:
    if cached:
        cache_dir()  # sets the environment
    keep_compiled(tmp_path / "engines")
    assert cache_dir() == str(tmp_path / "engines" / "compiled")


def test_a_folder_that_the_environment_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    keep_compiled(tmp_path / "engines")
    assert cache_dir() == str(tmp_path / "mine")
    assert not (tmp_path / "engines").exists()


def test_a_folder_that_cannot_be_made_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    keep_compiled(tmp_path / "file")
    assert not cache_dir().startswith(str(tmp_path))
    assert "compiled stages are not kept" in caplog.text


@pytest.mark.parametrize("place", ["engines", "engines/compiled"])
def test_a_folder_that_others_can_write_is_skipped(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "engines").mkdir(mode=0o755)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place).chmod(0o775)
    keep_compiled(tmp_path / "engines")
    assert not cache_dir().startswith(str(tmp_path))
    assert "compiled stages are not kept" in caplog.text
    assert "chmod -R go-w" in caplog.text


def compile_some(name: str, folder: Path, key: str = "key") -> None:
    """Keep what a process with an empty cache has compiled: one artifact of this name."""
    artifacts = CompiledArtifacts(folder, key)
    CacheArtifactManager._ensure_cache_artifacts_registered()
    with CacheArtifactManager.with_fresh_cache():
        artifacts.load()
        CacheArtifactManager.record_artifact("autotune", name, {"best": name})
        artifacts.save()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of torch's cache, which does not exist yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_compiled_fills_an_empty_cache(tmp_path: Path, cache: Path) -> None:
    compile_some("block", tmp_path)
    CompiledArtifacts(tmp_path, "another").load()
    assert not cache.exists()
    CompiledArtifacts(tmp_path, "key").load()
    assert json.loads((cache / "block").read_text()) == {"best": "block"}


def test_a_file_of_compiled_stages_is_written_when_there_is_more(tmp_path: Path, cache: Path) -> None:
    compile_some("block", tmp_path)
    (path,) = tmp_path.rglob("*.artifacts")
    before = path.stat().st_ino
    compile_some("block", tmp_path)
    assert path.stat().st_ino == before
    compile_some("other", tmp_path)
    assert path.stat().st_ino != before


@pytest.mark.parametrize("change", [lambda data: data[:-9], lambda data: b"", lambda data: data[::-1]])
def test_a_damaged_file_of_compiled_stages_is_ignored_and_replaced(
    change: Callable[[bytes], bytes], tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_some("block", tmp_path)
    (path,) = tmp_path.rglob("*.artifacts")
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    compile_some("block", tmp_path)
    assert f"compiled anew: {path} is damaged" in caplog.text
    assert path.read_bytes() == whole


def test_a_file_of_compiled_stages_that_others_can_write_is_not_run(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_some("block", tmp_path)
    next(tmp_path.rglob("*.artifacts")).chmod(0o666)
    CompiledArtifacts(tmp_path, "key").load()
    assert not cache.exists()
    assert "chmod" in caplog.text


def test_few_files_of_compiled_stages_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(inductor.MAX_ARTIFACTS + 2):
        compile_some("block", tmp_path, f"key{number}")
        os.utime(tmp_path / "compiled" / f"key{number}.artifacts", ns=(number, number))
    names = sorted(path.stem for path in tmp_path.rglob("*.artifacts"))
    assert names == [f"key{number}" for number in range(2, inductor.MAX_ARTIFACTS + 2)]
    monkeypatch.setattr(inductor, "MAX_ARTIFACT_BYTES", 10)
    compile_some("block", tmp_path, "large")
    assert not list(tmp_path.rglob("large*"))
