"""The robot's body by its name before it had its own package; nothing inside of this package imports it from here."""

from ..robot.body import RobotBody
from ..robot.lens_view import LensView

__all__ = ["LensView", "RobotBody"]
