"""Inputs of a stage: checked against its specs, and copied only where an engine could not read them."""

import pytest
import torch

from sam3_node.engines import specs
from sam3_node.errors import EngineError
from sam3_node.models import TrackerModel
from sam3_node.models.sam31 import random_model
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.tiny import random_source, stages_of, tiny_model

CPU = torch.device("cpu")
STAGE = specs.StageSpec(
    "scale",
    torch.nn.Identity(),
    (
        specs.TensorSpec("image", (1, 4), torch.float16),
        specs.TensorSpec("factor", ("objects", 3), torch.float32),
    ),
    (specs.TensorSpec("out", ("objects", 4), torch.float16),),
)


def image() -> torch.Tensor:
    return torch.zeros(1, 4, dtype=torch.float16)


@pytest.mark.parametrize("objects", [1, 3, 8])
def test_objects_are_counted(objects: int) -> None:
    assert specs.find_sizes(STAGE, (image(), torch.zeros(objects, 3)), 8, CPU).objects == objects


def test_a_stage_of_the_image_is_of_one() -> None:
    fixed = STAGE._replace(inputs=STAGE.inputs[:1])
    assert specs.find_sizes(fixed, (image(),), 1, CPU).objects == 1


@each_row(
    ("inputs", "said"),
    [
        ((image(),), ("scale", "2", "1")),
        ((image(), None), ("factor", "NoneType")),
        ((None, torch.zeros(2, 3)), ("image", "NoneType")),
        ((image(), torch.zeros(2, 4)), ("factor", "2", "3", "4")),
        ((image(), torch.zeros(6)), ("factor", "1", "3", "6")),
        ((image().float(), torch.zeros(2, 3)), "image"),
        ((image().to("meta"), torch.zeros(2, 3)), "image"),
        ((image(), torch.zeros(9, 3)), ("1", "8", "9", "build")),
        ((image(), torch.zeros(0, 3)), ("1", "8", "0", "objects")),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    inputs: tuple[torch.Tensor, ...], said: str | tuple[str, ...]
) -> None:
    with refuses(EngineError, field=said):
        specs.find_sizes(STAGE, inputs, 8, CPU)


def test_tensors_are_copied_only_where_they_must_be() -> None:
    block = torch.arange(1024.0)
    start = -block.data_ptr() % specs.ALIGNMENT // block.element_size()
    aligned = block[start : start + 512].view(16, 32)
    odd = block[start + 1 : start + 513].view(16, 32)
    assert specs.ensure_aligned(aligned) is aligned
    for tensor in (odd, aligned.T):
        copy = specs.ensure_aligned(tensor)
        assert (
            copy.data_ptr() != tensor.data_ptr()
        )  # torch aligns what is new on a GPU, not what it is a part of
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)


@pytest.mark.parametrize("memories", [1, 99])
def test_a_number_of_memories_that_no_plan_takes_is_refused(memories: int) -> None:
    stage = specs.tracker_stages(tiny_model())["read"]
    with refuses(EngineError, field=(str(stage.max_memories), str(memories))):
        specs.find_sizes(stage, stage.examples(1, memories=memories), 8, CPU)


def half(family: str) -> TrackerModel:
    if family == "sam3.1":
        return random_model(56, 32, dtype=torch.bfloat16)
    return stages_of(random_source(family).bfloat16())


@pytest.mark.parametrize(
    ("family", "kept"), [("sam3", torch.bfloat16), ("edgetam", torch.float16), ("sam3.1", torch.float16)]
)
def test_memories_of_an_engine_have_the_dtype_in_which_it_was_built(family: str, kept: torch.dtype) -> None:
    """An engine in float16 is exported from a model in float16; it may serve in a model of another dtype."""
    stages = specs.tracker_stages(half(family), dtype=torch.float16)
    (memory,) = (spec for spec in stages["read"].inputs if spec.name == "memory")
    assert memory.dtype == stages["remember"].outputs[0].dtype == kept
