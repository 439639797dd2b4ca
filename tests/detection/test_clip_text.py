"""CLIP's text tower against transformers' own, alone and behind a vocabulary."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import CLIPModel, CLIPTextModelWithProjection, CLIPTokenizer

from sam3_node.detection.clip_text import ClipText
from sam3_node.detection.phrases import check_phrase_encoder
from sam3_node.detection.vocabulary import Vocabulary, VocabularyWithFallback
from sam3_node.errors import RequestError, VocabularyError
from tests.support.refuses import refuses
from tests.support.tiny_clip import CLIP, LETTERS, TOKENS, vocabulary, write_tiny_clip


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "tiny-clip"
    write_tiny_clip(folder)
    return folder


def copied(folder: Path, target: Path, leave_out: str = "") -> Path:
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns(leave_out)))


def reference(folder: Path, texts: list[str]) -> np.ndarray:
    """Encode one text at a time with transformers' whole model and tokenizer."""
    model = CLIPModel.from_pretrained(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    rows = []
    with torch.inference_mode():
        for text in texts:
            found = model.get_text_features(**tokenizer([text], return_tensors="pt"))
            rows.append(torch.nn.functional.normalize(found.pooler_output, dim=-1)[0].numpy())
    return np.stack(rows)


def test_the_tower_encodes_the_bare_phrase(clip: Path) -> None:
    encoder = ClipText(clip)
    assert (encoder.model, encoder.dimension) == ("tiny-clip", 8)
    names = ["red mug", "cup", "wooden spoon"]
    found = encoder.encode(["Red  mug", "cup", " wooden spoon", "CUP"])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference(clip, [*names, "cup"]), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert abs(found[0] @ found[1]) < 0.999
    assert encoder.encode([]).shape == (0, 8)


def test_many_phrases_come_in_order_and_the_memory_of_them_is_bounded(clip: Path) -> None:
    names = [f"{first}{second}" for first in LETTERS[:10] for second in LETTERS[:9]]
    encoder = ClipText(clip, cached=3)
    found = encoder.encode(names)
    some = [0, 63, 64, 89]
    np.testing.assert_allclose(found[some], reference(clip, [names[i] for i in some]), atol=1e-6)
    np.testing.assert_array_equal(encoder.encode(names[-3:]), found[-3:])
    np.testing.assert_allclose(encoder.encode(names[::-1]), found[::-1], atol=1e-6)


def test_phrases_that_are_remembered_are_not_encoded_again(clip: Path) -> None:
    encoder = ClipText(clip, cached=2)
    runs = []
    encoder._tower.register_forward_hook(lambda *_: runs.append(1))
    steps = (["mug", "cup"], ["cup", "MUG"], ["mug"], ["fork"], ["mug", "fork"], ["cup"])
    for phrases, expected in zip(steps, (1, 1, 1, 2, 2, 3), strict=True):
        encoder.encode(phrases)
        assert len(runs) == expected, phrases


def test_too_many_tokens_are_refused(clip: Path) -> None:
    encoder = ClipText(clip)
    assert encoder.encode(["a" * (TOKENS - 2)]).shape == (1, 8)
    with refuses(RequestError, field=(str(TOKENS), str(TOKENS + 1))):
        encoder.encode(["mug", "a" * (TOKENS - 1)])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_says_which(clip: Path, tmp_path: Path, name: str) -> None:
    folder = copied(clip, tmp_path / "clip", leave_out=name)
    lacking = ("vocab.json", "merges.txt") if name == "tokenizer.json" else name
    with refuses(VocabularyError, field=lacking):
        ClipText(folder)


def test_a_folder_without_a_text_tower_is_refused(clip: Path, tmp_path: Path) -> None:
    with refuses(VocabularyError, field="CLIP"):
        ClipText(tmp_path / "nowhere")
    folder = copied(clip, tmp_path / "clip")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with refuses(VocabularyError, field="CLIP"):
        ClipText(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"other": np.eye(2, dtype=np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    with refuses(VocabularyError, field="CLIP"):
        ClipText(folder)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        broken = copied(clip, tmp_path / f"broken-{name}")
        (broken / name).write_bytes(b"{ nothing")
        with refuses(VocabularyError, field="CLIP"):
            ClipText(broken)


def test_weights_that_are_not_numbers_are_told(clip: Path, tmp_path: Path) -> None:
    folder = copied(clip, tmp_path / "clip")
    tower = CLIPTextModelWithProjection.from_pretrained(folder)
    with torch.no_grad():
        tower.text_projection.weight.fill_(torch.nan)
    tower.save_pretrained(folder)
    with refuses(VocabularyError, field=("unusable", "vectors")):
        ClipText(folder).encode(["mug"])


def test_the_vocabulary_comes_before_the_tower(clip: Path) -> None:
    tower = ClipText(clip, model=CLIP)
    known = Vocabulary(("mug", "cup"), np.eye(2, 8, dtype=np.float32), CLIP)
    both = VocabularyWithFallback(known, tower)
    assert (both.model, both.dimension) == (CLIP, 8)
    found = both.encode(["fork", "CUP", "spoon", "mug"])
    np.testing.assert_array_equal(found[[1, 3]], known.vectors[[1, 0]])
    np.testing.assert_array_equal(found[[0, 2]], tower.encode(["fork", "spoon"]))
    assert both.encode([]).shape == (0, 8)
    with pytest.raises(RequestError, match="empty"):
        both.encode(["mug", ""])
    with pytest.raises(VocabularyError, match="8 from"):
        VocabularyWithFallback(vocabulary("mug"), tower)


def test_an_encoder_fits_a_detector_by_dimension_and_model() -> None:
    known = vocabulary("mug")
    check_phrase_encoder(known, 6)
    check_phrase_encoder(known, 6, "/weights/clip-vit-base-patch32/")
    with refuses(VocabularyError, field=str(CLIP)):
        check_phrase_encoder(known, 512)
    with refuses(VocabularyError, field="laion/other"):
        check_phrase_encoder(known, 6, "laion/other")
