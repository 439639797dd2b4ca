"""Models for the tests of this folder."""

import pytest

from sam3_node.models import TrackerModel, load_tracker
from tests.support.tiny import random_source


@pytest.fixture(scope="session")
def nano() -> TrackerModel:
    return load_tracker("nano")


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    """A tiny random tracker that always finds its objects in view."""
    source = random_source("sam3", presence=60.0)
    return TrackerModel(source, name="tiny", mean=[0.5] * 3, std=[0.5] * 3, has_memory=True)
