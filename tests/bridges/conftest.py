"""One camera and node with the bundled weights and recording, for the tests of a module that need real masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.console_rig import BridgeRig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeRig]:
    from tests.support.console_rig import BridgeRig  # needs torch, which the environment of ROS lacks

    found = BridgeRig(tmp_path_factory.mktemp("bridges"))
    try:
        found.begin()
        yield found
    finally:
        found.close()
