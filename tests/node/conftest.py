"""A node with one drawn camera, both processes, for the tests of this folder."""

from collections.abc import Iterator

import pytest

from sam3_node.client import PerceptionClient
from tests.support.node_rig import Process, Rig, masks_where


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Processes whose settings are the ENVIRONMENT of the module, where it has one."""
    with Rig(tmp_path_factory.mktemp("rig")) as rig:
        rig.environment |= getattr(request.module, "ENVIRONMENT", {})
        yield rig


@pytest.fixture(scope="module")
def node(rig: Rig) -> Process:
    """A node that serves a camera which draws a scene."""
    node = rig.node()
    rig.camera()
    return node


@pytest.fixture
def client(rig: Rig, node: Process) -> Iterator[PerceptionClient]:
    """A client of the node, which tracks nothing yet."""
    with rig.client() as client:
        client.resume()
        masks_where(client, lambda masks: masks.camera == "cam0", "masks of the camera")
        client.reset()
        yield client
