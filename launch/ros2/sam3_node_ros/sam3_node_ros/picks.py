"""Makes messages of the picks of a frame, without ROS."""

from __future__ import annotations

import math
from typing import Any

from sam3_node.errors import RequestError
from sam3_node.schema.replies import ParallelGrip, Pick, PicksReply, SuctionPoint

from .parts import Header, MessageParts, format_id, parse_id

LIMITS = ("cup_radius_m", "opening_m", "reach_m", "max_age_ms", "most")
"""Arguments of a request whose 0 is the node's own: a field of a message cannot be absent."""
OWN = ("id", "under", "suction", "grip")
"""Fields of a pick whose messages have another type"""


def read_pick_request(request: Any) -> dict[str, Any]:
    """Return what a request of NextPick asks for, as arguments of the client. Raises RequestError."""
    if request.label and request.id:
        raise RequestError("expected a label or an id, found both")
    object_id, epoch = parse_id(request.id) if request.id else (None, None)
    wanted = {"id": object_id, "epoch": epoch, "label": str(request.label) or None}
    limits = {name: getattr(request, name) or None for name in LIMITS}
    return {**wanted, **limits, "covered": bool(request.covered)}


class PickMessages(MessageParts):
    """Makes the answer of NextPick. Numbers that are not known are NaN."""

    def fill_picks(self, response: Any, reply: PicksReply, header: Header) -> None:
        """Fill in a response. `header` is that of the image; the frame_id becomes that of the coordinates."""
        header = self._in_frame(header, reply.frame)
        response.header = self._header(header)
        response.age_ms = math.nan if reply.age_ms is None else reply.age_ms
        response.up = self._xyz("Vector3", reply.up or (0.0, 0.0, 0.0))
        response.picks = [self._make_pick(pick, reply.epoch, header) for pick in reply.picks]
        response.refused = [
            self._make(
                "sam3_node_msgs/msg/RefusedObject",
                id=format_id(one.id, reply.epoch),
                label=one.label,
                reason=one.reason,
            )
            for one in reply.refused
        ]
        response.problem = reply.problem or ""

    def _make_pick(self, pick: Pick, epoch: int | None, header: Header) -> Any:
        values = {name: getattr(pick, name) for name in Pick.__struct_fields__ if name not in OWN}
        known = {name: math.nan if value is None else value for name, value in values.items()}
        found = {}
        if pick.suction is not None:
            found["suction"] = self._make_suction(pick.suction, header)
        if pick.grip is not None:
            found["grip"] = self._make_grip(pick.grip, header)
        return self._make(
            "sam3_node_msgs/msg/Pick",
            id=format_id(pick.id, epoch),
            under=[format_id(other, epoch) for other in pick.under],
            has_suction=pick.suction is not None,
            has_grip=pick.grip is not None,
            **known,
            **found,
        )

    def _make_suction(self, suction: SuctionPoint, header: Header) -> Any:
        return self._make(
            "sam3_node_msgs/msg/SuctionPoint",
            pose=self._stamped(header, suction.position_m, suction.quaternion_xyzw),
            normal=self._xyz("Vector3", suction.normal),
            radius_m=suction.radius_m,
        )

    def _make_grip(self, grip: ParallelGrip, header: Header) -> Any:
        return self._make(
            "sam3_node_msgs/msg/ParallelGrip",
            pose=self._stamped(header, grip.position_m, grip.quaternion_xyzw),
            approach=self._xyz("Vector3", grip.approach),
            width_m=grip.width_m,
        )
