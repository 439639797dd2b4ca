"""Read the operation of a request, and the prompt of an operation; write a prompt into one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypedDict, cast

import msgspec

from ..errors import RequestError, WireError, did_you_mean
from ..schema.fields import convert
from ..schema.operations import (
    OPERATIONS,
    AnyOperation,
    Corners,
    Marks,
    Operation,
    Points,
    Prompt,
    PromptOperation,
)
from ..schema.values import MaskMap
from ..types import Mask, MaskEncoding
from .frame_prompt import FramePrompt
from .masks import MAX_PROMPT_BYTES, encode_mask, open_mask


class MarkFields(TypedDict, total=False):
    """The fields of a prompt without a mask."""

    points: Points
    labels: Marks
    box: Corners


class PromptFields(MarkFields, total=False):
    """The fields of an operation that have its prompt."""

    mask: MaskMap


def read_operation(op: str, args: Mapping[str, object]) -> AnyOperation:
    """Return the operation that a request names. Raises RequestError for an unknown one, and for wrong arguments."""
    kind = OPERATIONS.get(op)
    if kind is None:
        expected = ", ".join(OPERATIONS)
        hint = did_you_mean(op[:60], OPERATIONS)
        raise RequestError(f"unknown operation {op!r:.60}: expected one of {expected}{hint}")
    try:
        operation = convert(args, kind, op)
        check(operation)
    except WireError as error:
        if issubclass(kind, PromptOperation) and args.get("mask") is None:
            # it knows better what is wrong with a prompt
            FramePrompt(args.get("points"), args.get("labels"), args.get("box"))
        raise RequestError(str(error)) from error
    return operation


def decode_operation(op: str, args: msgspec.Raw) -> AnyOperation | None:
    """Return the operation of a request in one pass over its packed arguments; None if `read_operation` must tell."""
    try:
        operation = _make_decoder(op).decode(args)
        check(operation)
    except (KeyError, RequestError, WireError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return operation


@cache
def _make_decoder(op: str) -> msgspec.msgpack.Decoder[AnyOperation]:
    return msgspec.msgpack.Decoder(OPERATIONS[op])


def check(operation: Operation[Any]) -> None:
    """Raise RequestError or WireError for what the types of an operation's fields do not say."""
    operation.check()
    for prompt in operation.list_prompts():
        if not _is_plain(prompt):
            FramePrompt(prompt.points, prompt.labels, prompt.box)
    if isinstance(operation, PromptOperation) and operation.mask is not None:
        read_prompt(operation)


def _is_plain(prompt: Prompt) -> bool:
    """Return True for a prompt that is surely right, without arrays: FramePrompt says what is wrong with others."""
    points = prompt.points
    labels = prompt.labels
    box = prompt.box
    if points is None and (box is None or labels is not None):
        return False
    if labels is not None and (len(labels) != len(points or ()) or not {0, 1}.issuperset(labels)):
        return False
    return box is None or (box[0] < box[2] and box[1] < box[3])


def read_prompt(operation: PromptOperation[Any]) -> FramePrompt:
    """Return the prompt of an operation. Raises RequestError or WireError for what no frame can have."""
    mask: Mask | None = None
    if operation.mask is not None:
        # its pixels are decoded when they are first used, once its size is known to be that of the frame
        what = f"{operation.op}: mask"
        mask = open_mask(operation.mask, what, is_lazy=True, max_bytes=MAX_PROMPT_BYTES)
    return FramePrompt(operation.points, operation.labels, operation.box, mask)


def make_frame_prompt(prompt: Prompt) -> FramePrompt:
    """Return a prompt without a mask. Raises RequestError for what no frame can have."""
    return FramePrompt(prompt.points, prompt.labels, prompt.box)


def write_prompt(prompt: FramePrompt) -> PromptFields:
    """Return the fields of an operation that have a prompt."""
    fields = cast(PromptFields, _write_marks(prompt))
    if prompt.mask is not None:
        fields["mask"] = pack_mask(prompt.mask)
    return fields


def write_marks(prompt: FramePrompt) -> Prompt:
    """Return a prompt without a mask as requests have it."""
    return Prompt(**_write_marks(prompt))


def _write_marks(prompt: FramePrompt) -> MarkFields:
    fields: MarkFields = {}
    if prompt.points is not None:
        fields["points"] = tuple(map(tuple, prompt.points.tolist()))
    if prompt.labels is not None:
        fields["labels"] = tuple(int(label) for label in prompt.labels)
    if prompt.box is not None:
        fields["box"] = read_box(prompt)
    return fields


def read_box(prompt: FramePrompt) -> Corners:
    """Return the box of a prompt that has one."""
    return cast(Corners, tuple(prompt.box.tolist()))


def pack_mask(mask: Mask, encoding: MaskEncoding = "bits+zstd") -> MaskMap:
    """Return a mask as requests and replies have it."""
    fields = encode_mask(mask, encoding)
    return MaskMap(encoding, mask.size, mask.box, fields["data"])
