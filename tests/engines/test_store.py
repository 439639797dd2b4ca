"""The engine store: engines are stored whole, found again, and refused with a hint where they cannot serve."""

import json
import logging
import os
import re
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from sam3_node.cli import main as cli
from sam3_node.engines import engine_store
from sam3_node.engines.detector import PHRASES, compute_detector_key
from sam3_node.engines.quantize import Recipe, Scales, weights_digest
from sam3_node.engines.specs import STAGES
from sam3_node.errors import EngineError
from sam3_node.models import load_tracker
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
from sam3_node.settings import load_settings
from tests.support.refuses import refuses
from tests.support.tiny import random_source

KEY = engine_store.EngineKey(
    model="nano",
    weights="a" * 64,
    precision="float16",
    image_size=256,
    bank_size=7,
    max_objects=16,
    library="tensorrt_rtx",
    version="1.7.1",
    gpu="sm89",
)
PLANS = {name: f"plan of {name}".encode() for name in STAGES}
TENSORRT = {"library": "tensorrt", "version": "10.8", "gpu": "sm90", "gpu_name": "H100"}
SECONDS = dict.fromkeys(STAGES, 2.5)


@pytest.fixture
def store(tmp_path: Path) -> engine_store.EngineStore:
    return engine_store.EngineStore(tmp_path / "engines")


def saved(store: engine_store.EngineStore, **other: Any) -> engine_store.StoredEngine:
    return store.save(KEY.model_copy(update=other), PLANS, SECONDS)


def test_what_is_kept_is_found(store: engine_store.EngineStore) -> None:
    built = saved(store)
    actual = store.find(KEY)
    assert actual == built
    assert {name: actual.read_plan(name) for name in STAGES} == PLANS
    assert actual.plan_bytes == sum(map(len, PLANS.values()))
    assert [path.name for path in store.folder.iterdir()] == [built.folder.name]


def test_nothing_is_kept_at_first(store: engine_store.EngineStore) -> None:
    assert list(store.all()) == []
    with refuses(EngineError, field="sam3-node"):
        store.find(KEY)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", "1.8.0", ("version", "1.8.0", "1.7.1")),
        ("library", "tensorrt", ("library", "tensorrt_rtx")),
        ("gpu", "sm120", ("gpu", "sm120", "sm89")),
        ("gpu_name", "NVIDIA L4", ("NVIDIA", "L4")),
        ("weights", "b" * 64, "weights"),
        ("precision", "fp8", ("precision", "fp8", "float16")),
        ("image_size", 512, ("512", "256", "size")),
        ("max_objects", 32, ("32", "16", "objects")),
    ],
)
def test_engines_of_something_else_are_refused(
    store: engine_store.EngineStore, field: str, value: Any, said: str | tuple[str, ...]
) -> None:
    saved(store)
    with refuses(EngineError, field=said):
        store.find(KEY.model_copy(update={field: value}))


def test_the_nearest_is_named(store: engine_store.EngineStore) -> None:
    saved(store, gpu="sm120", version="1.6")
    near = saved(store, gpu="sm120")
    saved(store, gpu="sm120", image_size=512)
    with refuses(EngineError, field=str(near.folder.name)):
        store.find(KEY)


def test_engines_for_more_objects_serve_fewer(store: engine_store.EngineStore) -> None:
    built = saved(store, max_objects=64)
    assert store.find(KEY) == built


@pytest.mark.parametrize(("field", "value"), [("model", "copy of nano"), ("bank_size", 12)])
def test_what_engines_do_not_depend_on_does_not_matter(
    store: engine_store.EngineStore, field: str, value: Any
) -> None:
    assert saved(store, **{field: value}) == store.find(KEY)
    assert saved(store) == store.find(KEY)
    assert len(list(store.all())) == 1


def test_manifests_and_folder_names_of_version_1_do_not_change(store: engine_store.EngineStore) -> None:
    """Stored engines must still serve after an update: the keys of the file and the digest are frozen."""
    built = saved(store)
    assert built.folder.name == "3a31bb1ace27d0bc"
    fields = json.loads((built.folder / engine_store.MANIFEST).read_text())
    assert list(fields) == ["format", "key", "scales", "plans", "build_s", "built_s"]
    assert list(fields["key"]) == [
        *("model", "weights", "precision", "image_size", "bank_size", "max_objects"),
        *("library", "version", "gpu", "gpu_name", "cpu"),
    ]


def test_the_newest_serves(store: engine_store.EngineStore) -> None:
    saved(store, max_objects=64)
    newest = saved(store)
    assert store.find(KEY) == newest
    assert next(store.all()) == newest


def test_a_build_takes_the_place_of_the_same(store: engine_store.EngineStore) -> None:
    first = saved(store)
    (first.folder / "gate.json").write_text("{}")
    second = store.save(KEY, {**PLANS, "encode": b"another"}, SECONDS)
    assert second.folder == first.folder
    assert store.find(KEY).read_plan("encode") == b"another"
    assert not (second.folder / "gate.json").exists()  # a verdict on other plans


def test_other_scales_are_another_build(store: engine_store.EngineStore) -> None:
    folders = {store.save(KEY, PLANS, SECONDS, scales=scales).folder for scales in ("", "a", "b")}
    assert len(folders) == 3


def test_a_damaged_plan_is_refused(store: engine_store.EngineStore) -> None:
    built = saved(store)
    (built.folder / "read.plan").write_bytes(b"plan of weed")
    with refuses(EngineError, field=("read.plan", "sha256")):
        built.read_plan("read")
    (built.folder / "read.plan").unlink()
    with refuses(EngineError, field=("build", "them")):
        built.read_plan("read")
    assert built.read_plan("encode") == PLANS["encode"]


@pytest.mark.parametrize("text", ["", "{", '{"format": 2}', '{"format": 1, "identity": {}}', "[1]"])
def test_a_damaged_manifest_hides_only_its_own(
    store: engine_store.EngineStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = saved(store, gpu="sm120")
    whole = saved(store)
    (damaged.folder / engine_store.MANIFEST).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert list(store.all()) == [whole]
    assert damaged.folder.name in caplog.text


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("a file")
    with refuses(EngineError, field="written"):
        saved(engine_store.EngineStore(tmp_path / "engines"))
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]


def test_a_failed_write_leaves_what_was_there(store: engine_store.EngineStore) -> None:
    built = saved(store)
    with refuses(EngineError, field="written"):
        store.save(KEY, {**PLANS, "no/such/folder": b""}, SECONDS)
    assert store.find(KEY) == built
    assert len(list(store.folder.iterdir())) == 1


def test_earlier_builds_give_the_expected_time(store: engine_store.EngineStore) -> None:
    assert store.expected_s(KEY, "encode") is None
    saved(store, gpu="sm120", version="1.6")
    assert store.expected_s(KEY, "encode") == 2.5
    assert store.expected_s(KEY.model_copy(update={"precision": "fp8"}), "encode") is None


def test_batches_are_powers_of_two() -> None:
    expected = {1: 1, 2: 2, 3: 4, 16: 16, 17: 32, 64: 64, 65: 64, 256: 64}
    assert {count: engine_store.round_up_objects(count) for count in expected} == expected


def test_weights_have_one_digest_and_others_another(tmp_path: Path) -> None:
    for seed in (0, 1):
        random_source("sam3", seed=seed).save_pretrained(tmp_path / str(seed))
    assert engine_store.checkpoint_digest("nano") == engine_store.checkpoint_digest("nano")
    names = ("nano", f"{tmp_path}/0", f"{tmp_path}/1")
    assert len(set(map(engine_store.checkpoint_digest, names))) == 3
    with refuses(EngineError, field="weights"):
        engine_store.checkpoint_digest(str(tmp_path))


def write_groups(folder: Path, seed: int = 0) -> Path:
    """Write weights of SAM 3.1, whose objects share memories; return their file."""
    folder.mkdir(exist_ok=True)
    path = folder / "sam3.1_multiplex.safetensors"
    save_file(random_tensors(small_sizes(56, 32), seed), path)
    return path


def test_weights_of_one_file_have_a_digest(tmp_path: Path) -> None:
    """SAM 3.1's checkpoint has no configuration beside it."""
    files = [write_groups(tmp_path / str(seed), seed) for seed in (0, 1)]
    digests = [engine_store.checkpoint_digest(str(file)) for file in files]
    assert digests[0] != digests[1]
    assert engine_store.checkpoint_digest(str(tmp_path / "0")) == digests[0]
    with refuses(EngineError, field="absent"):
        engine_store.checkpoint_digest(str(tmp_path / "absent.safetensors"))


def test_weights_are_not_fetched_for_their_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, local_files_only: bool = False) -> None:
        assert local_files_only, "the hub was asked"
        raise OSError("no such file in the cache")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with refuses(EngineError, field="facebook/sam3.1"):
        engine_store.checkpoint_digest("facebook/sam3.1")


def test_plans_of_groups_serve_any_number_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker makes more calls for more groups."""
    weights = write_groups(tmp_path)
    monkeypatch.setattr(engine_store, "describe_tensorrt", lambda gpu: TENSORRT)
    model = load_tracker(weights)
    few, many = (
        engine_store.compute_key(
            model,
            load_settings(
                overrides={
                    "model.name": str(weights),
                    "engine.kind": "tensorrt",
                    "tracker.max_objects": str(count),
                }
            ),
        )
        for count in (1, 256)
    )
    assert few == many


def test_a_name_without_a_slash_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(engine_store, "find_weight_file", refuse)
    with refuses(EngineError, field="nanno"):
        engine_store.checkpoint_digest("nanno")


def test_the_list_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "list", f"--engine.folder={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"no engines in {tmp_path}\n"


RTX = pytest.mark.skipif(
    find_spec("tensorrt_rtx") is None or find_spec("onnxscript") is None or find_spec("tensorrt") is not None,
    reason="needs tensorrt_rtx alone, and onnxscript",
)


@pytest.mark.engines
@RTX
@pytest.mark.timeout(1200)
def test_engines_are_built_listed_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "tiny"
    folder = tmp_path / "engines"
    random_source("sam3").save_pretrained(weights)
    model = load_tracker(weights, dtype="bfloat16")
    amax = dict.fromkeys(Recipe().select_layers(model.encode_stage), 8.0)
    scales = tmp_path / "scales.json"
    Scales(model="tiny", digest=weights_digest(model), frames=1, amax=amax).save(scales)
    asked = {
        "model.name": str(weights),
        "engine.folder": str(folder),
        "engine.precision": "fp8",
        "tracker.max_objects": 2,
    }
    options = [f"--{name}={value}" for name, value in asked.items()]

    assert cli.main(["engine", "build", "--gpu=sm89", f"--scales={scales}", *options]) == 0
    told = capsys.readouterr()
    assert [line.split(":")[0] for line in told.err.splitlines() if "done in" in line] == [
        *(f"{name} ({number} of 4)" for number, name in enumerate(STAGES, start=1)),
        "detect (by name)",
    ]

    store = engine_store.EngineStore(folder)
    settings = load_settings(overrides=asked)
    actual = store.find(engine_store.compute_key(model, settings, "sm89"))
    detector = store.find(compute_detector_key(settings, 320, "sm89"))
    assert told.out.split() == [str(actual.folder), str(detector.folder)]
    assert detector.read_plan("detect")
    assert (detector.manifest.key.precision, detector.manifest.key.max_objects) == ("float16", PHRASES)
    assert all(actual.read_plan(name) for name in STAGES)

    assert cli.main(["engine", "list", *options]) == 0
    head, newest, row = capsys.readouterr().out.splitlines()
    assert newest.split()[:4] == [detector.folder.name, "nano_detector-yolo-world", "float16", "320"]
    assert head.split()[:3] == ["ENGINE", "MODEL", "PRECISION"]
    assert row.split()[:6] == [actual.folder.name, "tiny", "fp8", "112", "2", "sm89"]
    assert "not yet" in row

    assert cli.main(["engine", "check", *options]) == 2
    assert "no GPU for engines" in capsys.readouterr().err


@pytest.mark.engines
@RTX
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine.precision=fp8"], "expected the scales of a calibration, found none"),
        (["--scales=absent.json", "--engine.precision=fp8"], "cannot read FP8 scales from absent.json"),
        (["--recipe=some.toml"], "expected --scales FILE with --recipe some.toml"),
        (["--gpu=sm1"], "found 'sm1'"),
    ],
)
def test_a_build_that_cannot_be_is_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["engine", "build", f"--engine.folder={tmp_path / 'engines'}", *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "engines").exists()


def test_engines_are_stored_for_their_user_alone(store: engine_store.EngineStore) -> None:
    before = os.umask(0)
    try:
        built = saved(store)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (store.folder, *store.folder.rglob("*"))}
    folders = {store.folder, built.folder}
    assert modes == {path: 0o700 if path in folders else 0o600 for path in modes}


UNSAFE = {
    "store": lambda built: built.folder.parent,
    "folder": lambda built: built.folder,
    "plan": lambda built: built.folder / "encode.plan",
    "manifest": lambda built: built.folder / engine_store.MANIFEST,
}


def expose(path: Path, how: str, outside: Path) -> None:
    if how == "owner":
        os.chown(path, 12345, -1)
    elif how == "link":
        elsewhere = outside / "elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    else:
        path.chmod(path.stat().st_mode | (stat.S_IWGRP if how == "group" else stat.S_IWOTH))


@pytest.mark.parametrize("place", UNSAFE)
@pytest.mark.parametrize(
    ("how", "hint"),
    [
        ("group", r"can be written by others \(mode 0\d20\); if it can be trusted: chmod -R go-w"),
        ("others", r"can be written by others \(mode 0\d02\); if it can be trusted: chmod -R go-w"),
        ("link", r"symbolic link"),
        pytest.param(
            "owner",
            r"belongs to user 12345; if it can be trusted: chown -R \d+",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user"),
        ),
    ],
)
def test_plans_that_other_users_can_change_are_never_read(
    store: engine_store.EngineStore, place: str, how: str, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    built = saved(store)
    mode = stat.S_IMODE(UNSAFE[place](built).stat().st_mode)
    expose(UNSAFE[place](built), how, store.folder.parent)
    if place != "manifest":
        with pytest.raises(EngineError, match=hint):
            built.read_plan("encode")
    if place != "plan":
        with pytest.raises(EngineError) as caught:
            store.find(KEY)
        assert re.search(hint, caplog.text + str(caught.value))
    if how in ("group", "others"):
        UNSAFE[place](built).chmod(mode)
        assert store.find(KEY).read_plan("encode") == PLANS["encode"]


def test_nothing_is_stored_where_other_users_can_change_it(store: engine_store.EngineStore) -> None:
    store.folder.mkdir()
    store.folder.chmod(0o775)
    with refuses(EngineError, field=("mode", "go-w")):
        saved(store)
    assert list(store.folder.iterdir()) == []
