"""Tiny weights, and one loaded model for all replays."""

from pathlib import Path

import pytest

from sam3_node.perception.perception import Perception
from sam3_node.replay.run import PerceptionCache
from sam3_node.settings import Settings
from tests.support.live import record_edits, tiny_settings


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return tiny_settings(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def load() -> PerceptionCache:
    return PerceptionCache()


@pytest.fixture(scope="module")
def bag(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of two cameras, one frame that does not decode, and every kind of edit."""
    return record_edits(tmp_path_factory.mktemp("bag") / "live.mcap", Perception.load(settings))
