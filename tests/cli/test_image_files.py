"""Image files of commands that talk to a node: they are checked before they are read and decoded."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cli import requests
from sam3_node.cli.main import main
from sam3_node.wire.images import MAX_PHOTO_FILE
from tests.support.hostility import large_png, make_irregular

MASK = ("object", "add", "--mask")
PHOTO = ("exemplar", "bolt", "--box", "1,2,30,40", "--photo")


def fail(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints that fails before it asks a node."""
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", [MASK, PHOTO], ids=["mask", "photo"])
@pytest.mark.parametrize("number", [0, 1], ids=["pipe", "endless"])
def test_only_a_regular_file_is_read(
    command: tuple[str, ...], number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_irregular(tmp_path)[number]
    message = fail([*command, str(path)], capsys)
    assert path.name in message
    assert "expected a regular file" in message


def test_a_mask_of_many_pixels_is_refused_before_it_is_decoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(large_png(16384, colour=0))
    monkeypatch.setattr(cv2, "imdecode", lambda *args: pytest.fail("decoded"))
    message = fail([*MASK, str(path)], capsys)
    assert "mask.png" in message
    assert "16384 x 16384" in message


def test_a_photo_of_many_bytes_is_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "photo.bin"
    path.write_bytes(bytes(MAX_PHOTO_FILE + 1))
    assert str(MAX_PHOTO_FILE) in fail([*PHOTO, str(path)], capsys)


def test_an_empty_mask_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("empty.png", b""), ("text.png", b"text"), ("cut.png", large_png(8)[:-20])):
        (tmp_path / name).write_bytes(content)
        assert name in fail([*MASK, str(tmp_path / name)], capsys)


def test_masks_of_other_kinds_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.zeros((40, 60), np.uint8)
    mask[10:20, 30:50] = 255
    for kind in (".png", ".bmp", ".tiff", ".jpg"):
        path = tmp_path / f"mask{kind}"
        cv2.imwrite(str(path), mask)
        found = requests._read_mask(path)
        assert np.array_equal(found.full(), cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) > 0)


@pytest.mark.verifies(
    "objects",
    "RGBA cut-outs, and labels of 16 bits",
    "other implementation",
    "OpenCV writes them; the transparent part is outside",
    "",
)
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_cut_out_is_its_opaque_part(kind: type[np.uint8], tmp_path: Path) -> None:
    inside = np.zeros((40, 60), np.bool_)
    inside[10:20, 30:50] = True
    largest = np.iinfo(kind).max
    alpha = np.where(inside, largest, 0).astype(kind)
    # white all over, and black all over: only the alpha channel tells
    for value in (largest, 0):
        path = tmp_path / "cut.png"
        cv2.imwrite(str(path), np.dstack([np.full((40, 60, 3), value, kind), alpha]))
        found = requests._read_mask(path)
        assert found is not None
        assert np.array_equal(found.full(), inside)
    # without a transparent part, the colours count
    opaque = np.dstack([np.where(inside, largest, 0).astype(kind)] * 3 + [np.full((40, 60), largest, kind)])
    cv2.imwrite(str(path), opaque)
    found = requests._read_mask(path)
    assert found is not None
    assert np.array_equal(found.full(), inside)


def test_labels_of_16_bits_are_a_mask(tmp_path: Path) -> None:
    labels = np.zeros((40, 60), np.uint16)
    labels[10:20, 30:50] = 3
    labels[30:35, 5:9] = 256
    cv2.imwrite(str(tmp_path / "labels.png"), labels)
    found = requests._read_mask(tmp_path / "labels.png")
    assert found is not None
    assert np.array_equal(found.full(), labels > 0)
