"""Vocabularies from files, from vectors made elsewhere and from a text encoder, by the verbs that build them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sam3_node.cli.main import main
from sam3_node.detection.clip_text import ClipText
from sam3_node.detection.phrases import check_phrase_encoder
from sam3_node.detection.vocabulary import Vocabulary, build_vocabulary
from sam3_node.errors import VocabularyError
from tests.support.paths import SHARED
from tests.support.tiny_clip import CLIP, NAMES, vocabulary, write_tiny_clip

VECTORS = SHARED / "weights/vocabulary/clip_vit_b32_104.json"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "tiny-clip"
    write_tiny_clip(folder)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "names.safetensors"
    vocabulary(*NAMES).save(path)
    return path


def run(*arguments: object) -> int:
    return main(["vocabulary", *map(str, arguments)])


def test_building_takes_from_the_first_source_then_from_the_encoder(clip: Path) -> None:
    tower = ClipText(clip, model=CLIP)
    first = Vocabulary(("mug",), np.eye(1, 8, dtype=np.float32), CLIP)
    second = Vocabulary(("Mug", "cup"), np.eye(2, 8, 1, dtype=np.float32), CLIP)
    built = build_vocabulary(["fork", "cup", "MUG", "Fork "], [first, second], tower)
    assert (built.phrases, built.model) == (("fork", "cup", "MUG"), CLIP)
    np.testing.assert_array_equal(
        built.vectors, [tower.encode(["fork"])[0], second.vectors[1], first.vectors[0]]
    )
    assert build_vocabulary([], [first, second]).phrases == ("mug", "cup")
    assert build_vocabulary(["a", "b"], encoder=tower).phrases == ("a", "b")
    for arguments, told in (((["a"],), "found neither"), (([], (), tower), "found no phrases")):
        with pytest.raises(VocabularyError, match=told):
            build_vocabulary(*arguments)  # type: ignore[arg-type]


def test_the_verbs_build_and_list(
    clip: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines = tmp_path / "out.safetensors", tmp_path / "lines.txt"
    lines.write_text("\ufefffork\n\n  Red   mug \r\nbottle\n", encoding="utf-8")
    assert run("build", "bottle", "cup", "--phrases", lines, "--encoder", clip, "-o", out) == 0
    summary = f"{out}: 4 phrases, model tiny-clip, dimension 8\n"
    assert capsys.readouterr().out == summary
    assert run("list", out) == 0
    assert capsys.readouterr().out == f"{summary}bottle\ncup\nfork\nRed mug\n"
    alone = ClipText(clip).encode(["bottle"])
    np.testing.assert_allclose(Vocabulary.load(out).vectors[:1], alone, atol=1e-6)
    # extended in place, by another of the same model
    assert run("build", "ladle", "--encoder", clip, "--model", "tiny-clip", "-o", tmp_path / "more") == 0
    assert run("build", "--from", out, "--from", tmp_path / "more", "-o", out) == 0
    assert Vocabulary.load(out).phrases == ("bottle", "cup", "fork", "Red mug", "ladle")


def test_vectors_made_elsewhere_come_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, out = tmp_path / "made.json", tmp_path / "out.safetensors"
    made.write_text('{"red mug": [3, 4], "cup": [0.0, -2.5]}')
    assert run("build", "--from", made, "--model", CLIP, "-o", out) == 0
    found = Vocabulary.load(out)
    assert (found.phrases, found.model) == (("red mug", "cup"), CLIP)
    np.testing.assert_allclose(found.vectors, [[0.6, 0.8], [0, -1]], atol=1e-7)
    assert run("build", "--from", made, "-o", out) == 2
    assert f"--model {CLIP}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a JSON map from phrases"),
        ("[1, 2]", "found a list"),
        ("{}", "found values of dtype float64, shape [0]"),
        ('{"mug": [1, 2], "cup": [1]}', "expected a JSON map"),
        ('{"mug": ["1", "2"]}', "found values of dtype <U1"),
        ('{"mug": {"x": 1}}', "expected a JSON map"),
        ('{"mug": 3}', "shape [1]"),
        ('{"mug": [null]}', "dtype object"),
        ('{"mug": [true]}', "dtype bool"),
        ('{"mug": [1e999, 1]}', "row 0 is not finite"),
        ('{"mug": [NaN, 1]}', "row 0 is not finite"),
        ('{"mug": [1' + "0" * 400 + "]}", "dtype object"),
        ('{"mug": [1, 2], "Mug": [1, 3]}', "each phrase once"),
        ('{"mug": [1, 2], "mug": [1, 3]}', "each phrase once"),
        ("[" * 100_000, "expected a JSON map"),
        ("\udcff", "expected a JSON map"),
    ],
)
def test_a_json_that_is_no_map_of_vectors_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    made = tmp_path / "made.json"
    made.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert run("build", "--from", made, "--model", CLIP, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("sam3-node: error: ")
    assert str(made) in error
    assert told in error
    assert not (tmp_path / "out").exists()


def wrong_builds(file: Path, clip: Path) -> Iterator[tuple[tuple[object, ...], str]]:
    yield ("red mug", "--from", file), "'red mug' (nearest: 'mug', 'red cup')"
    yield ("fork",), "expected phrases and a text encoder"
    yield ("--encoder", clip), "found no phrases"
    yield ("", "--from", file), "found an empty one"
    yield ("mug", "--from", "nowhere"), "cannot read nowhere"
    yield ("mug", "--from", "nowhere.json", "--model", CLIP), "cannot read nowhere.json"
    yield ("--phrases", "nowhere.txt", "--from", file), "cannot read nowhere.txt"
    yield ("mug", "--encoder", "nowhere"), "no folder nowhere"
    yield (
        ("mug", "--from", file, "--model", "laion/other"),
        f"expected phrase vectors from laion/other, found vectors from {CLIP}",
    )
    yield ("mug", "--from", file, "--encoder", clip), "vectors of 6 numbers"


def test_what_cannot_be_built_is_told_in_a_line_and_nothing_is_written(
    clip: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in wrong_builds(file, clip):
        assert run("build", *arguments, "-o", tmp_path / "out") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("sam3-node: error: ")
        assert told in line
        assert not (tmp_path / "out").exists()
    assert run("build", "mug", "--from", file, "-o", tmp_path) == 2
    assert f"cannot write {tmp_path}" in capsys.readouterr().err
    assert run("list", tmp_path / "nowhere") == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.skipif(not VECTORS.exists(), reason="needs vectors of the public text encoder")
def test_public_vectors_become_a_vocabulary(tmp_path: Path) -> None:
    out = tmp_path / "names.safetensors"
    assert run("build", "--from", VECTORS, "--model", CLIP, "-o", out) == 0
    found = Vocabulary.load(out)
    check_phrase_encoder(found, 512, CLIP)
    vectors = found.encode(["person", "dog", "cat", "car"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    similar = vectors @ vectors.T
    assert similar[1, 2] > max(
        similar[1, 3], similar[2, 3]
    )  # a dog is more like a cat than either is like a car
