"""The door to detectors: every kind, and where phrases have their vectors from."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.detection import loading
from sam3_node.detection.loading import load_detector
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import ModelError, RequestError, UnknownPhraseError, VocabularyError
from sam3_node.models.yolo.network import YoloWorld, save_yolo_world
from tests.support.refuses import refuses
from tests.support.tiny_clip import vocabulary, write_tiny_clip
from tests.support.tiny_detectors import QUERIES, picture, vary, write_tiny_grounding_dino, write_tiny_sam3
from tests.support.tiny_yolo import TINY

DIMENSION = 8  # of tiny_clip's vectors
CLIP_NAME = "tiny-clip"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YOLO-World without a vocabulary, beside the other kinds of files."""
    root = tmp_path_factory.mktemp("weights")
    write_tiny_yolo(root / "tiny-yolo")
    write_tiny_clip(root / CLIP_NAME)
    names().save(root / "names.safetensors")
    return root


def write_tiny_yolo(folder: Path) -> None:
    torch.manual_seed(0)
    model = YoloWorld(dataclasses.replace(TINY, text_channels=DIMENSION)).eval()
    vary(model)
    save_yolo_world(model, folder)


def names(dimension: int = DIMENSION) -> Vocabulary:
    return vocabulary("mug", "red cup", model=CLIP_NAME, dimension=dimension)


def test_a_vocabulary_knows_its_phrases_alone(weights: Path) -> None:
    mine = load_detector("yolo-world", weights / "tiny-yolo", vocabulary=weights / "names.safetensors")
    assert mine.name == "tiny-yolo"
    assert mine.detect(picture(), mine.prepare(["Red Cup"]), 0.0)[0].label == "Red Cup"
    with pytest.raises(UnknownPhraseError, match="'fork'"):
        mine.prepare(["mug", "fork"])


def test_a_text_encoder_knows_all_phrases(weights: Path) -> None:
    mine = load_detector("yolo-world", str(weights / "tiny-yolo"), text_encoder=weights / CLIP_NAME)
    assert mine.detect(picture(), mine.prepare(["fork"]), 0.0)[0].label == "fork"


def test_the_vocabulary_comes_before_the_text_encoder(weights: Path) -> None:
    sources = {"vocabulary": weights / "names.safetensors", "text_encoder": weights / CLIP_NAME}
    both = load_detector("yolo-world", weights / "tiny-yolo", **sources)
    vectors = both.prepare(["mug", "fork"]).vectors.numpy()
    np.testing.assert_array_equal(vectors[0], names().encode(["mug"])[0])
    assert both.prepare(["fork"]).vectors.shape == (1, DIMENSION)


def test_the_vocabulary_beside_the_weights_is_taken_where_none_is_named(tmp_path: Path) -> None:
    write_tiny_yolo(tmp_path)
    with refuses(VocabularyError, field=("detector.vocabulary", "CLIP")):
        load_detector("yolo-world", tmp_path)
    names().save(tmp_path / "vocabulary.safetensors")
    assert load_detector("yolo-world", tmp_path).prepare(["mug"]).phrases == ("mug",)
    (tmp_path / "vocabulary.safetensors").write_bytes(b"nothing")
    with pytest.raises(VocabularyError, match=r"cannot read .*vocabulary\.safetensors"):
        load_detector("yolo-world", tmp_path)


def test_a_vocabulary_of_another_model_is_refused(weights: Path, tmp_path: Path) -> None:
    names(6).save(tmp_path / "other.safetensors")
    with refuses(VocabularyError, field=("8", "6", "numbers")):
        load_detector("yolo-world", weights / "tiny-yolo", vocabulary=tmp_path / "other.safetensors")
    vocabulary("mug", dimension=DIMENSION, model="another").save(tmp_path / "other.safetensors")
    sources = {"vocabulary": tmp_path / "other.safetensors", "text_encoder": weights / CLIP_NAME}
    with refuses(VocabularyError, field=("vectors", "tiny-clip")):
        load_detector("yolo-world", weights / "tiny-yolo", **sources)


def test_the_input_has_the_size_that_is_asked_for(weights: Path) -> None:
    def load(size: int) -> Any:
        folder = weights / "tiny-yolo"
        known = weights / "names.safetensors"
        return load_detector("yolo-world", folder, vocabulary=known, image_size=size)

    small, public, default = (d.detect(picture(), d.prepare(["mug"]), 0.0) for d in map(load, (64, 640, 0)))
    assert small != public
    assert public == default
    with refuses(ModelError, field=("32", "multiples")):
        load(100)


def test_nano_is_the_bundled_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "NANO", tmp_path / "nano")
    with refuses(ModelError, field=("bundled", "detector")):
        load_detector("yolo-world")
    write_tiny_yolo(tmp_path / "nano")
    names().save(tmp_path / "nano/vocabulary.safetensors")
    bundled = load_detector("yolo-world")
    assert bundled.name == "nano"
    same = load_detector("yolo-world", tmp_path / "nano")
    query = bundled.prepare(["mug"])
    assert bundled.detect(picture(), query, 0.1) == same.detect(picture(), query, 0.1)


@pytest.mark.parametrize("damage", ["absent", "truncated", "another file", "no config"])
def test_damaged_weights_are_clear_errors(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "weights"
    if damage != "absent":
        write_tiny_yolo(folder)
        names().save(folder / "vocabulary.safetensors")
    file = folder / "model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "another file":
        file.with_name("model.safetensors.sha256").unlink()
        file.write_bytes((folder / "vocabulary.safetensors").read_bytes())
    elif damage == "no config":
        (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=str(folder)):
        load_detector("yolo-world", folder)


OTHERS: dict[str, tuple[Callable[[Path], object], int, tuple[str, ...]]] = {
    "sam3-concept": (write_tiny_sam3, 0, ("tokenizer.json", "vocab.json", "merges.txt")),
    "grounding-dino": (write_tiny_grounding_dino, QUERIES // 2, ("tokenizer.json", "vocab.txt")),
}


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A kind that reads phrases itself, and its weights."""
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    OTHERS[request.param][0](folder)
    return request.param, folder


@pytest.mark.parametrize("size", [(1, 1), (1, 480), (480, 1), (37, 641), (64, 64), (112, 112)])
def test_a_frame_of_any_size_will_do(other: tuple[str, Path], size: tuple[int, int]) -> None:
    mine = load_detector(*other)
    height, width = size
    found = mine.detect(picture(*size), mine.prepare(["red mug", "a bottle", "spoon"]), 0.0)
    assert len(found) > OTHERS[other[0]][1]
    for x0, y0, x1, y1 in (d.box for d in found):
        assert 0 <= x0 < x1 <= width
        assert 0 <= y0 < y1 <= height


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_and_absent_files_are_clear_errors(
    other: tuple[str, Path], tmp_path: Path, file: str
) -> None:
    kind, folder = other
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    for length in (1000, 500):
        (broken / file).write_bytes((folder / file).read_bytes()[:length])
        with refuses(ModelError, field=str(broken)):
            load_detector(kind, broken)
    (broken / file).unlink()
    with refuses(ModelError, field=OTHERS[kind][2] if file == "tokenizer.json" else str(broken)):
        load_detector(kind, broken)
    with refuses(ModelError, field="folder"):
        load_detector(kind, tmp_path / "nowhere")


def test_the_others_read_phrases_themselves(weights: Path, other: tuple[str, Path]) -> None:
    kind, folder = other
    mine = load_detector(kind, folder)
    assert mine.name == "tiny"
    found = mine.detect(picture(), mine.prepare(["red mug", "spoon"]), 0.0)
    assert {d.label for d in found} <= {"red mug", "spoon"}
    assert found
    for option in ({"vocabulary": weights / "names.safetensors"}, {"text_encoder": weights / CLIP_NAME}):
        with refuses(VocabularyError, field=str(kind)):
            load_detector(kind, folder, **option)
    with pytest.raises(RequestError):
        mine.prepare(["a" * 199])
    with refuses(ModelError, field=str(kind)):
        load_detector(kind)


def test_only_grounding_dino_takes_a_text_score(other: tuple[str, Path]) -> None:
    kind, folder = other
    if kind == "grounding-dino":
        mine = load_detector(kind, folder, text_score=0.999)
        assert not mine.detect(picture(), mine.prepare(["red mug"]), 0.0)
        return
    for unable in (kind, "yolo-world"):
        with refuses(ModelError, field=("detector.text_score", unable)):
            load_detector(unable, folder, text_score=0.1)


def test_an_unknown_kind_is_refused() -> None:
    with refuses(ModelError, field=("sam3-concept", "yolo")):
        load_detector("yolo")


def test_the_door_is_light() -> None:
    code = "import sys, sam3_node.detection.detectors; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_misspelt_kinds_weights_and_vocabularies_are_answered_with_the_nearest(
    weights: Path, tmp_path: Path
) -> None:
    with refuses(ModelError, field=("mean", "yolo-world")):
        load_detector("yoloworld")
    with refuses(ModelError, field=("mean", "nano")):
        load_detector("yolo-world", "nanoo")
    with refuses(ModelError, field=("you", "mean")):
        load_detector("yolo-world", weights / "tiny-yol")
    with refuses(VocabularyError, field=("you", "mean")):
        Vocabulary.load(weights / "name.safetensors")
