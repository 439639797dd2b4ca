"""Frame messages: `[b"frame/<camera>", header, colour, depth?]`. Pixels are parts of their own and are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from ..errors import WireError
from ..types import Buffer, Clock, ColourEncoding, Depth, DepthEncoding, Frame, Intrinsics
from .codec import MAX_SIDE, VERSION, Fields, Limits, pack, unpack
from .images import check_colour, check_depth
from .topics import frame_topic, read_camera

MODELS = ("none", "brown_conrady", "fisheye")
MAX_COEFFS = 14
MAX_CAPTURE_NS = 2**62
"""Largest time of capture: in Unix time it is in the year 2116."""
_LIMITS = Limits(total_bytes=64 << 10)


def pack_frame(frame: Frame) -> list[Buffer]:
    """Return the parts of the message. Colour and depth are the buffers of the frame, not copies."""
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    header: dict[str, Any] = {
        "v": VERSION,
        "kind": "frame",
        "camera": frame.camera,
        "seq": frame.seq,
        "capture_ns": frame.capture_ns,
        "clock": frame.clock,
        "sent_ns": frame.sent_ns,
        "width": frame.width,
        "height": frame.height,
        "encoding": frame.encoding,
    }
    if frame.intrinsics is not None:
        header["intrinsics"] = _pack_intrinsics(frame.intrinsics)
    if frame.depth is not None:
        header["depth"] = _pack_depth(frame.depth)
    if frame.times:
        header["times"] = dict(frame.times)
    parts: list[Buffer] = [frame_topic(frame.camera), pack(header), frame.colour]
    return parts if frame.depth is None else [*parts, frame.depth.data]


def unpack_frame(parts: Sequence[Buffer]) -> Frame:
    """Unpack a frame from the parts of a message without copying pixels. Raises WireError for any other input."""
    if not 3 <= len(parts) <= 4:
        raise WireError(f"frame: expected 3 or 4 parts (topic, header, colour, depth), found {len(parts)}")
    header = Fields(unpack(parts[1], what="frame", limits=_LIMITS), "frame")
    header.require_kind("frame")
    if header.has("depth") != (len(parts) == 4):
        raise WireError(
            f"frame: expected a depth part with, and only with, a depth header; found {len(parts)} parts"
        )
    frame = Frame(
        camera=read_camera(header, parts[0]),
        seq=header.integer("seq"),
        capture_ns=header.integer("capture_ns", high=MAX_CAPTURE_NS),
        width=header.integer("width", 1, MAX_SIDE),
        height=header.integer("height", 1, MAX_SIDE),
        encoding=header.choice("encoding", get_args(ColourEncoding)),
        colour=parts[2],
        clock=header.choice("clock", get_args(Clock)),
        sent_ns=header.integer("sent_ns"),
        depth=_unpack_depth(header.fields("depth"), parts[3]) if header.has("depth") else None,
        intrinsics=_unpack_intrinsics(header.fields("intrinsics")) if header.has("intrinsics") else None,
        times=header.fields("times").measures() if header.has("times") else {},
    )
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    return frame


def _pack_intrinsics(intrinsics: Intrinsics) -> dict[str, Any]:
    return {
        "fx": intrinsics.fx,
        "fy": intrinsics.fy,
        "cx": intrinsics.cx,
        "cy": intrinsics.cy,
        "model": intrinsics.model,
        "coeffs": intrinsics.coeffs,
    }


def _unpack_intrinsics(fields: Fields) -> Intrinsics:
    return Intrinsics(
        fx=fields.positive("fx"),
        fy=fields.positive("fy"),
        cx=fields.number("cx"),
        cy=fields.number("cy"),
        model=fields.choice("model", MODELS),  # type: ignore[arg-type]
        coeffs=fields.numbers("coeffs", MAX_COEFFS),
    )


def _pack_depth(depth: Depth) -> dict[str, Any]:
    check_depth(depth)
    return {
        "width": depth.width,
        "height": depth.height,
        "encoding": depth.encoding,
        "scale_m": depth.scale_m,
        "aligned": depth.aligned,
    }


def _unpack_depth(fields: Fields, data: Buffer) -> Depth:
    depth = Depth(
        width=fields.integer("width", 1, MAX_SIDE),
        height=fields.integer("height", 1, MAX_SIDE),
        encoding=fields.choice("encoding", get_args(DepthEncoding)),
        scale_m=fields.positive("scale_m"),
        aligned=fields.flag("aligned"),
        data=data,
    )
    check_depth(depth)
    return depth
