"""One camera and node with the bundled weights and recording, for the tests of a module that need real masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.console_rig import ConsoleRig

NAME = "red mug"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleRig]:
    """The processes. The node looks for NAME from its start."""
    from tests.support.console_rig import ConsoleRig  # needs torch, which the environment of ROS lacks

    with ConsoleRig(tmp_path_factory.mktemp("bridges")) as found:
        found.environment["SAM3_DETECTOR__PROMPTS"] = NAME
        found.tabletop()
        found.node()
        yield found
