"""Check that a file's text is a whole URDF, and name the other formats that users give in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import SettingsError, require

_OTHERS = {
    "mujoco": "a model of MuJoCo (MJCF)",
    "sdf": "an SDF",
    "gazebo": "an old SDF",
    "COLLADA": "a COLLADA mesh",
    "package": "a ROS package.xml",
}
"""Formats by the name of their root element."""
_EXPAND = "expand it first: xacro FILE > robot.urdf"
_SEEN = ("link", "joint")
"""Elements of a URDF that are read. What simulators add may have any text."""
_UNKNOWN_PREFIX = "NS_ERR_UNDEFINED_NAMESPACE"
"""Kind of libxml2's error for a prefix without a declaration, which simulators' additions often have."""


def check_text(path: Path, data: bytes) -> None:
    """Raise SettingsError unless the content of a file is a whole URDF whose macros are expanded."""
    etree = require("lxml.etree", "robot")
    # without entities and the network: the file may be hostile
    parser = etree.XMLParser(recover=True, resolve_entities=False, no_network=True, load_dtd=False)
    root = etree.fromstring(data, parser) if data.strip() else None
    faults = [fault for fault in parser.error_log if fault.type_name != _UNKNOWN_PREFIX]
    if root is None or faults:
        found = f"line {faults[0].line}: {faults[0].message:.200}" if faults else "an empty file"
        raise SettingsError(
            f"robot.urdf: expected a whole URDF in {path}, found {found}; copy or export the file again"
        )

    name = _read_name(root)
    if name.lower() != "robot":
        other = _OTHERS.get(name, f"the element {name:.80}")
        raise SettingsError(
            f"robot.urdf: expected a URDF, whose root is robot, in {path}, found {other}; convert it to a URDF"
        )

    for element in root.iter():
        macro = _find_macro(element, root)
        if macro is not None:
            raise SettingsError(
                f"robot.urdf: expected a URDF in {path}, found xacro that is not expanded, {macro:.120} in line "
                f"{element.sourceline}; {_EXPAND}"
            )


def _read_name(element: Any) -> str:
    """Return an element's name without its namespace; an empty one for a comment."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _find_macro(element: Any, root: Any) -> str | None:
    """Return what an element has of xacro; None if it has nothing."""
    if not isinstance(element.tag, str):
        return None
    # the prefix may lack its declaration
    if "xacro" in element.tag:
        return f"xacro:{_read_name(element).removeprefix('xacro:')}"
    top = element
    while top.getparent() is not None and top.getparent() is not root:
        top = top.getparent()
    if _read_name(top) not in _SEEN:
        return None
    return next((text for text in element.attrib.values() if "${" in text or "$(" in text), None)
