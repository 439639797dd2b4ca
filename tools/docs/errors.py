"""Table of the errors, with advice for each."""

import inspect

from sam3_node import errors
from sam3_node.errors import Sam3NodeError

from .tables import code, table

ADVICE = {
    "WireError": "Check the peer against wire version 1. A request with wrong arguments answers `bad_request` instead.",
    "TransportError": 'Check the endpoint: malformed, taken, or nobody answers in time. After "no answer" the node may '
    "still carry the request out.",
    "NoAnswerError": "Start the node, or correct the endpoint; wait longer: `--timeout`, or in Python `timeout_ms`. "
    "If the connection ended before the reply, look what the node did, then repeat the request.",
    "AuthenticationError": "Compare `sam3-node keys list` on both machines, see [security](security.md#keys).",
    "NotSeenError": "Look at the labels and states that the message lists; name the object with `set_prompts`, or mark "
    "it with `add_object`.",
    "AmbiguousError": "Remove or rename the wrong one of the objects that the message lists, name yours more "
    "exactly, or let the node look for one with `set_prompts(…, most=1)`.",
    "SettingsError": "Correct the field that the message names; it also says where the field was set.",
    "CameraError": "Check the device or the file; [cameras](cameras.md) lists the sources.",
    "CalibrationError": "Take the views that the message asks for, or correct the board, the poses or their units "
    "([calibration](calibration.md)).",
    "BagError": "Check the file and `--topics`. A damaged recording is read up to the damage.",
    "ReplayError": "The recording cannot be replayed as asked (`--allow-gaps` continues without what it lacks), or the "
    "results folder belongs to another job: choose another `-o`, or start over with `--again`.",
    "ModelError": "Check `model.name`: the weights are absent, damaged, of another kind, or asked for something they "
    "cannot do.",
    "DeviceError": "A supervisor (`launch/start`) starts the process again; without one, start it yourself. If it "
    "comes back, look for errors of the GPU in the kernel's log.",
    "EngineError": "Build the engine again on this machine, or look at the gate's report (`sam3-node engine check`).",
    "VocabularyError": "Build the vocabulary again with this detector's text encoder (`sam3-node vocabulary build`).",
    "SnapshotError": "Start with the weights and settings of the snapshot, or without it; or correct `snapshot.path` "
    "and the space of its folder. See [restarts](hand-over.md).",
    "RequestError": "Correct the prompt, operation, argument or camera that the message names.",
    "ForbiddenError": "Use a key of role operator (`transport.key`).",
    "UnknownObjectError": "List the objects (`sam3-node object list`).",
    "UnknownFrameError": "Raise `tracker.feature_cache_s`, or prompt on a newer frame.",
    "NoCameraError": "Start the camera, or wait for one: `client.wait_for_camera`. `object add` waits by itself.",
    "UnknownPhraseError": "Use one of the nearest phrases that the message names, or add the phrase to the vocabulary.",
    "NodeRestarted": "Forget every object id of that camera and add the objects again; the next call goes on. See "
    "[restarts](python-api.md#restarts).",
    "CapacityError": "`tracker.max_objects` are tracked: remove one. Or too many corrections of past frames catch up: "
    "wait a second.",
    "BusyError": "Wait for each reply before the next request. If another client floods the node, stop that client.",
    "SupersededError": "Nothing: the reply to the newer request follows.",
    "PolicyError": "Correct the name, shape, dtype or camera that the message names ([policies](policies.md)).",
    "MissingExtraError": "Install the extra that the message names.",
    "OutputError": "Check the path, the rights and the free space.",
    "ProcessError": "Read the last lines of the process, which the message carries.",
}


def error_classes() -> list[type[Sam3NodeError]]:
    """Return the subclasses of Sam3NodeError in the order of errors.py."""
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type))
    return [kind for kind in kinds if issubclass(kind, Sam3NodeError) and kind is not Sam3NodeError]


def error_table() -> str:
    """Return the table of errors. Raises KeyError for an error without advice."""
    named = {kind.__name__: kind for kind in error_classes()}
    rows = [[code(name), code(kind.code), _meaning(kind), ADVICE[name]] for name, kind in named.items()]
    fault = ["A fault in the node, which continues.", "Read the node's log: it has the traceback."]
    rows.append(["(none)", "`internal`", *fault])
    return table(["class", "code in a reply", "when", "what to do"], rows)


def _meaning(kind: type[Sam3NodeError]) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split()).removeprefix("Raised when ")
    return text[:1].upper() + text[1:]
