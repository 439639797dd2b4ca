"""Layers of SAM 3's stages as TensorRT-RTX builds them in bfloat16, read from its own report; nothing runs.

The encoder has its full width and two of its layers, the read half of its four. In float16 the same attentions add up
the products of all keys in float16, which is wrong for tens of thousands of them.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import pytest

pytest.importorskip("onnxscript")
pytest.importorskip("tensorrt_rtx")

from sam3_node.models import TrackerModel
from tests.support.tensorrt_plans import PlanReport, make_group_model, make_model, report_plans

GENERATIONS = ("sm89", "sm120")
READ_LAYERS = 2  # of four
LINEAR_LAYERS = 2 * 4  # of two encoder layers: query, key and value in one; the projection; two of the MLP
MEGABYTE = 10**6

pytestmark = [
    pytest.mark.skipif(find_spec("tensorrt") is not None, reason="tensorrt builds for the local GPU alone"),
    pytest.mark.timeout(1200),
]
Reports = Callable[[str], dict[str, PlanReport]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Return a function that builds a stage for all generations at its first use."""
    return reporting(make_model(image_size=504, read_layers=READ_LAYERS), tmp_path_factory)


@pytest.fixture(scope="module")
def group_reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Return the same function for SAM 3.1."""
    return reporting(make_group_model(image_size=504, read_layers=READ_LAYERS), tmp_path_factory)


def reporting(model: TrackerModel, folders: pytest.TempPathFactory) -> Reports:
    @cache
    def get(variant: str) -> dict[str, PlanReport]:
        folder = folders.mktemp("onnx")
        return {gpu: report for _, gpu, report in report_plans(model, [variant], GENERATIONS, folder)}

    return get


@pytest.mark.parametrize(
    ("variant", "attentions"),
    [("encode", 2), ("encode in FP8", 2), ("read", 2 * READ_LAYERS - 1), ("decode", 5)],
)
def test_attention_is_fused_and_adds_up_in_bfloat16(reports: Reports, variant: str, attentions: int) -> None:
    """The read's first self-attention sees one image for all objects; of 504 pixels, it stays in plain steps.

    The decoder's attention to pixels carries their projections on the tokens, in plain products.
    """
    for gpu, report in reports(variant).items():
        assert report.attentions >= attentions, gpu
        assert report.traits.keys() == {"Ampere_hmma_bf16_traits"}, gpu


def test_every_linear_layer_of_the_encoder_multiplies_in_fp8(reports: Reports) -> None:
    assert not any(report.fp8_products for report in reports("encode").values())
    for report in reports("encode in FP8").values():
        assert len(report.fp8_products) == LINEAR_LAYERS
        # before the scales of the weights apply: in float16 these numbers could overflow
        assert {layer.outputs for layer in report.fp8_products} <= {("BFloat16",), ("Float",)}
    half, eight = (reports(variant)["sm89"].plan_bytes for variant in ("encode", "encode in FP8"))
    assert eight < 0.7 * half


@pytest.mark.parametrize(
    ("variant", "megabytes"), [("encode", 60), ("encode in FP8", 60), ("read", 290), ("decode", 80)]
)
def test_intermediate_values_fit_in_little_memory(reports: Reports, variant: str, megabytes: int) -> None:
    """Attention in plain steps needs gigabytes here: the read's scores alone are 0.2 GB for each of four objects."""
    for report in reports(variant).values():
        assert 0 < report.activation_bytes < megabytes * MEGABYTE


@pytest.mark.parametrize(
    ("variant", "attentions", "megabytes"),
    [("encode in FP8", 2, 120), ("read", 2 * READ_LAYERS, 180), ("decode", 5, 60), ("remember", 0, 180)],
)
def test_plans_of_groups_are_fused_and_add_up_in_bfloat16(
    group_reports: Reports, variant: str, attentions: int, megabytes: int
) -> None:
    """A group's read has eight heads: their scores would take 0.27 GB."""
    for gpu, report in group_reports(variant).items():
        assert report.attentions >= attentions, gpu
        assert report.traits.keys() <= {"Ampere_hmma_bf16_traits"}, gpu
        assert 0 < report.activation_bytes < megabytes * MEGABYTE
