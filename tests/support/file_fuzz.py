"""Mutated files for each reader of files, with limits on time, memory and kinds of errors.

`FILES` lists the readers, each with good files to begin from. A mutation is bytes that `damage` harms, or a number, a
text or a bracket in the place of another: what fits the syntax reaches further. `fuzz` runs the mutations of a reader.
"""

import gc
import hashlib
import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from sam3_node.bags.bag import open_bag
from sam3_node.bags.marks import read_marks
from sam3_node.calibration import load_calibration
from sam3_node.calibration.poses import read_poses
from sam3_node.cli import requests
from sam3_node.detection.loading import NANO
from sam3_node.detection.onnx_layouts import OnnxNotes, find_classes, read_notes
from sam3_node.detection.vocabulary import Vocabulary, read_phrases, read_source
from sam3_node.engines import engine_store, fast_torch
from sam3_node.engines.options import COMPILE, Trial, Tuning
from sam3_node.engines.quantize import Scales, load_recipe
from sam3_node.engines.validation import Report
from sam3_node.errors import Sam3NodeError
from sam3_node.models import checkpoints, registry, weight_files
from sam3_node.models.locating import locate_weights
from sam3_node.models.sam31.loading import read_tensors
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
from sam3_node.models.yolo.network import _read_config
from sam3_node.node.saved_state import Saved
from sam3_node.palette_png import encode_labels
from sam3_node.perception.snapshot import _HEADER, MAGIC, VERSION, Snapshot, Uptime
from sam3_node.processes.helpers import HELPERS_FILE, read_helpers
from sam3_node.recording.lerobot.pending import read_edits
from sam3_node.recording.lerobot.records import DROPPED, EpisodeRecord, read_dropped, read_records
from sam3_node.replay.cluster.bill import BILL, BagResult, UsageReport, read_bill
from sam3_node.replay.completion import IDENTITY, read_complete_summary, read_identity
from sam3_node.replay.davis_png import read_labels
from sam3_node.replay.job import read_prompts
from sam3_node.replay.redone import INDEX, read_layers
from sam3_node.replay.store import FolderStore, Summary
from sam3_node.robot.robot_model import read_robot
from sam3_node.settings import load_settings
from sam3_node.transport.security import KeyFolder
from tests.support.damaged_recordings import write_bop, write_tum
from tests.support.hostility import damage
from tests.support.paths import ROOT
from tests.support.pick_cell import URDF
from tests.support.recordings import write_recording
from tests.support.resources import clear_peak_memory, peak_memory

MAX_S = 2.0
"""Seconds of processor time that a reader may take for one file."""
MAX_MIB = 200
"""Memory in MiB that a reader may take for one file."""
MAX_WAIT_S = 30.0
"""Seconds after which a reader counts as one that never ends, on a machine with other work."""

MAX_TEXT = 200_000
"""Bytes at the beginning of a file in which texts are looked for."""

_TOKEN = re.compile(
    r'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"[^"\n]{0,200}"|\btrue\b|\bfalse\b|\bnull\b|[\[\]{}<>:,=]'
)
_HOSTILE = (
    *("0", "-1", "1", "0.0", "1e999", "-1e308", "1e-320", "NaN", "nan", "Infinity", "inf", "true", "null"),
    *(
        "9" * 5000,
        "1" + "0" * 8,
        "2147483648",
        "9223372036854775807",
        "18446744073709551616",
        "-9223372036854775809",
    ),
    *(
        '""',
        '"abc"',
        '"NaN"',
        '"../../etc/passwd"',
        '"\\u0000"',
        '"\\ud800"',
        '"' + "x" * 100_000 + '"',
        "\ufeff",
    ),
    *("[]", "{}", "[[]]", '[{}, "a", 1]', "[1, 2, 3]", "[" * 100_000, '{"a":' * 50_000, "[" * 70 + "]" * 70),
    *("", ",", "=", "\n", "a = 1", "[a.b.c]", "<a/>", "&a;", "2020-01-01"),
)
"""What takes the place of a part of a text."""


class FuzzedFile(NamedTuple):
    """A kind of file, and what reads it."""

    name: str
    """path of the file in a folder"""
    read: Callable[[Path], object]
    """reads this path"""
    make: Callable[[Path], object]
    """writes a good file at this path, with what belongs beside it"""


class Fault(NamedTuple):
    """A file that a reader does not take as it should."""

    kind: str
    seed: int
    found: str


def mutate(data: bytes, tokens: Sequence[re.Match[str]], rng: random.Random) -> bytes:
    """Return the bytes of a file with some harm; `tokens` are the parts of its text."""
    if not tokens or rng.random() < 0.3:
        return damage(data, rng)
    text = data.decode("latin-1")
    chosen = rng.sample(tokens, min(len(tokens), rng.choice((1, 1, 1, 2, 3))))
    # from the end, so that the places of the others stay
    for token in sorted(chosen, key=lambda token: -token.start()):
        # a value of the file itself has the right type, and another meaning
        other = rng.choice(tokens)[0] if rng.random() < 0.2 else rng.choice(_HOSTILE)
        text = text[: token.start()] + other + text[token.end() :]
    return text.encode("latin-1", errors="replace")


def fuzz(kind: FuzzedFile, folder: Path, count: int, first: int = 0) -> Iterator[Fault]:
    """Yield the faults of `count` mutated files, each made by a seed from `first` on."""
    path = folder / kind.name
    path.parent.mkdir(parents=True, exist_ok=True)
    kind.make(path)
    good = path.read_bytes()
    tokens = list(_TOKEN.finditer(good.decode("latin-1")[:MAX_TEXT]))
    kind.read(path)
    for seed in range(first, first + count):
        path.write_bytes(mutate(good, tokens, random.Random(f"{kind.name} {seed}")))
        if found := judge(kind.read, path):
            yield Fault(kind.name, seed, found)


def judge(read: Callable[[Path], object], path: Path) -> str:
    """Return what is wrong with how a file is read; empty where nothing is."""
    before_mib = clear_peak_memory()
    begin_s = time.process_time()
    found = ""
    try:
        with _ending():
            read(path)
    except Sam3NodeError as error:
        if not str(error):
            found = "an error without a message"
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[:200]}"
    seconds = time.process_time() - begin_s
    taken_mib = peak_memory() - before_mib
    if seconds > MAX_S:
        found += f" {seconds:.1f} s"
    if taken_mib > MAX_MIB:
        gc.collect()
        found += f" {taken_mib:.0f} MiB"
    return found


@contextmanager
def _ending() -> Iterator[None]:
    """Raise TimeoutError in the block after MAX_WAIT_S."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {MAX_WAIT_S:g} s")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def _json(content: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(content))


def _copy(source: Path) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(source.read_bytes())


def _read_recording(path: Path) -> object:
    with open_bag(path) as bag:
        return list(bag)


def _write_recording_at(path: Path) -> None:
    write_recording(path, 1)


def _read_key(path: Path) -> object:
    path.parent.chmod(0o700)
    return KeyFolder(path.parents[1]).find_server("node")


def _make_key(path: Path) -> None:
    path.parent.chmod(0o700)
    KeyFolder(path.parents[1]).create("node", "node")


def _write_digest(path: Path) -> None:
    path.with_suffix("").write_bytes(b"weights")
    weight_files.write_digest(path.with_suffix(""))


def _read_index(path: Path) -> None:
    (path.parent / "model.safetensors").write_bytes(b"{}")
    weight_files.check_weight_files(path.parent)


def _make_weights(path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        _copy(checkpoints.NANO / name)(path.parent / name)


def _read_tracker(path: Path) -> object:
    """Read weights as far as to a model without stages."""
    name = str(path.parent)
    _, weights = registry.find_reader(weight_files.read_kind(name), name)
    return weights.read(name, lambda config: config)


def _make_snapshot(path: Path) -> None:
    state = {"cameras": {"cam0": {"image": torch.zeros(2, 3), "ids": [1, 2], "age": 0.5}}, "prompts": ["mug"]}
    snapshot = Snapshot("named", 1, {"model": "nano"}, state, {"cam0": {"frames": 3}}, {}, Uptime("boot", 5))
    path.write_bytes(snapshot.pack())


def _read_snapshot(path: Path) -> object:
    """Read a snapshot as one whose author has also written its digest."""
    body = path.read_bytes()[_HEADER.size :]
    path.write_bytes(_HEADER.pack(MAGIC, VERSION, hashlib.sha256(body).digest()) + body)
    return Saved.read(path)


def _make_report(path: Path) -> None:
    path.write_text(Report(0.99, 0.97, 8, (), None, faults=("one",), plans={"encode": "0" * 64}).to_json())


def _save_in_torchs_format(path: Path) -> None:
    torch.save({"model": {"a.b": torch.zeros(3, 4), "c": torch.ones(2)}}, path)


def _make_sam31(path: Path) -> None:
    # sizes are read, and no values: small ones take less time to write
    tensors = {name: value.to(torch.float8_e4m3fn) for name, value in random_tensors(small_sizes()).items()}
    path.write_bytes(save_tensors(tensors))


def _read_launch(path: Path) -> object:
    return fast_torch.read_launch(path.read_bytes())


def _stored(read: Callable[[FolderStore], object], level: int = 0) -> Callable[[Path], object]:
    """Return what reads a value of a store, whose folder is this many levels above the value's."""
    return lambda path: read(FolderStore(path.parents[level]))


POSES = [
    {"image": "a.png", "position": [0.1, 0.2, 0.3], "quaternion_xyzw": [0, 0, 0, 1]},
    {"image": "b.png", "position": [0.2, 0.2, 0.3], "quaternion_xyzw": [0, 0, 1, 0]},
]
POSES_CSV = "image,x,y,z,qx,qy,qz,qw\na.png,0.1,0.2,0.3,0,0,0,1\nb.png,0.2,0.2,0.3,0,0,1,0\n"
OBJECTS = [
    {"camera": "front", "frame": 0, "label": "mug", "box": [1, 2, 30, 40]},
    {"frame": "first", "points": [[1, 2], [3, 4.5]], "labels": [1, 0]},
]
MARKS = {
    "objects": [{"camera": "front", "frame": 3, "label": "mug", "points": [[1, 2.5]], "labels": [1]}],
    "marks": [
        {"camera": "front", "frame": 3, "id": 1, "object": 0},
        {"camera": "front", "frame": 9, "state": "checked"},
        {"camera": "front", "frame": 9, "id": 2, "removed": True},
    ],
}
LAYER = {
    "name": "0123456789abcdef",
    "marks": [{"camera": "front", "seq": 3, "id": 1, "box": [1, 2, 30, 40]}],
    "stretches": [{"camera": "front", "id": 1, "first": 3, "stop": 9}],
}
OBJECTS_TOML = '[[objects]]\ncamera = "front"\nframe = 0\nlabel = "mug"\nbox = [1, 2, 30, 40]\n'
EDITS = {
    "edits": [
        {"episode": 1, "key": 7, "begin_s": 0.5, "end_s": 2.5},
        {"episode": 2, "key": 8, "task": "wipe the table"},
    ]
}
SUMMARY = Summary("a.mcap", "live", "every", "nano", "cpu", 3, 0, 0, {"front": 3}, {"front": 1}, 1.0, 3.0)
RECORD = EpisodeRecord(0, 1, "pick", 3, 0, 30, {}, ["mug"], [], 0, {})
KEY = engine_store.EngineKey(
    model="nano",
    weights="0" * 64,
    precision="float16",
    image_size=256,
    bank_size=7,
    max_objects=4,
    library="tensorrt",
    version="10.3",
    gpu="sm89",
)
MANIFEST = engine_store.Manifest(key=KEY, plans={"encode": "0" * 64}, build_s={"encode": 1.0}, built_s=1.0)
TUNING = Tuning((1, 4), (Trial({COMPILE: False}, {1: 20.0, 4: 30.0}),), 0, "2026-11-26")


def _make_bill(path: Path) -> None:
    path.write_text(
        UsageReport([BagResult("a.mcap", "out/a", "done", None, 100, 1.0)], 1.0, 1.0, 1.0).to_json()
    )


def _make_vocabulary(path: Path) -> None:
    Vocabulary(["red mug", "box"], np.eye(2, 4, dtype=np.float32), "nano").save(path)


def _make_tuning(path: Path) -> None:
    path.parent.chmod(0o700)
    TUNING.save(path)


def _make_manifest(path: Path) -> None:
    path.parent.chmod(0o700)
    path.write_text(MANIFEST.model_dump_json(indent=1))


FILES = (
    *(
        FuzzedFile(f"{profile}.toml", load_settings, _copy(ROOT / "launch" / f"{profile}.toml"))
        for profile in ("two_camera_cell", "bench_robot")
    ),
    FuzzedFile("calibration.toml", load_calibration, _copy(ROOT / "calibration" / "example.toml")),
    FuzzedFile("recipe.toml", load_recipe, _copy(ROOT / "calibration" / "fp8" / "default.toml")),
    FuzzedFile(
        "best.toml",
        read_notes,
        _text(
            'layout = "detr"\noutputs = ["a", "b"]\nsize = [640, 480]\nstd = [1, 0.5, 1]\nclasses = ["mug"]\n'
        ),
    ),
    FuzzedFile(
        "data.yaml",
        lambda path: find_classes(path.with_name("best.onnx"), OnnxNotes(), {}),
        _text('nc: 2\nnames: ["red mug", "box"]\n'),
    ),
    FuzzedFile("poses.json", read_poses, _json({"poses": POSES})),
    FuzzedFile("poses.csv", read_poses, _text(POSES_CSV)),
    FuzzedFile(
        "scales.json",
        Scales.load,
        _text(Scales(model="nano", digest="0" * 64, frames=1, amax={"a": 1.0, "b": 2.5}).model_dump_json()),
    ),
    FuzzedFile("objects.json", read_prompts, _json(OBJECTS)),
    FuzzedFile("pick.mcap.marks.json", read_marks, _json(MARKS)),
    FuzzedFile("pick.edits.json", read_edits, _json(EDITS)),
    FuzzedFile(INDEX, _stored(read_layers, 1), _json({"layers": [LAYER]})),
    FuzzedFile("objects.toml", read_prompts, _text(OBJECTS_TOML)),
    FuzzedFile(
        "mugs.json",
        requests._read_set,
        _json({"prompts": ["red mug"], "scores": {"red mug": 0.3}, "most": {}}),
    ),
    FuzzedFile("phrases.txt", read_phrases, _text("red mug\nbox\n")),
    FuzzedFile(
        "vectors.json", lambda path: read_source(path, "nano"), _json({"mug": [1, 0.5], "box": [0, 1]})
    ),
    FuzzedFile("vocabulary.safetensors", Vocabulary.load, _make_vocabulary),
    FuzzedFile("yolo/config.json", _read_config, _copy(NANO / "config.json")),
    FuzzedFile("tracker/config.json", _read_tracker, _make_weights),
    FuzzedFile(
        "preprocessor_config.json",
        lambda path: weight_files.read_normalisation(str(path.parent), weight_files.IMAGENET),
        _json({"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"shortest_edge": 800}}),
    ),
    FuzzedFile(
        "model.safetensors.index.json", _read_index, _json({"weight_map": {"a": "model.safetensors"}})
    ),
    FuzzedFile(
        "sam31.safetensors",
        lambda path: locate_weights(str(path)),
        _make_sam31,
    ),
    FuzzedFile("sam31.pt", read_tensors, _save_in_torchs_format),
    FuzzedFile("weights.sha256", lambda path: weight_files.check_digest(path.with_suffix("")), _write_digest),
    FuzzedFile("authorised/node.pub", _read_key, _make_key),
    FuzzedFile("robot.urdf", read_robot, _text(URDF)),
    FuzzedFile("tuning.json", Tuning.load, _make_tuning),
    FuzzedFile("node.snapshot", _read_snapshot, _make_snapshot),
    FuzzedFile("report.json", Report.load, _make_report),
    FuzzedFile("launch.json", _read_launch, _json([128, 64, 8, 3])),
    FuzzedFile("engine/manifest.json", engine_store._read, _make_manifest),
    FuzzedFile(
        "ended.json",
        lambda path: read_helpers({HELPERS_FILE: str(path)}),
        _json({"record": {"restarts": 1, "reason": "the disk is full"}}),
    ),
    FuzzedFile("tum/rgb.txt", lambda path: _read_recording(path.parent), lambda path: write_tum(path.parent)),
    FuzzedFile(
        "000001/scene_camera.json",
        lambda path: _read_recording(path.parent),
        lambda path: write_bop(path.parents[1]),
    ),
    FuzzedFile("recording.mcap", _read_recording, _write_recording_at),
    FuzzedFile(
        "labels.png",
        read_labels,
        lambda path: path.write_bytes(encode_labels(np.eye(20, 30, dtype=np.uint8))),
    ),
    FuzzedFile("summary.json", _stored(read_complete_summary), _text(SUMMARY.to_json())),
    FuzzedFile(BILL, _stored(read_bill), _make_bill),
    FuzzedFile(IDENTITY, _stored(read_identity, 1), _json({"job": {"bags": ["a.mcap"]}, "version": 1})),
    FuzzedFile("episode-000000.json", lambda path: read_records(path.parent), _json(asdict(RECORD))),
    FuzzedFile(DROPPED, lambda path: read_dropped(path.parent.parent), _json({"keys": [1, 2]})),
)
"""All readers that a mutated file is given to."""
