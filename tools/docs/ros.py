"""Make the table of what the messages of ROS do not carry."""

import runpy
from collections.abc import Mapping
from pathlib import Path

from .tables import code, table

_LIST = Path(__file__).resolve().parents[2] / "launch/ros2/sam3_node_ros/sam3_node_ros/left_out.py"


def left_out_table() -> str:
    """Return the fields of masks and objects that no message has, those of one reason together."""
    # the package itself is installed where ROS is
    found = runpy.run_path(str(_LIST))
    rows = [*_list_reasons("a frame", found["FRAME"]), *_list_reasons("an object", found["OBJECT"])]
    return table(["fields", "of", "why"], rows)


def _list_reasons(kind: str, fields: Mapping[str, str]) -> list[list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in fields.items():
        reasons.setdefault(reason, []).append(name)
    return [[", ".join(map(code, names)), kind, reason] for reason, names in reasons.items()]
