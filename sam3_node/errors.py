"""Defines all errors of this package. Each message says what was expected, what was found and what to do.

The first line of a class docstring states when the error is raised; the documentation is generated from it.
"""

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

CLI_MODULES = frozenset(
    {"pydantic", "pydantic_core", "pydantic_settings", "cv2", "packaging", "tqdm", "shtab"}
)
"""Modules of the extra `cli`, which every extra that runs a command includes."""
MAX_SUMMARY = 300
"""Characters of the first line of an error in a summary. Libraries write pages into one line."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


class Sam3NodeError(Exception):
    """Base class of all errors of this package. Control replies carry its `code`."""

    code = "error"
    may_pass = False
    """True if a retry may succeed with the same settings, such as when a device, an address or a host is absent now."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.request_id = current_request_id()
        """Id of the request that was refused or not answered; the node's log and events name it. None: of none."""

    # the code stands with the class, as in `class WireError(Sam3NodeError, code="bad_message")`
    def __init_subclass__(cls, code: str | None = None) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code


class WireError(Sam3NodeError, code="bad_message"):
    """Raised when bytes are not a valid message of wire version 1."""


class TransportError(Sam3NodeError, code="transport"):
    """Raised when a socket cannot be opened or a peer does not answer in time."""


class NoAnswerError(TransportError, code="no_answer"):
    """Raised when a node does not answer a request in time. It may still execute the request."""


class AuthenticationError(TransportError, code="authentication"):
    """Raised when a key is missing, damaged or readable by other users, or when the peer refuses it."""


class NotSeenError(Sam3NodeError, code="not_seen"):
    """Raised when masks arrive, but no object with the wanted label is tracked in time. The message names the
    others."""


class AmbiguousError(Sam3NodeError, code="ambiguous"):
    """Raised when more objects have the wanted label than were asked for. The message names them."""


class SettingsError(Sam3NodeError, code="settings"):
    """Raised when a profile, an environment variable, an option or a calibration file is invalid."""


class CameraError(Sam3NodeError, code="camera"):
    """Raised when a camera or a video file cannot be opened or read."""


class CalibrationError(Sam3NodeError, code="calibration"):
    """Raised when images or poses give no calibration: too few, too alike, inconsistent, or of another board."""


class BagError(Sam3NodeError, code="bag"):
    """Raised when a recording is damaged or truncated, or lacks the requested data."""


class ReplayError(Sam3NodeError, code="replay"):
    """Raised when a replay cannot start or resume, or its checkpoint is damaged or from another job, model or bank."""


class ModelError(Sam3NodeError, code="model"):
    """Raised when weights or a configuration cannot be used as a tracker."""


class DeviceError(Sam3NodeError, code="device"):
    """Raised when this process has lost the GPU. Restart the process."""


class EngineError(Sam3NodeError, code="engine"):
    """Raised when an engine cannot be built, belongs to another machine or model, or fails the gate."""


class VocabularyError(Sam3NodeError, code="vocabulary"):
    """Raised when a vocabulary or text encoder is damaged, incomplete, or does not match the detector's model."""


class SnapshotError(Sam3NodeError, code="snapshot"):
    """Raised when a snapshot is damaged, does not match version, model or tracker, or cannot be written or fetched."""


class RequestError(Sam3NodeError, code="bad_request"):
    """Raised when a well-formed control request has a wrong prompt, operation or argument."""


class ForbiddenError(RequestError, code="forbidden"):
    """Raised when the role of a client's key does not permit a request."""


class UnknownObjectError(RequestError, code="unknown_object"):
    """Raised when a request names an object id that is not tracked."""


class UnknownFrameError(RequestError, code="unknown_frame"):
    """Raised when the node does not keep the features of the requested frame, or no longer keeps them."""


class NoCameraError(UnknownFrameError, code="no_camera"):
    """Raised when a request needs a frame of a camera that has sent none yet."""


class UnknownPhraseError(RequestError, code="unknown_phrase"):
    """Raised when the vocabulary lacks a phrase and no text encoder is available."""


class NodeRestarted(Sam3NodeError, code="node_restarted"):  # noqa: N818 - an occurrence to react to, such as StopIteration
    """Raised when the object ids of a camera have begun again. An id now names another object than before.

    The node restarted, or it dropped a silent camera and serves it anew. `camera` names the camera. Unknown
    attributes are None, such as `new_epoch` and `node` when the node refused a request.
    """

    def __init__(
        self,
        message: str = "",
        *,
        camera: str | None = None,
        old_epoch: int | None = None,
        new_epoch: int | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(message)
        self.camera = camera
        self.old_epoch = old_epoch
        self.new_epoch = new_epoch
        self.node = node


class CapacityError(RequestError, code="full"):
    """Raised when the node already tracks the maximum number of objects."""


class BusyError(RequestError, code="busy"):
    """Raised when the node did not execute a request, because too many others were waiting."""


class SupersededError(RequestError, code="superseded"):
    """Raised when the node did not execute a request, because a newer one of the same client replaced it."""


class PolicyError(Sam3NodeError, code="policy"):
    """Raised when an observation for a policy cannot be made, or the policy server's reply is invalid or an error."""


class MissingExtraError(Sam3NodeError, code="missing_extra"):
    """Raised when an optional dependency is missing. The message names the extra that installs it."""


class OutputError(Sam3NodeError, code="output"):
    """Raised when a file (video, image, bag, report) cannot be written."""


class ProcessError(Sam3NodeError, code="process"):
    """Raised when a process of a group cannot be started, does not become ready, or ends early."""


def install_advice(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f"pip install 'sam3-node[{extra}]', or pip install -e '.[{extra}]' in a checkout"


def find_version(package: str) -> str | None:
    """Return the version of an installed package; None for one that is not, such as this one in a bare checkout."""
    # imported here: it is a tenth of the time that a client takes to import
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require(module: str, extra: str) -> ModuleType:
    """Import and return `module`.

    Raises MissingExtraError that names the extra of this package that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # the module is there, but one that it needs itself is not: the extra would not help
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise _make_missing(module, extra) from error


def require_installed(module: str, extra: str) -> None:
    """Raise MissingExtraError, as `require` does, if `module` is not installed. Does not import it."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that the module is in
        found = None
    if found is None:
        raise _make_missing(module, extra)


def _make_missing(module: str, extra: str) -> MissingExtraError:
    return MissingExtraError(
        f"{module} is not installed; it comes with the extra '{extra}': {install_advice(extra)}"
    )


def explain_missing(error: ModuleNotFoundError) -> MissingExtraError | None:
    """Return the error that names the extra of a module of the command line; None for any other module."""
    if (error.name or "").split(".")[0] not in CLI_MODULES:
        return None
    return MissingExtraError(
        f"{error.name} is not installed: the package alone is the client for policies. Cameras and commands need "
        f"{install_advice('cli')}; the node and replay need the extras 'node,bags', recordings 'bags', the console "
        "'console'"
    )


def did_you_mean(found: object, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" with the name that is most similar to `found`, or "" if none is similar.

    Upper and lower case count as equal. The text goes at the end of an error message.
    """
    import difflib  # here, because it slows the start of a client

    # compared without case, and given back as it is spelt
    by_key = {name.casefold(): name for name in names}
    nearest = difflib.get_close_matches(str(found).casefold(), by_key, n=1)
    if not nearest:
        return ""
    return f"; did you mean {by_key[nearest[0]]}?"


def summarize_error(error: BaseException) -> str:
    """Return the type and the first line of an error; at most MAX_SUMMARY characters of that line."""
    first_line = str(error).strip().split("\n")[0]
    # an error without a message is its type alone
    return f"{type(error).__name__}: {first_line[:MAX_SUMMARY]}".removesuffix(": ")


@contextmanager
def request_id(name: str | None) -> Iterator[None]:
    """Within the block, the requests of this thread or task have this id, and so have its lines of log and its errors.

    The node repeats it in its log, and in the events about these requests. It has 1 to 64 letters, digits, and _ . : -;
    RequestError for any other. None: each request has an id of its own, which its client makes.
    """
    if name is not None:
        check_request_id(name)
    token = _request_id.set(name)
    try:
        yield
    finally:
        _request_id.reset(token)


def check_request_id(name: str) -> str:
    """Return an id of requests. Raises RequestError for one that `request_id` refuses."""
    if not isinstance(name, str) or not _REQUEST_ID.fullmatch(name):
        raise RequestError(f"request_id: expected 1 to 64 letters, digits and _ . : -, found {name!r:.80}")
    return name


def current_request_id() -> str | None:
    """Return the id that `request_id` has set; None for none."""
    return _request_id.get()


def make_error(code: str, message: str) -> Sam3NodeError:
    """Return an error of the class with this code; a RequestError if no class has it."""
    # breadth first through all subclasses, also those of other modules: the list grows while it is read
    classes: list[type[Sam3NodeError]] = [Sam3NodeError]
    for error_class in classes:
        if error_class.code == code:
            return error_class(message)
        classes += error_class.__subclasses__()
    return RequestError(f"{code}: {message}")
