"""Stand-in for rclpy: exactly the interface that the bridge uses, with rclpy's names, arguments and defaults."""

from __future__ import annotations

_is_ok = False


def init() -> None:
    global _is_ok
    assert not _is_ok
    _is_ok = True


def ok() -> bool:
    return _is_ok


def shutdown() -> None:
    global _is_ok
    assert _is_ok, "rclpy.shutdown raises if the context is shut down"
    _is_ok = False
