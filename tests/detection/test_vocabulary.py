"""Vocabularies: read, written, built, and what they refuse."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save_file

from sam3_node.cli.main import main
from sam3_node.detection.clip_text import ClipText
from sam3_node.detection.phrases import check_phrase_encoder
from sam3_node.detection.vocabulary import (
    Vocabulary,
    VocabularyWithFallback,
    build_vocabulary,
    find_contrasts,
    list_known,
)
from sam3_node.errors import OutputError, UnknownPhraseError, VocabularyError
from tests.support.paths import SHARED
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.tiny_clip import CLIP, NAMES, vocabulary, write_tiny_clip

GOOD = {"version": "1", "model": CLIP, "phrases": json.dumps(["mug", "cup"])}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "names.safetensors"
    vocabulary(*NAMES).save(path)
    return path


def test_lookup_is_by_whatever_case_and_white_space() -> None:
    known = vocabulary("Red mug", "bottle")
    found = known.encode(["bottle", " red  MUG ", "bottle"])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, known.vectors[[1, 0, 1]])
    assert known.encode([]).shape == (0, 6)
    assert known.phrases == ("Red mug", "bottle")
    assert "RED MUG" in known
    assert "mug" not in known


def test_an_unknown_phrase_tells_the_nearest_known_ones() -> None:
    with pytest.raises(UnknownPhraseError) as caught:
        vocabulary(*NAMES).encode(["red mug", "mug", "xyz", "q1", "q2"])
    assert caught.value.code == "unknown_phrase"
    assert str(caught.value) == (
        "not among the 4 phrases of the vocabulary: 'red mug' (nearest: 'mug', 'red cup'), 'xyz' (nearest: none), "
        "'q1' (nearest: none) and 1 more; choose one of them, or build a vocabulary with it: "
        "`sam3-node vocabulary build PHRASE … --encoder FOLDER -o FILE`"
    )


def test_the_contrasts_of_a_phrase_differ_by_its_look_or_by_the_thing() -> None:
    coloured = "red mug", "blue mug", "red can", "red object"
    phrases = (*coloured, "mug", "can", "object", "big red mug", "red tin")
    vectors = np.random.default_rng(1).normal(size=(len(phrases), 64)).astype(np.float32)
    vectors[-1] = vectors[2]  # a synonym
    known = Vocabulary(phrases, vectors, CLIP)

    def named(phrase: str) -> tuple[set[str], set[str]]:
        looks, things = known.contrasts(phrase)
        return {phrases[row] for row in looks}, {phrases[row] for row in things}

    assert named("RED mug") == ({"blue mug"}, {"red can", "red tin"})
    assert named("red can") == (set(), {"red mug"})
    assert named("mug") == (set(), {"can"})
    assert named("red object") == (set(), set())
    assert named("object") == (set(), set())
    found = find_contrasts(known, ["red mug", "object"])
    assert found.shape == (2, 2, 2, 64)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[0, 0, 0], known.vectors[1])


def test_a_vocabulary_cannot_be_changed() -> None:
    given = np.eye(2, dtype=np.float32)
    known = Vocabulary(("mug", "cup"), given, CLIP)
    given[:] = 7
    known.encode(["mug"])[:] = 7
    np.testing.assert_array_equal(known.vectors, np.eye(2))
    with refuses(ValueError, field="read-only"):
        known.vectors[0, 0] = 7


SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 9))
NUMBERS = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)


@given(arrays(np.float32, SHAPES, elements=NUMBERS))
def test_vectors_get_unit_length_and_files_keep_every_bit(
    tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray
) -> None:
    vectors[:, 0] += ~vectors.any(axis=1)
    known = Vocabulary(tuple(f"thing {row}" for row in range(len(vectors))), vectors, CLIP)
    exact = vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(known.vectors, exact, atol=2e-6)
    path = tmp_path_factory.getbasetemp() / "roundtrip.safetensors"
    known.save(path)
    again = Vocabulary.load(path)
    assert (again.phrases, again.model) == (known.phrases, known.model)
    assert again.vectors.dtype == np.float32
    np.testing.assert_array_equal(again.vectors, known.vectors)


@each_row(
    ("phrases", "vectors", "model", "told"),
    [
        ((), np.zeros((0, 3)), CLIP, ("0", "3", "shape")),
        (("mug",), np.ones(3), CLIP, ("1", "3", "shape")),
        (("mug",), np.ones((2, 3)), CLIP, ("1", "2", "3", "shape")),
        (("mug",), np.ones((1, 0)), CLIP, ("1", "0", "shape")),
        (("mug", "cup"), [[1, 2], [0, 0]], CLIP, ("1", "zero")),
        (("mug", "cup"), [[1, 2], [np.nan, 0]], CLIP, ("1", "finite")),
        (("mug", "cup"), [[1, np.inf], [1, 0]], CLIP, ("0", "finite")),
        (("mug", "cup"), [[1e300, 1], [1, 0]], CLIP, ("0", "finite")),
        (("mug", "mug"), np.eye(2), CLIP, "mug"),
        (("mug", " MUG"), np.eye(2), CLIP, ("mug", "MUG")),
        (("mug", ""), np.eye(2), CLIP, "empty"),
        (("mug", 3), np.eye(2), CLIP, ("text", "int")),
        (("mug",), np.eye(1), " ", ("name", "model")),
    ],
)
def test_what_is_no_vocabulary_is_refused(
    phrases: tuple, vectors: object, model: str, told: str | tuple[str, ...]
) -> None:
    with refuses(VocabularyError, field=told):
        Vocabulary(phrases, vectors, model)  # type: ignore[arg-type]


EYE = {"vectors": np.eye(2, dtype=np.float32)}


@each_row(
    ("tensors", "metadata", "told"),
    [
        (EYE, None, ("1", "version")),
        (EYE, GOOD | {"version": "2"}, ("1", "2", "version")),
        ({"weights": EYE["vectors"]}, GOOD, "vectors"),
        ({"vectors": np.eye(2, dtype=np.float16)}, GOOD, ("F32", "F16")),
        ({"vectors": np.eye(2, dtype=np.int64)}, GOOD, ("F32", "I64")),
        ({"vectors": np.eye(3, dtype=np.float32)}, GOOD, ("2", "3", "shape")),
        ({"vectors": np.ones((2, 2, 2), np.float32)}, GOOD, ("2", "shape")),
        ({"vectors": np.full((2, 2), np.nan, np.float32)}, GOOD, ("0", "finite")),
        *(
            (EYE, GOOD | {"phrases": text}, ("JSON", "phrases"))
            for text in ("mug, cup", "[" * 100_000, '{"mug": 1}')
        ),
        (EYE, GOOD | {"phrases": '["a", "A"]'}, ("phrase", "once")),
        (EYE, GOOD | {"phrases": '["a", null]'}, "text"),
        (EYE, {"version": "1", "phrases": '["a", "b"]'}, ("name", "model")),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, tensors: dict, metadata: dict | None, told: str | tuple[str, ...]
) -> None:
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path, metadata=metadata)
    with refuses(VocabularyError, field=told):
        Vocabulary.load(path)


def test_a_file_that_is_none_or_damaged_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for content in (b"", b"{}", whole[:-1], whole[:40], b"\xff" * 64):
        file.write_bytes(content)
        with refuses(VocabularyError, field="names.safetensors"):
            Vocabulary.load(file)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(VocabularyError, match="cannot read"):
            Vocabulary.load(path)


def test_saving_replaces_a_file_whole_or_not_at_all(file: Path, tmp_path: Path) -> None:
    vocabulary("cup").save(file)
    assert Vocabulary.load(file).phrases == ("cup",)
    (tmp_path / "folder").mkdir()
    vocabulary("mug").save(tmp_path / "new" / "names")
    for path in (tmp_path / "folder", file / "names", Path("/")):
        with refuses(OutputError, field="write"):
            vocabulary("mug").save(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", file.name, "new"]


def test_loading_needs_no_torch(file: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from sam3_node.cli.main import main\n"
        f"sys.exit(main(['vocabulary', 'build', 'mug', '--from', {str(file)!r}, '-o', {str(file)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Vocabulary.load(file).phrases == ("mug",)


def test_a_vocabulary_extended_keeps_its_own_vectors() -> None:
    known = vocabulary("mug", "cup")
    other = Vocabulary(("CUP", "fork"), np.eye(2, 6, dtype=np.float32), CLIP)
    both = known.extended(other)
    assert both.phrases == ("mug", "cup", "fork")
    np.testing.assert_array_equal(both.encode(["cup", "fork"]), [known.vectors[1], other.vectors[1]])
    assert known.phrases == ("mug", "cup")
    with refuses(VocabularyError, field=str(CLIP)):
        known.extended(vocabulary("fork", model="other"))


VECTORS = SHARED / "weights/vocabulary/clip_vit_b32_104.json"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "tiny-clip"
    write_tiny_clip(folder)
    return folder


def run(*arguments: object) -> int:
    return main(["vocabulary", *map(str, arguments)])


def test_building_takes_from_the_first_source_then_from_the_encoder(clip: Path) -> None:
    tower = ClipText(clip, model=CLIP)
    first = Vocabulary(("mug",), np.eye(1, 8, dtype=np.float32), CLIP)
    second = Vocabulary(("Mug", "cup"), np.eye(2, 8, 1, dtype=np.float32), CLIP)
    built = build_vocabulary(["fork", "cup", "MUG", "Fork "], [first, second], tower)
    assert (built.phrases, built.model) == (("fork", "cup", "MUG"), CLIP)
    expected = [tower.encode(["fork"])[0], second.vectors[1], first.vectors[0]]
    np.testing.assert_array_equal(built.vectors, expected)
    assert build_vocabulary([], [first, second]).phrases == ("mug", "cup")
    assert build_vocabulary(["a", "b"], encoder=tower).phrases == ("a", "b")
    assert list_known(first) == (("mug",), False)
    # an encoder takes any name, so that a list is of those that need none
    assert list_known(VocabularyWithFallback(first, tower)) == (("mug",), True)
    assert list_known(tower) == ((), True)
    for arguments, told in (((["a"],), "found neither"), (([], (), tower), "found no phrases")):
        with pytest.raises(VocabularyError, match=told):
            build_vocabulary(*arguments)  # type: ignore[arg-type]


def test_the_verbs_build_and_list(
    clip: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    lines = tmp_path / "lines.txt"
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
    made = tmp_path / "made.json"
    out = tmp_path / "out.safetensors"
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
    other = f"expected phrase vectors from laion/other, found vectors from {CLIP}"
    yield ("mug", "--from", file, "--model", "laion/other"), other
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
    # a dog is more like a cat than either is like a car
    assert similar[1, 2] > max(similar[1, 3], similar[2, 3])
