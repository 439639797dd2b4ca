"""Prompts read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.errors import ReplayError
from sam3_node.geometry import Scaling
from sam3_node.perception.prompts import to_model
from sam3_node.replay.davis_png import encode_labels, read_mask
from sam3_node.replay.event_log import Notes, Step
from sam3_node.replay.job import ObjectOnFrame, read_prompts
from sam3_node.replay.schedule import add_objects
from sam3_node.types import Frame
from sam3_node.wire import decode_mask
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.paths import SHARED
from tests.support.refuses import refuses

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
    expected = prompts_of(tmp_path, {"frame": 12, "label": "mug", "box": BOX}, {"points": [[1, 2]]})
    assert read_prompts(path) == expected
    named = tmp_path / "named.json"
    named.write_text(
        json.dumps({"objects": [{"frame": 12, "label": "mug", "box": BOX}, {"points": [[1, 2]]}]})
    )
    assert read_prompts(named) == expected


def test_an_object_becomes_the_operation_that_adds_it(tmp_path: Path) -> None:
    found = prompts_of(
        tmp_path,
        {"camera": "left", "frame": 12, "label": "mug", "box": BOX},
        {"points": [[20, 16]], "labels": [1]},
        {"mask": str(annotation(tmp_path / "mug.png"))},
    )
    frames = (Frame("left", seq, 0, 64, 48, "bgr8", b"") for seq in (11, 12))
    first, second = add_objects((Step(frame, 0) for frame in frames), found, Notes(lenient=False))
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    edits = (*second.edits, *first.edits)
    assert [edit.args["seq"] for edit in edits] == [12, 11, 11]
    for edit in edits:
        assert edit.op == "add_object"
        shape = {name: edit.args.get(name) for name in ("points", "labels", "box")}
        mask = decode_mask(edit.args["mask"]) if "mask" in edit.args else None
        assert to_model(FramePrompt(**shape, mask=mask), 1, Scaling((48, 64), 32)).object_id == 1


@pytest.mark.parametrize("at", ["", "bear", "bear/00000.png"])
def test_an_annotation_gives_an_object_for_each_index(tmp_path: Path, at: str) -> None:
    first = annotation(tmp_path / "bear/00000.png")
    (tmp_path / "bear/00001.png").write_bytes(encode_labels(np.full((48, 64), 9, np.uint8)))
    found = read_prompts(tmp_path / at)
    camera = None if at else "bear"
    assert found == tuple(ObjectOnFrame(camera, mask=str(first), value=value) for value in (1, 7))
    for shown in found:
        assert np.array_equal(read_mask(Path(shown.mask or ""), shown.value).full(), labels() == shown.value)


def test_an_annotation_of_255_is_one_object(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "00000.png"), np.where(labels() > 0, 255, 0).astype(np.uint8))
    (shown,) = read_prompts(tmp_path)
    assert np.array_equal(read_mask(Path(shown.mask or ""), shown.value).full(), labels() > 0)


@pytest.mark.parametrize(
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
        ({"mask": "two.png", "value": 0}, ("value", "1..255", "0")),
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
        (
            "a.yaml",
            "- box",
            "PNGs",
        ),
    ],
)
def test_other_files_are_errors(
    tmp_path: Path, name: str, content: str, message: str | tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(content)
    with refuses(ReplayError, field=message):
        read_prompts(tmp_path / name)


def test_paths_without_prompts_are_errors(tmp_path: Path) -> None:
    with refuses(ReplayError, field="file"):
        read_prompts(tmp_path / "none.json")
    with refuses(ReplayError, field="PNGs"):
        read_prompts(tmp_path)
    (tmp_path / "00000.png").write_bytes(encode_labels(np.zeros((4, 4), np.uint8)))
    with refuses(ReplayError, field="00000.png"):
        read_prompts(tmp_path)


def test_real_annotations_are_read() -> None:
    folder = SHARED / "data/davis/Annotations"
    if not folder.is_dir():
        pytest.skip("no DAVIS sequences here")
    found = read_prompts(folder)
    assert {shown.camera for shown in found} == {inner.name for inner in folder.iterdir()}
    for shown in found:
        assert read_mask(Path(shown.mask or ""), shown.value).area > 0
