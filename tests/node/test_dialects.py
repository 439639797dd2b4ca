"""A camera server of another project, a camera process that reads it, and a node that serves its cameras."""

import time

import numpy as np

from sam3_node.types import Image
from tests.support.camera_servers import StubServer, base64_jpeg, groot
from tests.support.node_rig import Rig, masks_where


def scene(seed: int) -> Image:
    """Return a bright square on noise [120, 160, 3]."""
    image = np.random.default_rng(seed).integers(0, 90, (120, 160, 3), np.uint8)
    image[40:80, 50:90] = 200
    return image


def test_masks_of_each_camera_of_a_server(rig: Rig) -> None:
    images = {"head": base64_jpeg(scene(1)), "left wrist": base64_jpeg(scene(2))}

    def make(_: int) -> list[bytes]:
        return groot(images, dict.fromkeys(images, time.time()))

    rig.node()
    with StubServer(make, f"ipc://{rig.folder}/server") as server:
        camera = rig.start("camera", server.endpoint, "--dialect", "groot", CAMERA__ENCODING="jpeg")
        with rig.client() as client:
            for name in ("head", "left_wrist"):
                added = masks_where(client, lambda masks, name=name: masks.camera == name, name)
                assert (added.width, added.height) == (160, 120)
                client.add_object(box=[50, 40, 90, 80], label=name, camera=name)
            for name in ("head", "left_wrist"):
                masks = masks_where(
                    client,
                    lambda masks, name=name: masks.camera == name and masks.instances,
                    f"masks of {name}",
                )
                assert [instance.label for instance in masks.instances] == [name]
                assert masks.capture_ns < masks.received_ns
        assert camera.terminate() == 0
    assert camera.next_line().startswith("camera cam0 captured ")
