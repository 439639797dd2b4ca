"""Tests of the table of operations against the functions that carry them out."""

from __future__ import annotations

import inspect

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.node.operations import HANDLERS
from sam3_node.wire.operations import OPERATIONS

KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def test_every_operation_has_a_function_and_a_method_of_the_client() -> None:
    assert list(HANDLERS) == list(OPERATIONS)
    internal = {"describe", "pin_frame", "read_snapshot", "hand_over", "confirm_hand_over"}
    assert all(hasattr(PerceptionClient, op) for op in OPERATIONS.keys() - internal)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_function_takes_the_arguments_of_its_operation(op: str) -> None:
    operation = OPERATIONS[op]
    _, *parameters = inspect.signature(HANDLERS[op]).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind in KEYWORDS]
    prompt = {"prompt"} if operation.takes_prompt else set()
    required = operation.arguments.required | prompt
    allowed = operation.arguments.readers.keys() | prompt
    assert {parameter.name for parameter in named if parameter.default is parameter.empty} == required
    if len(named) == len(parameters):
        assert {parameter.name for parameter in named} == allowed
