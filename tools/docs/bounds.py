"""The table of inputs: who may send each, how much of it is taken, what happens beyond, and the test that shows it.

The bounds are read from the code, so a changed constant changes the page. A constant that has gone fails the check.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .tables import code, table

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def _megabytes(value: float) -> str:
    """Return bytes in the largest unit that keeps the number whole enough to read."""
    for size, unit in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g} bytes"


def _unit(name: str) -> Callable[[float], str]:
    return lambda value: f"{value:,.0f} {name}"


class Bound(NamedTuple):
    """A bound of an input: a constant, and how to write its value."""

    constant: str
    """module.NAME, below `sam3_node`"""
    write: Callable[[float], str]


class Input(NamedTuple):
    """One kind of input from outside."""

    name: str
    sender: str
    bounds: tuple[Bound, ...]
    beyond: str
    tests: tuple[str, ...]
    """file::test, or file, below `tests`"""


STRANGER = "a stranger"
CAMERA = "a camera"
ROBOT = "a robot"
OPERATOR = "an operator"
AUTHOR = "the author of the file"
SERVER = "the server of the URL"

INPUTS: tuple[Input, ...] = (
    Input(
        "connection to a socket that binds",
        STRANGER,
        (Bound("transport.limits.MAX_CONNECTIONS", _unit("connections")),),
        "the next is ended",
        ("transport/test_strangers.py::test_connections_beyond_the_limit_are_cut_off",),
    ),
    Input(
        "part of a message: of a frame, of masks, of a request, of a subscription",
        STRANGER,
        (
            Bound("transport.sockets.MAX_FRAME_BYTES", _megabytes),
            Bound("transport.sockets.MAX_MESSAGE_BYTES", _megabytes),
            Bound("transport.sockets.MAX_REQUEST_BYTES", _megabytes),
            Bound("transport.sockets.MAX_SUBSCRIPTION_BYTES", _megabytes),
        ),
        "the connection ends",
        ("transport/test_strangers.py::test_a_part_above_the_limit_of_its_socket_ends_the_connection",),
    ),
    Input(
        "memory of a camera on this machine",
        CAMERA,
        (
            Bound("transport.shared_frames.MAX_RING_BYTES", _megabytes),
            Bound("transport.shared_frames.MAX_RINGS", _unit("cameras")),
        ),
        "the frames come through the socket; so they do from memory that is not sealed, or lacks its token",
        ("transport/test_shared_frames.py",),
    ),
    Input(
        "image of a frame",
        CAMERA,
        (
            Bound("wire.images.MAX_FRAME_PIXELS", _unit("pixels")),
            Bound("wire.images.MAX_SCANS", _unit("scans")),
        ),
        "the frame is skipped and counted; nothing is decoded",
        ("wire/test_hostile_images.py::test_more_pixels_than_allowed_are_refused",),
    ),
    Input(
        "video of a camera",
        CAMERA,
        (
            Bound("wire.video.MAX_VIDEO_PIXELS", _unit("pixels")),
            Bound("transport.channels.MAX_VIDEO_FPS", _unit("packets/s")),
            Bound("transport.channels.MAX_VIDEO_PIXELS_PER_S", _unit("pixels/s")),
        ),
        "the packet is rejected, and the next picture is that of a key frame; so is one of another size or without a "
        "picture",
        ("transport/test_video.py",),
    ),
    Input(
        "capture time of a frame, a pose or joints",
        f"{CAMERA}, {ROBOT}",
        (Bound("node.cameras.MAX_AHEAD_S", _unit("s ahead")),),
        "skipped, counted and told",
        ("node/test_hostile_robot.py::test_a_clock_that_was_an_hour_ahead_costs_no_later_frame",),
    ),
    Input(
        "joints of one message",
        ROBOT,
        (Bound("transport.tap.MAX_JOINTS", _unit("names")),),
        "the message is rejected, counted and told",
        (
            "transport/test_robot_flood.py::"
            "test_a_joint_state_of_too_many_joints_is_rejected_and_the_robot_goes_on",
        ),
    ),
    Input(
        "poses and joints of one topic",
        ROBOT,
        (
            Bound("transport.tap.MAX_POSES_PER_S", _unit("messages/s")),
            Bound("transport.tap.MAX_POSES_BYTES_PER_S", lambda value: f"{_megabytes(value)}/s"),
        ),
        "others are skipped before they are unpacked; a flood ends the connection for a while",
        (
            "transport/test_robot_flood.py::test_of_a_flood_no_more_is_unpacked_than_the_rate",
            "node/test_hostile_robot.py::test_a_flood_of_joints_stops_no_masks",
        ),
    ),
    Input(
        "poses and joints that wait",
        ROBOT,
        (
            Bound("transport.tap.MAX_POSES", _unit("messages")),
            Bound("transport.tap.MAX_WAITING_BYTES", _megabytes),
        ),
        "the oldest are dropped",
        ("transport/test_robot_flood.py::test_what_waits_is_bounded_in_memory_and_the_newest_is_kept",),
    ),
    Input(
        "poses and joints that are remembered",
        ROBOT,
        (
            Bound("node.cameras.CAPACITY", _unit("messages")),
            Bound("node.cameras.MAX_TRACK_VALUES", _unit("numbers")),
        ),
        "what came first is forgotten",
        ("node/test_robot_poses.py::test_joints_of_many_names_take_no_more_memory_than_a_robot_s",),
    ),
    Input(
        "photo of an exemplar",
        OPERATOR,
        (
            Bound("wire.images.MAX_PHOTO_MEMORY", lambda value: f"{value / 1e6:g} MB to decode it"),
            Bound("wire.images.MAX_PHOTO_FILE", _megabytes),
        ),
        "`bad_request`; nothing is decoded. Photos are decoded in a thread of their own, one at a time",
        ("node/test_photos.py::test_a_photo_of_many_pixels_is_refused_before_it_is_decoded",),
    ),
    Input(
        "boxes of all exemplars",
        OPERATOR,
        (Bound("detection.detectors.MAX_ALL_BOXES", _unit("boxes")),),
        "`bad_request`",
        ("detection/test_sam3_concept.py::test_the_boxes_of_all_exemplars_are_limited",),
    ),
    Input(
        "mask of a request",
        OPERATOR,
        (Bound("wire.masks.MAX_PROMPT_BYTES", lambda value: f"{_megabytes(value)}, the size of the frame"),),
        "`bad_request`; nothing is decoded",
        ("node/test_photos.py::test_a_mask_of_many_counts_is_refused_before_it_is_decoded",),
    ),
    Input(
        "pinned frames; lease of one",
        OPERATOR,
        (
            Bound("node.operations.MAX_PINNED", _unit("frames")),
            Bound("schema.replies.MAX_LEASE_S", _unit("s")),
        ),
        "`capacity`, `bad_request`",
        ("client/test_shared_client.py",),
    ),
    Input(
        "URDF; its links; its bodies",
        AUTHOR,
        (
            Bound("robot.robot_model.MAX_URDF_BYTES", _megabytes),
            Bound("robot.robot_model.MAX_LINKS", _unit("links")),
            Bound("robot.robot_model.MAX_PARTS", _unit("bodies")),
        ),
        "the start ends with the reason; so do circles, two parents and unknown links",
        (
            "robot/test_hostile_robot.py::test_a_urdf_of_very_many_links_is_refused",
            "robot/test_hostile_robot.py::test_what_is_no_tree_of_finite_numbers_is_named",
        ),
    ),
    Input(
        "mesh; all meshes of a URDF",
        AUTHOR,
        (
            Bound("robot.mesh_reader.MAX_MESH_BYTES", _megabytes),
            Bound("robot.mesh_reader.MAX_TRIANGLES", _unit("triangles")),
            Bound(
                "robot.mesh_reader.MAX_MEMORY_BYTES",
                lambda value: f"{_megabytes(value)} of a child process",
            ),
            Bound("robot.mesh_reader.MAX_MESH_S", _unit("s of processor time")),
            Bound("robot.meshes.MAX_MESHES_BYTES", _megabytes),
        ),
        "the start ends with the reason. Archives are refused",
        (
            "robot/test_hostile_robot.py::test_a_small_mesh_that_grows_is_refused",
            "robot/test_hostile_robot.py::test_an_archive_is_not_unpacked",
        ),
    ),
    Input(
        "corners of a body's hull",
        AUTHOR,
        (Bound("robot.hulls.MAX_CORNERS", _unit("corners")),),
        "a larger hull of so many takes its place; the log tells the error in mm",
        ("robot/test_hostile_robot.py::test_a_thinned_hull_is_around_the_whole_one",),
    ),
    Input(
        "snapshot",
        AUTHOR,
        (
            Bound("perception.snapshot.MAX_BYTES", _megabytes),
            Bound("perception.checkpoint.MAX_STATE_ITEMS", _unit("items")),
        ),
        "refused before anything changes; at a start it is put aside. Each value is checked",
        (
            "perception/test_hostile_states.py::test_each_value_is_right_or_refused",
            "test_hostile_files.py::test_what_is_no_file_is_refused_at_once",
        ),
    ),
    Input(
        "picture of an object in a snapshot",
        AUTHOR,
        (Bound("perception.object_memory.MAX_PICTURE_BYTES", _megabytes),),
        "the snapshot is refused; so are other bytes than a small JPEG",
        (
            "perception/test_hostile_states.py::"
            "test_a_wrong_value_that_each_step_would_stumble_over_is_refused",
        ),
    ),
    Input(
        "state of a replay",
        AUTHOR,
        (
            Bound("perception.checkpoint.MAX_RATIO", lambda value: f"unpacked, {value:g} times its bytes"),
            Bound("perception.checkpoint.MAX_STATE_ITEMS", _unit("items")),
        ),
        "the replay ends with the reason",
        ("perception/test_checkpoint.py::test_a_state_that_was_made_up_is_refused_within_bounded_memory",),
    ),
    Input(
        "settings, calibration, job, prompts, scales",
        AUTHOR,
        (
            Bound("settings.MAX_TOML_BYTES", lambda value: f"settings and calibration {_megabytes(value)}"),
            Bound("replay.job.MAX_OBJECTS_BYTES", lambda value: f"job {_megabytes(value)}"),
            Bound("cli.requests.MAX_SET_BYTES", lambda value: f"prompts {_megabytes(value)}"),
            Bound("engines.quantize.MAX_JSON_BYTES", lambda value: f"scales {_megabytes(value)}"),
        ),
        "an error that names the file; pipes, devices and folders in its place likewise",
        ("test_hostile_files.py::test_what_is_no_file_is_refused_at_once",),
    ),
    Input(
        "configuration beside weights",
        AUTHOR,
        (
            Bound("models.weight_files.MAX_JSON_BYTES", _megabytes),
            Bound("models.weight_files.MAX_LAYERS", lambda value: f"{value:g} layers of a kind"),
            Bound("models.weight_files.MAX_CONFIG_NUMBER", lambda value: f"numbers up to {value:,.0f}"),
            Bound(
                "models.weight_files.SPARE_ELEMENTS",
                lambda value: f"elements of the model: the bytes of its files and {value / 1e6:.0f} million",
            ),
        ),
        "the weights are refused before the model is built; so are normalisations that make no pixels",
        (
            "models/test_hostile_weights.py::test_the_numbers_of_a_configuration_are_bounded",
            "models/test_hostile_weights.py::test_a_configuration_of_a_larger_model_takes_no_memory",
            "models/test_hostile_weights.py::test_a_normalisation_that_makes_no_pixels_is_refused",
        ),
    ),
    Input(
        "tensors of SAM 3.1",
        AUTHOR,
        (
            Bound("models.weight_files.MAX_LAYERS", lambda value: f"{value:g} layers of a kind"),
            Bound("models.sam31.checkpoint.MAX_GRID", lambda value: f"{value:g} tokens along a side"),
        ),
        "the weights are refused before the model is built; so are empty tensors",
        ("models/test_hostile_weights.py::test_the_sizes_of_sam31_are_bounded",),
    ),
    Input(
        "detector in ONNX; what stands beside it",
        AUTHOR,
        (
            Bound("detection.onnx_detector.MAX_FILE_BYTES", _megabytes),
            Bound("detection.onnx_layouts.MAX_SIDE", lambda value: f"inputs of {value:g} pixels a side"),
            Bound("detection.onnx_layouts.MAX_CLASSES", _unit("classes")),
            Bound("detection.onnx_detector.MAX_BOXES", _unit("boxes")),
            Bound("detection.onnx_layouts.MAX_NOTES_BYTES", lambda value: f"names, TOML {_megabytes(value)}"),
        ),
        "refused, with what was found; boxes that are not finite cost the detections of their frame. Weights are read "
        "from the file's folder alone. **Memory and time of the network itself have no bound**",
        ("detection/test_onnx_detector.py::test_weights_beside_the_file_are_read_and_others_are_not",),
    ),
    Input(
        "weights in torch's format",
        AUTHOR,
        (
            Bound("models.torch_files.MAX_PICKLE_BYTES", lambda value: f"pickle {_megabytes(value)}"),
            Bound("models.torch_files.MAX_MEMBERS", _unit("members")),
            Bound("models.torch_files.MAX_GROWTH", lambda value: f"tensors {value:g} times the file's bytes"),
        ),
        "refused before torch opens it; so are compressed members, and calls that allocate what the file says",
        ("models/test_hostile_weights.py::test_a_file_in_torchs_format_is_checked_before_it_grows",),
    ),
    Input(
        "JSON and TOML of a file",
        AUTHOR,
        (Bound("schema.fields.MAX_LEVELS", _unit("levels")),),
        "an error that names the file; so are NaN in JSON, and numbers of thousands of digits",
        (
            "test_files.py::test_json_beyond_its_limits_is_one_kind_of_error",
            "test_file_fuzz.py::test_mutated_files_are_read_or_refused",
        ),
    ),
    Input(
        "answer of an OpenTelemetry collector",
        SERVER,
        (Bound("node.collector.MAX_ANSWER_BYTES", _megabytes), Bound("node.spans.EXPORT_S", _unit("s"))),
        "the export fails and is told; no body is read, no redirect is followed",
        (
            "node/test_collector.py::test_a_hostile_answer_costs_little_and_is_told",
            "node/test_collector.py::test_masks_go_on_while_a_collector_answers_without_an_end",
        ),
    ),
    Input(
        "value and recording of a store at a URL",
        SERVER,
        (
            Bound("replay.store.MAX_FETCHED_BYTES", _megabytes),
            Bound("replay.store.KEPT_FREE_BYTES", lambda value: f"{_megabytes(value)} of the disk stay free"),
        ),
        "the replay ends with the reason",
        (
            "replay/test_store.py::test_a_value_and_a_token_are_read_up_to_a_bound",
            "replay/test_store.py::test_an_endless_recording_is_given_up",
        ),
    ),
    Input(
        "request to the console; its pages",
        "a browser",
        (
            Bound("console.app.MAX_BODY_BYTES", _megabytes),
            Bound("console.app.MAX_PAGES", _unit("pages")),
        ),
        "413, 503; other forms of `Host` than HOST:PORT: 403",
        ("console/test_access.py::test_other_hosts_and_origins_are_refused", "test_addresses.py"),
    ),
    Input(
        "edits of a dataset on the console's page; their file",
        "a browser; the author of the file",
        (
            Bound("recording.lerobot.pending.MAX_EDITS", _unit("edits")),
            Bound("recording.lerobot.pending.MAX_BYTES", _megabytes),
        ),
        "refused; so are times outside of the episode, and names of the copy that lead out of the dataset's folder",
        (
            "console/test_episodes.py::test_wrong_requests_change_nothing",
            "recording/lerobot/test_pending.py::test_edits_are_bounded",
        ),
    ),
    Input(
        "requests to the console and to the tools for agents that are not whole",
        "a browser, an agent",
        (
            Bound("unfinished_requests.MAX_UNFINISHED", _unit("connections")),
            Bound("unfinished_requests.MAX_REQUEST_S", _unit("s")),
        ),
        "the oldest connection ends; so does one that takes longer",
        ("mcp/test_server.py::test_requests_without_an_end_are_bounded_in_number_and_time",),
    ),
    Input(
        "calls of an agent that wait; a request of it over HTTP; its sessions",
        "an agent",
        (
            Bound("mcp.server.MAX_WAITING", _unit("calls")),
            Bound("mcp.server.MAX_BODY_BYTES", _megabytes),
            Bound("mcp.server.MAX_SESSIONS", _unit("sessions")),
        ),
        "`busy`; 413; 503. Other forms of `Host`: 421",
        ("mcp/test_node.py::test_a_flood_is_bounded_and_answered", "mcp/test_server.py"),
    ),
)


def bounds_table() -> str:
    """Return the table of inputs. Raises LookupError for a constant or a test that is not there."""
    rows = []
    for item in INPUTS:
        bounds = "; ".join(bound.write(_read(bound.constant)) for bound in item.bounds)
        tests = ", ".join(dict.fromkeys(map(_link, item.tests)))
        rows.append((item.name, item.sender, bounds, item.beyond, tests))
    return table(("input", "from", "bound", "beyond it", "test"), rows)


def _read(constant: str) -> float:
    module, _, name = constant.rpartition(".")
    found = importlib.import_module(f"sam3_node.{module}")
    if not hasattr(found, name):
        raise LookupError(f"{constant}: expected a constant of this name; correct INPUTS in {__file__}")
    return float(getattr(found, name))


def _link(test: str) -> str:
    """Return a link to the file of a test, once the test is known to be there."""
    file, _, name = test.partition("::")
    path = ROOT / "tests" / file
    if not path.is_file():
        raise LookupError(f"{test}: expected a file of tests, found none; correct INPUTS in {__file__}")
    if name and not re.search(rf"^(async )?def {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
        raise LookupError(f"{test}: expected a test of this name; correct INPUTS in {__file__}")
    return f"[{code(path.stem)}](../tests/{file})"
