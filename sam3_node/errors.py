"""The one family of errors: each says what was expected, what was found and, where it helps, what to do."""

from __future__ import annotations

import importlib
from types import ModuleType


class Sam3NodeError(Exception):
    """Base of every error this package raises on purpose. `code` is what a control reply carries."""

    code = "error"


class WireError(Sam3NodeError):
    """Bytes that are not a valid message of wire version 1."""

    code = "bad_message"


class TransportError(Sam3NodeError):
    """A socket could not be opened, or a peer did not answer in time."""

    code = "transport"


class SettingsError(Sam3NodeError):
    """A profile, environment variable, option or calibration file that does not validate."""

    code = "settings"


class CameraError(Sam3NodeError):
    """A camera or video file that cannot be opened or read."""

    code = "camera"


class BagError(Sam3NodeError):
    """A recording that is damaged, truncated, or holds nothing of what was asked for."""

    code = "bag"


class ReplayError(Sam3NodeError):
    """A replay that cannot begin or go on: a checkpoint that is damaged, or of another job, model or bank."""

    code = "replay"


class ModelError(Sam3NodeError):
    """Weights or a configuration that cannot serve as a tracker."""

    code = "model"


class EngineError(Sam3NodeError):
    """An engine that cannot be built, is not this machine's or model's, or that the gate refuses."""

    code = "engine"


class VocabularyError(Sam3NodeError):
    """A vocabulary or text encoder that is damaged, incomplete, or another model's than the detector's."""

    code = "vocabulary"


class RequestError(Sam3NodeError):
    """A control request that is well-formed but wrong: a bad prompt, an unknown operation or argument."""

    code = "bad_request"


class UnknownObjectError(RequestError):
    """An object id that is not tracked."""

    code = "unknown_object"


class UnknownFrameError(RequestError):
    """A frame sequence number whose features are no longer (or not yet) held."""

    code = "unknown_frame"


class UnknownPhraseError(RequestError):
    """A phrase that the vocabulary does not hold, where no text encoder is at hand."""

    code = "unknown_phrase"


class CapacityError(RequestError):
    """No room for another object."""

    code = "full"


class MissingExtraError(Sam3NodeError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    code = "missing_extra"


class OutputError(Sam3NodeError):
    """A file (video, image, bag, report) that cannot be written."""

    code = "output"


class ProcessError(Sam3NodeError):
    """A process of a group that could not be started, did not become ready, or ended early."""

    code = "process"


def install_advice(extra: str) -> str:
    """How an extra of this package is installed."""
    return f"pip install 'sam3-node[{extra}]', or pip install -e '.[{extra}]' in a checkout"


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise MissingExtraError naming the extra of this package that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{module} is not installed; it comes with the extra '{extra}': {install_advice(extra)}"
        ) from error
