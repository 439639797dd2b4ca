"""Replay of many recordings at once, on workers of a Ray cluster or of this machine."""

from ...errors import require_installed


def check_ray() -> None:
    """Raise MissingExtraError if Ray is not installed. Imports neither Ray nor torch."""
    require_installed("ray", "cloud")
