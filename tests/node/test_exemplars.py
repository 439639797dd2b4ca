"""All that is like a box, live: on a frame and on a photo, in snapshots, and in a replay as recorded."""

from pathlib import Path

import cv2
import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import RequestError, UnknownFrameError
from tests.support.node_rig import Rig, masks_where
from tests.support.processes import run_command
from tests.support.refuses import refuses
from tests.support.tiny_detectors import picture, write_tiny_sam3

BOX = (60, 60, 140, 150)
OTHER = (200, 100, 290, 190)


@pytest.fixture
def rig(tmp_path: Path):
    with Rig(tmp_path) as rig:
        write_tiny_sam3(tmp_path / "detector")
        detector = {"KIND": "sam3-concept", "NAME": str(tmp_path / "detector"), "EVERY": "2", "SCORE": "0.02"}
        rig.environment |= {f"SAM3_DETECTOR__{name}": value for name, value in detector.items()}
        rig.environment |= {"SAM3_CAMERA__FPS": "5", "SAM3_TRACKER__FEATURE_CACHE_S": "20"}
        rig.environment["SAM3_SNAPSHOT__PATH"] = str(tmp_path / "node.snapshot")
        yield rig


def wait_for(client: PerceptionClient, label: str) -> None:
    masks_where(client, lambda masks: label in [item.label for item in masks.instances], f"a {label}")


def test_what_is_like_a_box_is_found_kept_and_replayed(rig: Rig, tmp_path: Path) -> None:
    # the recorder before the node, so that it has each frame that the node steps
    _ = rig.camera()
    recorder = rig.start("record", str(tmp_path / "live.mcap"))
    node = rig.node()
    with rig.client() as client:
        seq = masks_where(client, lambda masks: True, "masks").seq
        client.add_exemplar("washer", [BOX], seq=seq)
        wait_for(client, "washer")
        client.add_exemplar("washer", [OTHER], [0], seq=seq)
        photo = cv2.imencode(".png", picture())[1].tobytes()
        client.add_exemplar("bolt", [(10, 20, 60, 70)], text="red mug", photo=photo)
        assert client.status()["exemplars"] == {"washer": [1, 0], "bolt": [1]}
        client.snapshot("kept")
        client.set_prompts(["bolt", "spoon"], most={"bolt": 1})
        wait_for(client, "bolt")
        assert client.status()["exemplars"] == {"bolt": [1]}
        recorder.terminate()
        client.restore("kept")
        for reason, given in (("JPEG", {"photo": b"x"}), ("both", {"photo": photo, "seq": seq}), ("box", {})):
            with refuses(RequestError, field=reason):
                client.add_exemplar("washer", [(900, 900, 950, 950)], **given)
        with pytest.raises(UnknownFrameError):
            client.add_exemplar("washer", [BOX], seq=10**6)
        assert client.status()["exemplars"] == {"washer": [1, 0], "bolt": [1]}
    assert node.terminate() == 0
    options = ("-o", str(tmp_path / "out"), "--as-recorded", "--compare")
    done = run_command(["replay", tmp_path / "live.mcap", *options])
    assert (done.returncode, "identical" in done.stdout) == (0, True), done.stdout + done.stderr
