"""Jobs as JSON, the settings that they run with, and prompts read from files."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.errors import ReplayError
from sam3_node.geometry import Scaling
from sam3_node.palette_png import encode_labels
from sam3_node.perception.prompts import to_model
from sam3_node.replay import job
from sam3_node.replay.davis_png import MAX_IMAGE_FILE, read_mask
from sam3_node.replay.event_log import Notes
from sam3_node.replay.job import Job, ObjectOnFrame, chosen_settings, read_prompts, settings_for
from sam3_node.replay.schedule import open_schedule, step_all_frames
from sam3_node.schema.operations import AddObject
from sam3_node.settings import load_settings
from sam3_node.types import Frame
from sam3_node.wire.requests import read_prompt
from tests.support.command_line import command_parser
from tests.support.hostility import MEGABYTE, large_png, limited_memory, make_irregular
from tests.support.paths import SHARED
from tests.support.refuses import refuses
from tests.support.tables import each_row

DESCRIPTION = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 3,
    "settings": {
        "model": {"name": "elsewhere", "device": "auto", "dtype": "auto", "threads": 0, "image_size": 0},
        "tracker": {"bank_size": 5},
        "detector": {"prompts": ["mug"], "every": 3},
        "engine": {"kind": "tensorrt"},
        "camera": {"fps": 3},
    },
}


BARE = {"mode": "as-recorded", "names": (), "objects": ()}


def full_job() -> Job:
    return Job(
        ("a.mcap", "s3://b/c.mcap"),
        "out",
        names=("red mug",),
        objects=(
            ObjectOnFrame(camera="left", seq=3, box=(1, 2, 3.5, 4), label="box"),
            ObjectOnFrame(points=((1, 2), (3, 4)), labels=(1, 0)),
            ObjectOnFrame(mask="mask.png", value=3),
        ),
        topics=("left",),
        outputs=("mcap", "coco"),
        settings={"tracker": {"bank_size": 4}},
    )


@each_row(
    ("change", "told"),
    [
        ({"mode": "some"}, ("mode", "some")),
        ({"strategy": "sideways"}, "strategy"),
        ({"outputs": ("avi",)}, ("output", "avi")),
        ({"settings": {"camera": {}}}, "settings"),
        ({"bags": ()}, "bags"),
        ({"mode": "as-recorded"}, ("objects", "beside")),
        (BARE | {"everything": True}, ("as-recorded", "repeats")),
        (BARE | {"strategy": "bidirectional"}, ("forward", "bidirectional")),
        *((BARE | part, "mode") for part in ({"begin_ns": 1}, {"end_ns": 1}, {"stop": 1})),
        ({"begin_ns": 5, "end_ns": 5}, ("end", "beginning")),
        *(({"names": names}, ("name", "object")) for names in (("",), (" ",), ("mug", ""))),
        ({"names": "mug"}, ("list", "phrases")),
        ({"objects": (ObjectOnFrame(box=(80, 90, 40, 30)),)}, ("box", "x0", "x1", "y0")),
        ({"objects": (ObjectOnFrame(box=(80, 90, 80, 95)),)}, ("box", "x0", "x1", "y0")),
        ({"objects": (ObjectOnFrame(box=(float("nan"), 0, 4, 4)),)}, "box"),
        ({"objects": (ObjectOnFrame(box=(-9, -9, -1, 4)),)}, "box"),
        ({"objects": (ObjectOnFrame(points=((float("inf"), 0),)),)}, "points"),
    ],
)
def test_an_invalid_job_is_an_error(change: dict[str, Any], told: str | tuple[str, ...]) -> None:
    with refuses(ReplayError, field=told):
        replace(full_job(), **change)


def test_several_recordings_are_a_job_each_in_a_folder_of_its_own() -> None:
    job = replace(full_job(), bags=("x/a.mcap", "y/a.mcap", "s3://b/folder/", "a-2.mcap"), out="out/")
    assert [one.out for one in job.split_by_recording()] == ["out/a", "out/a-2", "out/folder", "out/a-2-2"]
    assert [one.bags for one in job.split_by_recording()] == [(bag,) for bag in job.bags]
    alone = replace(job, bags=("a.mcap",))
    assert alone.split_by_recording() == (alone,)


def test_the_command_offers_all_outputs_and_strategies() -> None:
    line = ["replay", "bag.mcap", "-o", "out", "--outputs", "davis, coco"]
    assert command_parser().parse(line).outputs == ("png", "coco")


def test_a_job_has_only_settings_that_the_user_set(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text("[tracker]\nbank_size = 7\n[camera]\nfps = 5\n")
    settings = load_settings(profile, {"model.device": "cpu"})
    assert chosen_settings(settings) == {"tracker": {"bank_size": 7}, "model": {"device": "cpu"}}


def test_as_recorded_is_done_with_the_recorded_settings_and_what_was_resolved() -> None:
    job = Job(("a",), "b", "as-recorded", settings={"model": {"name": "here"}})
    settings = settings_for(job, DESCRIPTION)
    assert settings.model.name == "here"
    assert (settings.model.device, settings.model.dtype, settings.model.threads) == ("cpu", "float32", 3)
    assert settings.tracker.bank_size == 5
    assert settings.detector.prompts == ("mug",)
    assert settings.engine.kind == "tensorrt"


def test_every_frame_is_done_with_the_recorded_model_on_this_machine() -> None:
    settings = settings_for(Job(("a",), "b"), DESCRIPTION)
    assert settings.model.name == "elsewhere"
    assert (settings.model.device, settings.model.threads) == ("auto", 0)
    assert settings.engine.kind == "torch"
    assert settings.detector.prompts == ("mug",)
    assert settings_for(Job(("a",), "b", names=("cup",)), DESCRIPTION).detector.prompts == ()
    assert settings_for(Job(("a",), "b"), None).tracker.bank_size == 7


def test_settings_of_another_version_are_an_error() -> None:
    strange = {"settings": {"tracker": {"speed": 3}}}
    with refuses(ReplayError, field=("fit", "version")):
        settings_for(Job(("a",), "b", "as-recorded"), strange)


BOX = [10, 8, 30, 24]


def labels() -> np.ndarray:
    image = np.zeros((48, 64), np.uint8)
    image[8:24, 10:30] = 1
    image[30:40, 40:60] = 7
    return image


def annotation(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_labels(labels()))
    return path


def prompts_of(folder: Path, *entries: Any) -> tuple[ObjectOnFrame, ...]:
    path = folder / "prompts.json"
    path.write_text(json.dumps(entries))
    return read_prompts(path)


def test_objects_are_read_from_json(tmp_path: Path) -> None:
    annotation(tmp_path / "masks/mug.png")
    found = prompts_of(
        tmp_path,
        {"camera": "left", "frame": 12, "label": "red mug", "box": BOX},
        {"frame": "first", "points": [[20, 16], [50.5, 35]], "labels": [1, 0]},
        {"mask": "masks/mug.png", "value": 7},
    )
    assert found == (
        ObjectOnFrame("left", 12, box=(10, 8, 30, 24), label="red mug"),
        ObjectOnFrame(points=((20, 16), (50.5, 35)), labels=(1, 0)),
        ObjectOnFrame(mask=str(tmp_path / "masks/mug.png"), value=7),
    )


def test_toml_says_the_same_as_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.toml"
    path.write_text(
        '[[objects]]\nframe = 12\nlabel = "mug"\nbox = [10, 8, 30, 24]\n\n[[objects]]\npoints = [[1, 2]]\n'
    )
    entries = [{"frame": 12, "label": "mug", "box": BOX}, {"points": [[1, 2]]}]
    expected = prompts_of(tmp_path, *entries)
    assert read_prompts(path) == expected
    named = tmp_path / "named.json"
    named.write_text(json.dumps({"objects": entries}))
    assert read_prompts(named) == expected


def test_an_object_becomes_the_operation_that_adds_it(tmp_path: Path) -> None:
    found = prompts_of(
        tmp_path,
        {"camera": "left", "frame": 12, "label": "mug", "box": BOX},
        {"points": [[20, 16]], "labels": [1]},
        {"mask": str(annotation(tmp_path / "mug.png"))},
    )
    frames = [Frame("left", seq, 0, 64, 48, "bgr8", b"") for seq in (11, 12)]
    outside = ObjectOnFrame(box=(-5, 0, 30, 24))
    notes = Notes(lenient=False)
    first, second = step_all_frames(frames, notes, objects=found)
    assert notes.lines == []
    assert list(step_all_frames(frames[:1], notes, objects=[outside]))
    assert "reaches beyond" in notes.lines[0]
    edits = (*second.edits, *first.edits)
    added = [edit for edit in edits if isinstance(edit, AddObject)]
    assert [edit.seq for edit in added] == [12, 11, 11]
    for edit in added:
        assert to_model(read_prompt(edit), 1, Scaling((48, 64), 32)).object_id == 1


@pytest.mark.parametrize("at", ["", "bear", "bear/00000.png"])
def test_an_annotation_gives_an_object_for_each_index(tmp_path: Path, at: str) -> None:
    first = annotation(tmp_path / "bear/00000.png")
    found = read_prompts(tmp_path / at)
    camera = None if at else "bear"
    assert found == tuple(
        ObjectOnFrame(camera, mask=str(first), value=value, frame_name="00000") for value in (1, 7)
    )
    for shown in found:
        assert np.array_equal(read_mask(Path(shown.mask or ""), shown.value).full(), labels() == shown.value)


@pytest.mark.verifies(
    "objects",
    "YouTube-VOS annotations: later objects, void",
    "layout",
    "folders of palette PNGs as published; 255 is no object",
    "a sequence of the set",
)
def test_each_object_of_a_sequence_is_on_the_first_annotation_that_has_it(tmp_path: Path) -> None:
    """YouTube-VOS: objects appear later. Void, 255, is none."""
    annotation(tmp_path / "00005.png")
    for name, value in (("00010", 255), ("00015", 9)):
        image = labels().copy()
        image[:4] = value
        (tmp_path / f"{name}.png").write_bytes(encode_labels(image))
    found = read_prompts(tmp_path)
    assert [(shown.value, shown.frame_name) for shown in found] == [(1, "00005"), (7, "00005"), (9, "00015")]


def test_annotations_go_to_the_frames_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "seq"
    folder.mkdir()
    for name in ("00000", "00005", "00010"):
        cv2.imwrite(str(folder / f"{name}.png"), np.zeros((48, 64, 3), np.uint8))
    # the name of an image, a number, neither
    for name, seq in (("00005", 1), ("00010", 2), ("00002", 2), ("mug", None)):
        marked = read_prompts(annotation(tmp_path / f"{name}.png"))
        with open_schedule(Job((str(folder),), str(tmp_path / "out"), objects=marked)) as schedule:
            assert [shown.seq for shown in schedule.objects] == [seq, seq]
    # a damaged image keeps its name and its number
    (folder / "00000.png").write_bytes(b"no image")
    marked = read_prompts(annotation(tmp_path / "00010.png"))
    with open_schedule(Job((str(folder),), str(tmp_path / "out"), objects=marked)) as schedule:
        assert [shown.seq for shown in schedule.objects] == [2, 2]
        assert [frame.seq for frame in schedule.frames()] == [1, 2]
    later = tmp_path / "later"
    annotation(later / "one.png")
    (later / "two.png").write_bytes(encode_labels(np.full((48, 64), 9, np.uint8)))
    job = Job((str(folder),), str(tmp_path / "out"), objects=read_prompts(later))
    with refuses(ReplayError, field="two.png"), open_schedule(job):
        pass


@pytest.mark.verifies(
    "objects",
    "RGBA cut-outs, and labels of 16 bits",
    "other implementation",
    "OpenCV writes them; the transparent part is outside",
    "",
)
def test_labels_of_16_bits_and_cut_outs_are_read(tmp_path: Path) -> None:
    wide = np.where(labels() == 7, 256, labels().astype(np.uint16)).astype(np.uint16)
    cv2.imwrite(str(tmp_path / "wide.png"), wide)
    assert [shown.value for shown in read_prompts(tmp_path / "wide.png")] == [1, 256]
    assert np.array_equal(read_mask(tmp_path / "wide.png", 256).full(), labels() == 7)
    cv2.imwrite(str(tmp_path / "depth.png"), np.arange(64 * 48, dtype=np.uint16).reshape(48, 64))
    with refuses(ReplayError, field=("depth.png", "256")):
        read_prompts(tmp_path / "depth.png")
    # the colour below the transparent part means nothing
    white = np.full((48, 64, 3), 255, np.uint8)
    for kind in (np.uint8, np.uint16):
        alpha = (labels() > 0).astype(kind) * np.iinfo(kind).max
        cv2.imwrite(str(tmp_path / "cut.png"), np.dstack([white.astype(kind), alpha.astype(kind)]))
        (shown,) = read_prompts(tmp_path / "cut.png")
        assert np.array_equal(read_mask(Path(shown.mask or ""), shown.value).full(), labels() > 0)


def test_void_is_no_object(tmp_path: Path) -> None:
    image = np.where(labels() == 7, 255, labels()).astype(np.uint8)
    (tmp_path / "void.png").write_bytes(encode_labels(image))
    assert [shown.value for shown in read_prompts(tmp_path / "void.png")] == [1]
    # an image of void alone says nothing, also before the first object of its sequence
    (folder := tmp_path / "seq").mkdir()
    for name, others in (("00000", 0), ("00001", 7), ("00002", 0)):
        shown = np.where(labels() == 7, 255, others * (labels() == 1))
        (folder / f"{name}.png").write_bytes(encode_labels(shown.astype(np.uint8)))
    assert [(marked.value, marked.frame_name) for marked in read_prompts(folder)] == [(7, "00001")]
    assert np.array_equal(read_mask(tmp_path / "void.png").full(), labels() == 1)
    assert np.array_equal(read_mask(tmp_path / "void.png", 255).full(), labels() == 7)
    # a soft edge of a grey mask has all values: 255 is its inside
    soft = np.where(labels() == 7, 255, labels() * 100).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "soft.png"), soft)
    assert np.array_equal(read_mask(tmp_path / "soft.png").full(), labels() > 0)


def test_an_annotation_of_255_is_one_object(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "00000.png"), np.where(labels() > 0, 255, 0).astype(np.uint8))
    (shown,) = read_prompts(tmp_path)
    assert np.array_equal(read_mask(Path(shown.mask or ""), shown.value).full(), labels() > 0)


@each_row(
    ("entry", "message"),
    [
        (3, ("3", "map")),
        ({}, "prompt"),
        ({"box": BOX, "mask": "a.png"}, "prompt"),
        ({"bocks": BOX}, "bocks"),
        ({"box": [1, 2, 3]}, ("box", "x0", "y0", "x1")),
        ({"box": [30, 8, 10, 24]}, ("box", "x0", "x1", "y0")),
        ({"box": "all"}, ("box", "all")),
        ({"points": []}, ("points", "1", "64", "0")),
        ({"points": [[1, 2, 3]]}, ("points", "pairs")),
        ({"points": [[1, 2], [3]]}, "points"),
        ({"points": [[1, 2]], "labels": [True]}, ("labels", "numbers")),
        ({"points": [[1, 2]], "labels": [1, 0]}, ("labels", "1")),
        ({"points": [[1, 2]], "labels": [2]}, ("labels", "1")),
        ({"box": BOX, "labels": [1]}, "labels"),
        ({"box": BOX, "frame": "last"}, ("frame", "first", "last")),
        ({"box": BOX, "frame": -1}, ("frame", "0")),
        ({"box": BOX, "label": 5}, ("label", "5")),
        ({"mask": "none.png"}, "PNG"),
        ({"mask": "prompts.json"}, ("8-bit", "PNG")),
        ({"mask": "two.png", "value": 3}, ("3", "none")),
        ({"mask": "two.png", "value": 0}, ("value", "1..65535", "0")),
    ],
)
def test_errors_name_the_object_and_what_was_expected(
    tmp_path: Path, entry: Any, message: str | tuple[str, ...]
) -> None:
    annotation(tmp_path / "two.png")
    with refuses(ReplayError, field=message):
        prompts_of(tmp_path, {"box": BOX}, entry)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "JSON"),
        ("a.toml", "objects = ", "TOML"),
        ("a.json", "[]", "objects"),
        ("a.toml", "camera = 'left'", ("list", "objects")),
        ("a.yaml", "- box", "PNGs"),
    ],
)
def test_other_files_are_errors(
    tmp_path: Path, name: str, content: str, message: str | tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(content)
    with refuses(ReplayError, field=message):
        read_prompts(tmp_path / name)


def test_a_dash_reads_json_of_bounded_length_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(content: bytes) -> tuple[ObjectOnFrame, ...]:
        monkeypatch.setattr(job.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return read_prompts(Path("-"))

    expected = (ObjectOnFrame(box=(1, 2, 3, 4), label="mug"),)
    listed = b'[{"box": [1, 2, 3, 4], "label": "mug"}]'
    for content in (listed, b'{"objects": ' + listed + b"}"):
        assert read(content) == expected
    for content, field in (
        (b"", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"\xff", "JSON"),
        (b"[]", "objects"),
        (b'[{"box": [1]}]', "object 0"),
        (b'[{"mask": "none.png"}]', "none.png"),
        (b" " * (job.MAX_OBJECTS_BYTES + 1), str(job.MAX_OBJECTS_BYTES)),
    ):
        with refuses(ReplayError, field=("standard input" if field != "none.png" else field, field)):
            read(content)


def test_paths_without_prompts_are_errors(tmp_path: Path) -> None:
    with refuses(ReplayError, field="file"):
        read_prompts(tmp_path / "none.json")
    with refuses(ReplayError, field="PNGs"):
        read_prompts(tmp_path)
    (tmp_path / "00000.png").write_bytes(encode_labels(np.zeros((4, 4), np.uint8)))
    with refuses(ReplayError, field="00000.png"):
        read_prompts(tmp_path)


@pytest.mark.verifies(
    "objects", "DAVIS annotations", "real data", "the palette PNGs of five sequences of DAVIS", ""
)
def test_real_annotations_are_read() -> None:
    folder = SHARED / "data/davis/Annotations"
    if not folder.is_dir():
        pytest.skip("no DAVIS sequences here")
    found = read_prompts(folder)
    assert {shown.camera for shown in found} == {inner.name for inner in folder.iterdir()}
    for shown in found:
        assert read_mask(Path(shown.mask or ""), shown.value).area > 0


def test_a_mask_of_many_pixels_or_without_an_end_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(large_png(16384, colour=0))
    for path in (large, *make_irregular(tmp_path)):
        # reading reserves as much as a file may have
        with limited_memory(MAX_IMAGE_FILE // MEGABYTE + 2), refuses(ReplayError, field=path.name):
            read_mask(path)
