"""Phrases: cleaned, bounded, compared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3_node.detection import phrases
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import RequestError
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.tiny_clip import CLIP, NAMES, vocabulary


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("mug", "mug"),
        ("  Red \t\n mug ", "Red mug"),
        ("cafe\u0301", "caf\u00e9"),
        ("x" * phrases.MAX_CHARACTERS, "x" * phrases.MAX_CHARACTERS),
        ("\u0645\u06cc\u200c\u0632", "\u0645\u06cc\u200c\u0632"),  # a joiner that Persian needs
    ],
)
def test_a_phrase_is_cleaned(given: str, cleaned: str) -> None:
    assert phrases.clean_phrase(given) == cleaned


@given(st.text(max_size=phrases.MAX_CHARACTERS))
def test_cleaning_is_idempotent_or_refuses(phrase: str) -> None:
    try:
        cleaned = phrases.clean_phrase(phrase)
    except RequestError:
        return
    assert phrases.clean_phrase(cleaned) == cleaned
    assert Vocabulary((cleaned,), np.ones((1, 2), np.float32), CLIP).encode([f" {phrase}\n"]).shape == (1, 2)


@each_row(
    ("phrase", "told"),
    [
        ("", "found an empty one"),
        (" \t\n", "found an empty one"),
        ("x" * 10_000, "at most 200 characters, found 10000"),
        ("red\x00mug", r"no control characters, found 'red\\x00mug'"),
        ("\ud800", "no control characters"),
        ("mug\x1b[2J", r"no control characters, found 'mug\\x1b\[2J'"),
        ("mug\u202egum", "no control characters"),
        ("m\u200bug", "no control characters"),
        (7, "expected text, found int"),
        (None, "expected text, found NoneType"),
        (b"mug", "expected text, found bytes"),
    ],
)
def test_what_is_no_phrase_is_refused(phrase: object, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        phrases.clean_prompts(["mug", phrase])
    assert len(str(caught.value)) < 300
    with pytest.raises(RequestError, match=told):
        vocabulary("mug").encode(["mug", phrase])  # type: ignore[list-item]
    assert phrase not in vocabulary("mug")


def test_prompts_keep_their_order_and_the_first_of_equals() -> None:
    assert phrases.clean_prompts(["Red mug", "bottle", "red  MUG", "bottle"]) == ("Red mug", "bottle")
    assert phrases.clean_prompts([]) == ()


def test_too_many_prompts_are_refused() -> None:
    most = tuple(f"thing {index}" for index in range(phrases.MAX_PROMPTS))
    assert phrases.clean_prompts(most) == most
    with refuses(RequestError, field=("256", "1000")):
        phrases.clean_prompts(["mug"] * 1000)
    with refuses(RequestError, field=("phrases", "str")):
        phrases.clean_prompts("mug")


@pytest.mark.parametrize(
    ("phrase", "nearest"),
    [
        ("red mug", ["mug", "red cup"]),
        ("botle", ["bottle"]),
        ("BOTTLES", ["bottle"]),
        ("spoon of wood", ["wooden spoon"]),
        ("xyz", []),
    ],
)
def test_the_nearest_phrases_are_those_spelt_alike(phrase: str, nearest: list[str]) -> None:
    assert phrases.nearest_phrases(phrase, NAMES) == nearest
