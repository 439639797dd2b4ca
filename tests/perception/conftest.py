"""Models for the tests of this folder."""

import pytest

from sam3_node.models import TrackerModel, load_tracker
from tests.support.tiny import tiny_model


@pytest.fixture(scope="session")
def nano() -> TrackerModel:
    return load_tracker("nano")


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    """A tiny random tracker that always finds its objects in view."""
    return tiny_model(presence=60.0)
