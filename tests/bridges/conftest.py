"""One camera and node with the bundled weights and recording, for the tests of a module that need real masks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.console_rig import ConsoleRig

NAME = "red mug"


class BridgeRig(ConsoleRig):
    """The processes. The node looks for the mug from its start."""

    def begin(self) -> None:
        """Start camera and node."""
        self.environment["SAM3_DETECTOR__PROMPTS"] = NAME
        self.tabletop()
        self.node()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeRig]:
    found = BridgeRig(tmp_path_factory.mktemp("bridges"))
    try:
        found.begin()
        yield found
    finally:
        found.close()
