"""One camera and node with the bundled weights and recording, for the tests of a module that need real masks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.console_rig import ConsoleRig
    from tests.support.ros2_site import OpenSite, Site

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


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[OpenSite]:
    """Bridges of ROS 2 with settings of their own."""
    from tests.support.ros2_site import Site  # needs ROS

    made: list[Site] = []

    def open_one(**settings: Any) -> Site:
        made.append(Site(tmp_path, **settings))
        return made[-1]

    yield open_one
    for site in made:
        site.close()


@pytest.fixture
def site(open_site: OpenSite) -> Site:
    """A bridge of ROS 2."""
    return open_site()
