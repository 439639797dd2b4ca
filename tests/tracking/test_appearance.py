"""Embeddings of objects: of the same thing alike, of other things not, a bounded number of each."""

import numpy as np
import pytest
import torch

from sam3_node.tracking.appearance import (
    COLOURS,
    MAX_EMBEDDINGS,
    NEW_EMBEDDING,
    Gallery,
    describe_colours,
    describe_features,
    make_embeddings,
)
from sam3_node.types import Mask


def make_embedding(seed: int) -> torch.Tensor:
    """Return an embedding of random directions: two of them are nearly at right angles."""
    halves = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(halves, dim=1).flatten()


def square(x: int, y: int, side: int) -> Mask:
    inside = np.zeros((60, 80), bool)
    inside[y : y + side, x : x + side] = True
    return Mask.from_full(inside)


def test_features_are_those_under_the_mask_less_those_beside_it() -> None:
    top = torch.zeros(1, 4, 8, 8)
    top[0, 3] = 5.0  # what the whole picture has in common
    top[0, 0, :4] = 1.0
    top[0, 1, 4:] = 1.0
    logits = torch.full((2, 32, 32), -1.0)
    logits[0, :8] = 1.0
    logits[1, 24:] = 1.0
    first, second = describe_features(top, logits)
    assert first.norm() == pytest.approx(1.0)
    assert first[3] == pytest.approx(0.0, abs=1e-6)
    assert first[0] > 0.5 > second[0]
    assert float(first @ second) < 0


def test_an_empty_mask_has_features_too() -> None:
    found = describe_features(torch.ones(1, 4, 8, 8), torch.full((1, 32, 32), -1.0))
    assert found.isfinite().all()


def test_the_same_colours_have_a_product_of_one_and_others_none() -> None:
    image = np.zeros((60, 80, 3), np.uint8)
    image[:, :40] = (40, 40, 200)
    image[:, 40:] = (200, 60, 30)
    red, red_too, blue = (describe_colours(image, square(x, 10, 20)) for x in (5, 12, 50))
    assert red.shape == (COLOURS,)
    assert float(red @ red_too) == pytest.approx(1.0)
    assert float(red @ blue) == pytest.approx(0.0)


@pytest.mark.parametrize("shape", [(60, 80), (60, 80, 3)])
def test_grey_and_colour_have_the_same_description(shape: tuple[int, ...]) -> None:
    image = np.full(shape, 90, np.uint8)
    assert float(describe_colours(image, square(0, 0, 1)).norm()) == pytest.approx(1.0)


def test_a_gallery_keeps_embeddings_that_differ_up_to_its_limit() -> None:
    gallery = Gallery()
    assert gallery.compare(make_embedding(0)[None]).tolist() == [-2.0]
    gallery.add(make_embedding(0))
    gallery.add(make_embedding(0))
    assert len(gallery) == 1
    for seed in range(1, 3 * MAX_EMBEDDINGS):
        gallery.add(make_embedding(seed))
    assert len(gallery) == MAX_EMBEDDINGS
    newest = make_embedding(3 * MAX_EMBEDDINGS - 1)
    assert gallery.compare(newest[None])[0] >= NEW_EMBEDDING


def test_of_two_embeddings_alike_the_older_one_makes_room() -> None:
    gallery = Gallery()
    twin = torch.nn.functional.normalize(
        (make_embedding(0) + 0.6 * make_embedding(99)).reshape(2, -1), dim=1
    ).flatten()
    for each in (
        make_embedding(0),
        *map(make_embedding, range(1, MAX_EMBEDDINGS - 1)),
        twin,
        make_embedding(50),
    ):
        gallery.add(each)
    assert len(gallery) == MAX_EMBEDDINGS
    assert gallery.compare(twin[None])[0] == pytest.approx(2.0, abs=1e-5)
    assert gallery.compare(make_embedding(0)[None])[0] < NEW_EMBEDDING


def test_embeddings_of_other_features_are_not_compared() -> None:
    gallery = Gallery(make_embedding(0)[None])
    assert gallery.compare(torch.ones(2, 5)).tolist() == [-2.0, -2.0]
    gallery.add(torch.ones(5))
    assert gallery.embeddings.shape == (1, 5)


@pytest.mark.parametrize(
    "embeddings",
    [
        torch.zeros(3),
        torch.zeros(MAX_EMBEDDINGS + 1, 4),
        torch.full((1, 4), float("nan")),
        torch.zeros(1, 4, dtype=torch.float64),
    ],
    ids=["no list", "too many", "not a number", "other numbers"],
)
def test_a_saved_gallery_that_cannot_be_one_is_refused(embeddings: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="embeddings"):
        Gallery(embeddings)


def test_halves_make_embeddings() -> None:
    features = torch.eye(2)
    embeddings = make_embeddings(features, [torch.zeros(COLOURS), torch.ones(COLOURS)])
    assert embeddings.shape == (2, 2 + COLOURS)
