"""The count of a step's arithmetic: its size, and that static shapes read no more than dynamic ones.

The comparison with transformers runs on random weights whose logits have a trained model's size.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sam3_node.models import TrackerModel
from tests.support.step_costs import build, count_methods, count_read, count_stages
from tools.bench.common import Figures
from tools.bench.counting import Counts, count
from tools.bench.latency.step import TRAINED_LOGIT, Taken, Times, compare, random_source, report, stages

RING = 7
POINTERS = 16


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    return build("small", torch.float32)


def exact(model: TrackerModel) -> float:
    """The FLOPs of a read of 7 memories, from the sizes of its matrices; keys are projected at every read."""
    hidden = model.hidden
    area = model.grid[0] * model.grid[1]
    narrow = model.memory_channels
    tokens = RING * area + POINTERS * (hidden // narrow)
    layer = model.memory_attention.layers[0]
    projections = area * hidden * (3 * hidden + hidden + hidden) + area * narrow * hidden
    own = 2 * area * area * hidden
    memory = tokens * narrow * hidden + area * tokens * (hidden + narrow)
    widening = 2 * area * hidden * layer.linear1.out_features
    place = POINTERS * hidden * narrow  # the temporal encoding of pointers
    return 2.0 * (len(model.memory_attention.layers) * (projections + own + memory + widening) + place)


def test_a_read_costs_what_its_matrices_cost(model: TrackerModel) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        counts = count_read(model, 1, RING, unmasked=True, masked_all=False)
    assert counts.flops == pytest.approx(exact(model), rel=1e-3)


def test_static_shapes_read_no_more_than_dynamic_ones() -> None:
    half = build("small", torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = count_stages(half)
    assert found["read, static"].flops == pytest.approx(found["read, dynamic"].flops, rel=0.01)
    # an engine pads the values of pointers, too
    assert found["read, engine"].flops <= 1.003 * found["read, static"].flops


def test_the_decoder_never_projects_the_image_tokens(model: TrackerModel) -> None:
    """Its attention costs four products with the tokens of all heads, not three projections a layer."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        flops = count_stages(model)["decode"].flops
    area = model.grid[0] * model.grid[1]
    hidden = model.hidden
    tokens = 8
    heads = 4
    layers = 2
    carried = heads * tokens
    attention = (layers * 6 + 3) * 2 * area * carried * hidden  # 3 products each: scores, place, values
    upscaling = 2 * area * hidden * hidden + 2 * 4 * area * hidden // 4 * hidden // 2
    masks = 2 * 16 * area * 4 * hidden // 8
    few = 8e6  # the tokens' own maps
    assert attention + upscaling + masks < flops < attention + upscaling + masks + few


def test_approximations_and_kernels_read_less() -> None:
    found = {title: counts.flops for title, counts in count_methods("small", 1).items()}
    ways = ["float32 on a CPU", *(["kernels"] if find_spec("triton") else [])]
    for way in ways:
        exact = found[f"read, {way}"]
        assert exact == pytest.approx(found["read, float32 on a CPU"], rel=0.01)
        assert found[f"read, {way}, pooled"] < 0.6 * exact
        assert found[f"read, {way}, sparse"] < 0.6 * exact


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x.view(-1), Counts(0, 0, 0)),
        (lambda x: x + 1, Counts(0, 2 * 16 * 16 * 4, 1)),
        (lambda x: x @ x, Counts(2 * 16**3, 3 * 16 * 16 * 4, 1)),
    ],
)
def test_operations_are_counted(run: Callable[[torch.Tensor], torch.Tensor], expected: Counts) -> None:
    x = torch.zeros(16, 16)
    assert count(lambda: run(x)) == expected


def test_inference_mode_does_not_hide_operations() -> None:
    layer = torch.nn.Linear(16, 16)
    x = torch.zeros(4, 16)
    assert count(torch.inference_mode()(lambda: layer(x))).flops == 2 * 4 * 16 * 16


@pytest.mark.parametrize("name", ["nano", "small"])
def test_parity_is_shown_at_logits_of_a_trained_models_size(name: str) -> None:
    with torch.inference_mode():
        source = random_source(name, "cpu")
        (times,) = compare(source, stages(source), objects=2, frames=4, warm=1, runs=1)
    assert times.least_logit >= TRAINED_LOGIT
    assert times.difference < 1e-3


def test_logits_that_are_too_small_to_show_parity_are_told_beside_the_least_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for least, shown in ((1e-3, "0.001"), (7.0, "7")):
        times = [Times(Taken(1.0, 2.0), Taken(2.0, 3.0), 1e-9, least)]
        report("step", times, None, Figures("latency.step", []))
        assert f"step, largest logit: {shown} logit (target: at least 5)" in capsys.readouterr().out


def test_the_json_has_ratios_and_the_rate_of_a_matrix_product_of_the_same_run(tmp_path: Path) -> None:
    figures = Figures("latency.step", [])
    times = [Times(Taken(10.0, 20.0), Taken(30.0, 50.0), 1e-4, 9.0)]
    report("frame step", times, (3.0, 80.0, 160.0), figures)
    figures.write(tmp_path / "step.json")
    records = {record["figure"]: record for record in json.loads((tmp_path / "step.json").read_text())}
    relative = "relative to transformers' streaming inference"
    assert records[f"frame step, speed {relative}"]["value"] == 3.0
    assert records[f"frame step, saving of CPU time {relative}"]["value"] == 2.5
    assert records["frame step, rate of gemm in the same run"]["value"] == 160.0
    assert records["frame step, rate as a part of that of gemm"]["value"] == 0.5
