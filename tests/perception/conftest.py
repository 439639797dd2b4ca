"""The bundled model for the tests of this folder."""

import pytest

from sam3_node.models import TrackerModel, load_tracker


@pytest.fixture(scope="session")
def nano() -> TrackerModel:
    return load_tracker("nano")
