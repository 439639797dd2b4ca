"""All that is like a box, live: on a frame and on a photo, in snapshots, and in a replay as recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import RequestError, UnknownFrameError
from sam3_node.types import MaskFrame
from tests.support.node_rig import Rig, masks_where
from tests.support.refuses import refuses
from tests.support.tiny_detectors import picture, write_tiny_sam3

BOX, OTHER = (60, 60, 140, 150), (200, 100, 290, 190)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A node with SAM 3's detector and random weights, which a recorder listens to."""
    rig = Rig(tmp_path_factory.mktemp("rig"))
    write_tiny_sam3(rig.folder / "detector")
    rig.environment |= {
        "SAM3_CAMERA__FPS": "5",
        "SAM3_DETECTOR__KIND": "sam3-concept",
        "SAM3_DETECTOR__NAME": str(rig.folder / "detector"),
        "SAM3_DETECTOR__EVERY": "2",
        "SAM3_DETECTOR__SCORE": "0.02",
        "SAM3_SNAPSHOT__PATH": str(rig.folder / "node.snapshot"),
        "SAM3_TRACKER__FEATURE_CACHE_S": "20",
    }
    yield rig
    rig.close()


def found(client: PerceptionClient, label: str) -> MaskFrame:
    return masks_where(
        client, lambda masks: any(item.label == label for item in masks.instances), f"a {label}"
    )


def shown(client: PerceptionClient) -> dict:
    return client.status()["exemplars"]


def test_what_is_like_a_box_is_found_kept_and_replayed(rig: Rig, tmp_path: Path) -> None:
    recorder = rig.start("record", str(tmp_path / "live.mcap"))
    node = rig.node()
    rig.camera()
    with rig.client() as client:
        seq = masks_where(client, lambda masks: True, "masks").seq
        client.add_exemplar("washer", [BOX], seq=seq)
        assert found(client, "washer").prompts == ("washer",)
        client.add_exemplar("washer", [OTHER], [0], seq=seq)
        done, photo = cv2.imencode(".png", picture())
        assert done
        client.add_exemplar("bolt", [(10, 20, 60, 70)], text="red mug", photo=photo.tobytes())
        found(client, "bolt")
        both = {"washer": [1, 0], "bolt": [1]}
        assert shown(client) == both
        client.snapshot("kept")
        client.set_prompts(["bolt", "spoon"], most={"bolt": 1})
        assert list(shown(client)) == ["bolt"]
        found(client, "spoon")
        recorder.terminate()
        client.restore("kept")
        assert shown(client) == both
        for reason, given in {
            "JPEG": {"photo": b"x"},
            "both": {"photo": b"x", "seq": seq},
            "box": {},
        }.items():
            with refuses(RequestError, field=reason):
                client.add_exemplar("washer", [(900, 900, 950, 950)], **given)
        with pytest.raises(UnknownFrameError):
            client.add_exemplar("washer", [BOX], seq=10**6)
        assert shown(client) == both
    assert node.terminate() == 0
    command = [
        sys.executable,
        "-m",
        "sam3_node",
        "replay",
        str(tmp_path / "live.mcap"),
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*command, "--as-recorded", "--compare"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout
