"""Families of weights, and what their models declare."""

import pytest

from sam3_node.errors import ModelError
from sam3_node.models import registry
from sam3_node.models.capabilities import Capabilities
from sam3_node.models.family import Family, TransformersWeights
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model


def test_each_model_type_belongs_to_one_family() -> None:
    kinds = [
        kind
        for family in registry.FAMILIES
        if isinstance(family.weights, TransformersWeights)
        for kind in family.weights.kinds
    ]
    assert sorted(kinds) == sorted(registry.KINDS)
    assert len({family.title for family in registry.FAMILIES}) == len(registry.FAMILIES)


@pytest.mark.parametrize(
    ("name", "title"), [("facebook/sam3.1", "SAM 3.1"), ("facebook/sam3", ""), ("nano", ""), ("absent", "")]
)
def test_only_weights_in_a_layout_of_their_own_have_a_family_before_they_are_read(
    name: str, title: str
) -> None:
    family = registry.find_family(name)
    assert (family.title if family else "") == title


def test_a_model_of_no_family_is_refused() -> None:
    with refuses(ModelError, field=("sam2_video", "bert")):
        registry.find_reader("bert", "weights")


def test_families_name_what_the_hub_gates() -> None:
    gated = {
        family.hub_name for family in registry.FAMILIES if isinstance(family, Family) and family.is_gated
    }
    assert gated == {"facebook/sam3", "facebook/sam3.1"}


@pytest.mark.parametrize(
    ("capabilities", "engines", "windows"),
    [
        (Capabilities(), None, None),
        (Capabilities(following="group memories", slots=16), None, "one memory for many objects"),
        (Capabilities(following="last masks"), "no memory modules", "no memory"),
    ],
)
def test_a_model_says_why_it_cannot(
    capabilities: Capabilities, engines: str | None, windows: str | None
) -> None:
    found = capabilities.why_not_engines(), capabilities.why_not_crops()
    for expected, reason in zip((engines, windows), found, strict=True):
        assert (expected is None) == (reason is None)
        assert expected is None or expected in str(reason)


def test_windows_need_stages_of_any_shape() -> None:
    model = tiny_model()
    assert model.why_not_crops() is None
    model.serve_by(model.stages, few_shapes=True)
    assert "shapes are fixed" in str(model.why_not_crops())
    model.serve_by(model.stages)
    assert model.static_shapes
    model.serve_by(model.stages, few_shapes=False)
    assert model.why_not_crops() is None
