"""The command `doctor`: it checks the installation, the machine, the files that the settings name, and a running node.

It needs no optional dependency.
"""

import importlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..cameras.sources import list_realsense, open_camera
from ..errors import CameraError, ModelError, Sam3NodeError, did_you_mean, find_version, install_advice
from ..gpu_memory import BY_HUB_NAME, OBJECTS, GpuMemory
from ..settings import CameraSettings, RobotSettings, Settings, TransportSettings, describe_robot_gaps
from ..types import JointState
from .light import NODE_TIMEOUT_MS

PYTHON = ">=3.11"
OTHER_ENVIRONMENTS = ("dev", "lerobot-policy")
"""Extras that the command does not advise for the node's environment: lerobot has an older torch."""
OPENCV = ">=4.14,<5"
NETWORK_SCHEMES = ("tcp", "ipc", "rtsp", "rtsps", "http", "https")
"""Schemes of camera sources that are addresses."""
POSES_S = 1.0
"""Seconds for which poses and joints are listened for."""
OPENCV_BUILDS = (
    "opencv-python-headless",
    "opencv-python",
    "opencv-contrib-python-headless",
    "opencv-contrib-python",
)
"""Packages that install the module cv2. Any one of them will do; the first is what the extra cli asks for."""
CLOCK_SYNC_FILES = ("/run/systemd/timesync/synchronized", "/run/chrony/chronyd.pid", "/var/run/ntpd.pid")
"""Files that time services have while they run."""
BUSY_SHARE = 0.5
"""Share of the processors that programs keep busy from which steps may wait for others."""
GPUS_GB = {
    "T4": 16,
    "RTX 3090": 24,
    "RTX 4070": 12,
    "RTX 4090": 24,
    "RTX 5090": 32,
    "L4": 24,
    "L40S": 48,
    "A10G": 24,
    "A100": 40,
    "A100 80GB": 80,
    "H100": 80,
    "H200": 141,
    "Jetson AGX Orin": 64,
    "Jetson Thor": 128,
}
"""Nominal memory of GPUs in GB. A driver keeps some of it; a Jetson's programs share it."""
UNCALIBRATED = "; the confidence of {} is not calibrated for these weights"
"""What is said of weights to whose masks or names the confidence was not fitted."""

Status = Literal["ok", "warn", "fix"]
ABSENT = "not installed"


class CheckResult(NamedTuple):
    """The result of one check. `warn` marks a limitation, `fix` a fault of the core; `hint` is the remedy."""

    name: str
    status: Status
    detail: str
    hint: str = ""


class NamedGpu(NamedTuple):
    """A GPU that this machine need not have."""

    name: str
    memory_gb: float


def parse_gpu(text: str) -> NamedGpu:
    """Parse the name of a GPU of GPUS_GB, with any case and gaps, or its memory, such as 24GB."""
    by_key = {_simplify(name): name for name in GPUS_GB}
    name = by_key.get(_simplify(text))
    if name is not None:
        return NamedGpu(name, GPUS_GB[name])
    size = re.fullmatch(r"([1-9][0-9]{0,3})gb", _simplify(text))
    if size is None:
        raise ValueError(
            f"expected a GPU of {', '.join(GPUS_GB)}, or its memory, such as 24GB; found {text!r:.60}"
            f"{did_you_mean(text, GPUS_GB)}"
        )
    return NamedGpu(f"a GPU of {size[1]} GB", int(size[1]))


def _simplify(name: str) -> str:
    return re.sub(r"[ _-]", "", name.casefold())


def run_doctor(settings: Settings, gpu: NamedGpu | None = None) -> int:
    """Print the results of all checks, and the estimate for `gpu`. Return 1 if any of them is `fix`, else 0."""
    # all checks run before anything is printed, so that the columns have one width
    results = list(run_checks(settings))
    if gpu is not None:
        results.append(_check_memory(settings, gpu.memory_gb, f" of {gpu.name}, nominal"))
    width = max(len(result.name) for result in results)
    for result in results:
        line = f"{result.status:<4}  {result.name:<{width}}  {result.detail}"
        if result.hint:
            line += f"  -> {result.hint}"
        print(line)
    faults = sum(result.status == "fix" for result in results)
    if faults:
        print(f"{faults} to fix")
        return 1
    print("the core works")
    return 0


def run_checks(settings: Settings) -> Iterator[CheckResult]:
    """Run all checks and yield their results."""
    python = ".".join(map(str, sys.version_info[:3]))
    # from what everything needs to what only some machines have
    yield _check_version("python", python, PYTHON, "fix", "install Python 3.11 or newer")
    yield from _check_dependencies()
    yield from _check_opencv()
    yield from _check_torch(settings.model.device)
    yield from _check_options(settings)
    yield _check_realsense()
    yield _check_cpu()
    yield _check("keys", partial(_describe_keys, settings.transport))
    for path in filter(None, (settings.camera.calibration, *settings.spatial.calibration)):
        yield _check("calibration", partial(_describe_calibration, path))
    yield from _check_cameras(settings)
    yield from _check_robot(settings)
    for what in ("model", "detector"):
        yield _check_weights(what, settings)
    # a node that runs holds its endpoints: only without one can they be tried
    node = _ask_node(settings)
    if isinstance(node, Sam3NodeError):
        for name in ("masks", "control"):
            describe = partial(_describe_endpoint, getattr(settings.transport, name), settings.transport)
            hint = f"no problem if a node runs there; else choose another --transport.{name}"
            yield _check(f"transport.{name}", describe, "warn", hint)
        yield CheckResult("node", "warn", f"{node}", "no problem if none should run")
    else:
        yield _judge_node(settings.transport.control, node)
    yield _check_clock()


def _check_dependencies() -> Iterator[CheckResult]:
    version = find_version("sam3-node")
    if version is None:
        yield CheckResult(
            "sam3-node", "warn", "not installed, running from source", "pip install -e '.[node]'"
        )
        return
    yield CheckResult("sam3-node", "ok", version)
    extras: dict[str, list[CheckResult]] = {}
    # requirements of the metadata by the extra that asks for them; "" is the core
    for requirement in map(Requirement, metadata.requires("sam3-node") or []):
        marked = re.search(r'extra == "([^"]+)"', str(requirement.marker))
        extra = ""
        if marked:
            extra = marked[1]
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if applies and requirement.name != "sam3-node" and extra not in OTHER_ENVIRONMENTS:
            extras.setdefault(extra, []).append(_check_dependency(requirement, extra))
    yield from extras.pop("", ())
    # an extra counts as absent if any of its packages is; its other packages are still compared
    absent = []
    for name, found in extras.items():
        if any(result.detail == ABSENT for result in found):
            absent.append(name)
        yield from (result for result in found if result.detail != ABSENT)
    absent.sort()
    present = ", ".join(sorted(extras.keys() - set(absent))) or "none"
    hint = ""
    if absent:
        hint = f"not installed: {', '.join(absent)}; {install_advice('EXTRA')}"
    yield CheckResult("extras", "ok", present, hint)


def _check_dependency(requirement: Requirement, extra: str) -> CheckResult:
    version = find_version(requirement.name)
    # another package may have brought another build of OpenCV, which is as good
    if version is None and requirement.name in OPENCV_BUILDS:
        version = next(filter(None, map(find_version, OPENCV_BUILDS)), None)
    bounds = str(requirement.specifier)
    hint = f"pip install '{requirement.name}{bounds}'"
    # a package of the core is a fault, one of an extra limits what can be done
    title = requirement.name
    status: Status = "fix"
    if extra:
        title = f"{requirement.name} [{extra}]"
        status = "warn"
    if version is None:
        return CheckResult(title, status, ABSENT, hint)
    return _check_version(title, version, bounds, status, hint)


def _check_version(title: str, version: str, bounds: str, status: Status, hint: str) -> CheckResult:
    """Compare a version with bounds such as `>=2.11,<2.14`. Pre-release and local tags are ignored."""
    try:
        release = Version(version).base_version
    except InvalidVersion:
        # a build from source may have a version such as 4.14.0-12-gabcdef, which does not tell the release
        release = "0"
    if SpecifierSet(bounds).contains(release):
        return CheckResult(title, "ok", version)
    return CheckResult(title, status, f"{version}, expected {bounds}", hint)


def _check_opencv() -> Iterator[CheckResult]:
    # all of them install the same module: the last one wins, with parts of the others
    builds = [name for name in OPENCV_BUILDS if find_version(name)]
    if len(builds) > 1:
        hint = f"pip uninstall {' '.join(builds)}, then pip install '{OPENCV_BUILDS[0]}{OPENCV}'"
        yield CheckResult("cv2", "fix", f"{' and '.join(builds)} overwrite each other", hint)
        return
    build = OPENCV_BUILDS[0]
    if builds:
        build = builds[0]
    # imported, because a library of the system may be missing although the package is there
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError as error:
        hint = f"pip install --force-reinstall --no-deps '{build}{OPENCV}'"
        if build in ("opencv-python", "opencv-contrib-python"):
            hint = "on a machine without a display: apt-get install libgl1 libglib2.0-0"
        yield CheckResult("cv2", "fix", f"does not import: {error}", hint)
        return
    yield _check_version("cv2", cv2.__version__, OPENCV, "fix", f"pip install '{build}{OPENCV}'")


def _check_torch(device: str) -> Iterator[CheckResult]:
    """Check torch and its GPUs; `model.device` may ask for one.

    torch may be missing, because cameras and policies do not need it.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        hint = f"to run the node: {install_advice('node')}"
        yield CheckResult("torch", "warn", f"does not import: {error}", hint)
        return
    yield CheckResult("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} CPU threads")
    # a GPU that torch finds, one that it does not find, or none
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _check_gpu(torch, index)
    elif device.startswith("cuda"):
        yield CheckResult(
            "gpu",
            "fix",
            f"model.device {device}: expected a GPU, torch {torch.__version__} finds none",
            "check nvidia-smi and that torch is built for CUDA, or take --model.device auto",
        )
    elif shutil.which("nvidia-smi"):
        build = "CPU only"
        if torch.version.cuda:
            build = f"CUDA {torch.version.cuda}"
        hint = "install the torch build for this machine's CUDA, and check nvidia-smi"
        yield CheckResult(
            "gpu", "warn", f"nvidia-smi is installed, but torch, built for {build}, finds no device", hint
        )
    else:
        yield CheckResult(
            "gpu", "warn", "none: models run on the CPU", "sufficient for nano and tests; SAM 3 needs a GPU"
        )


def _check_gpu(torch: object, index: int) -> CheckResult:
    cuda = torch.cuda  # type: ignore[attr-defined]
    properties = cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    detail = f"{properties.name}, capability {capability}, {memory}"
    if properties.major < 8:
        detail += ", no units for bfloat16: leave model.dtype auto, which then takes float32"
    return CheckResult(f"gpu {index}", "ok", detail)


def _check_options(settings: Settings) -> Iterator[CheckResult]:
    """Say which options a GPU serves with and why, and how much of its memory SAM 3 would take."""
    # imported by the check of torch; without torch or a GPU there are no options
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    from ..engines.options import describe, find_tuning
    from ..models.weight_files import pick_device

    try:
        device = pick_device(settings.model.device)
    except ModelError as error:
        yield CheckResult("options", "fix", str(error), "correct --model.device, or take auto")
        return
    if device.type != "cuda":
        return
    for reason in describe(settings, find_tuning(settings)):
        yield CheckResult("options", "ok", reason)
    yield _check_memory(settings, torch.cuda.get_device_properties(device).total_memory / 1e9)


def _find_gpu_memory(name: str) -> GpuMemory:
    """Return what estimates the memory of these weights. Without torch, only their name on the hub tells."""
    try:
        from ..models.registry import find_family
    except ImportError:
        return BY_HUB_NAME.get(name, OBJECTS)
    family = find_family(name)
    return OBJECTS if family is None else family.gpu_memory


def _check_memory(settings: Settings, held_gb: float, owner: str = "") -> CheckResult:
    """Say how much of a GPU's memory SAM 3 would take."""
    # an estimate by the settings, because nothing is loaded here
    tracker = settings.tracker
    memory = _find_gpu_memory(settings.model.name)
    needed_gb = memory.estimate_gb(tracker.max_objects, tracker.bank_size, tracker.max_cameras)
    detail = (
        f"estimate for {memory.title} at 1008 px: {needed_gb:.1f} of {held_gb:.0f} GB{owner} ({tracker.max_objects} "
        f"objects on each of {tracker.max_cameras} cameras, bank_size {tracker.bank_size})"
    )
    if needed_gb < held_gb:
        return CheckResult("gpu memory", "ok", detail)
    hint = "lower --tracker.max_objects, --tracker.max_cameras or --model.image_size"
    return CheckResult("gpu memory", "warn", detail, hint)


def _check_realsense() -> CheckResult:
    """Check that the RealSense SDK loads, and list its cameras. It may be missing: other cameras do not need it."""
    try:
        cameras = [line for line in list_realsense() if line.startswith("realsense:")]
    except Sam3NodeError as error:
        return CheckResult("realsense", "warn", str(error), "only RealSense cameras need it")
    # the SDK works, but without the rules of the system only root may open a camera
    if not cameras:
        hint = "if one is plugged in: install the udev rules of librealsense, and plug it in again"
        return CheckResult("realsense", "ok", "the SDK loads, and finds no camera", hint)
    return CheckResult("realsense", "ok", ", ".join(cameras))


def _check(name: str, describe: Callable[[], str], failed: Status = "fix", hint: str = "") -> CheckResult:
    """Return what `describe` says; after its error, the status `failed` and the hint."""
    try:
        return CheckResult(name, "ok", describe())
    except Sam3NodeError as error:
        return CheckResult(name, failed, str(error), hint)
    except ModuleNotFoundError as error:
        return CheckResult(name, "warn", f"not checked: {error}", install_advice("cli"))


def _describe_keys(transport: TransportSettings) -> str:
    from ..transport.security import Security, open_folder

    if transport.keys is None:
        return "none: sockets are plain, and reachable from this machine only"
    # a key that is missing raises, with the advice how to make one
    Security.from_settings(transport).client_keys("node")
    folder = open_folder(transport.keys.expanduser().absolute())
    roles = sorted({key.role for key in folder.authorised().values()})
    secrets = ", ".join(sorted(folder.own_names()))
    return f"{folder.path}: keys of the roles {', '.join(roles)}; secrets here: {secrets}"


def _describe_calibration(path: Path) -> str:
    from ..calibration import load_calibration
    from .calibration_views import describe_calibration

    return f"{path}: {describe_calibration(load_calibration(path))[0]}"


def _check_cameras(settings: Settings) -> Iterator[CheckResult]:
    """Check the source of each camera of the settings. Files are opened, and devices are looked for."""
    for camera in settings.group.cameras or (settings.camera,):
        yield _check("camera.source", partial(_describe_source, camera))


def _describe_source(camera: CameraSettings) -> str:
    """Open a source of files. Of a device or an address, say whether it is there without taking it from its user."""
    source = camera.source
    scheme, _, address = source.partition(":")
    # the camera's process may use the device now
    if camera.dialect != "none" or scheme in NETWORK_SCHEMES:
        return f"{source}: not tried, because another process may be using it"
    device = Path(address)
    if scheme == "webcam" and address.isdecimal():
        device = Path(f"/dev/video{address}")
    if scheme in ("webcam", "v4l2") and device.is_absolute():
        if not device.exists():
            raise CameraError(
                f"{source}: expected a camera at {device}, found none; sam3-node camera list shows those that are there"
            )
        return f"{source}: {device} is there"
    if scheme == "realsense" or scheme == "v4l2":
        return f"{source}: not tried; sam3-node camera list shows those that are there"
    open_camera(source, camera).close()
    return f"{source} opens"


def _check_robot(settings: Settings) -> Iterator[CheckResult]:
    """Check the URDF with its meshes and base, what it needs besides, and who sends poses and joints now."""
    robot = settings.robot
    joints: tuple[str, ...] = ()
    if robot.urdf is not None:
        try:
            joints = _read_joints(robot)
        except Sam3NodeError as error:
            yield CheckResult("robot.urdf", "fix", str(error))
        except ModuleNotFoundError as error:
            yield CheckResult("robot.urdf", "fix", f"not checked: {error}", install_advice("robot"))
        else:
            yield CheckResult("robot.urdf", "ok", f"{robot.urdf}: joints {', '.join(joints) or 'none'}")
    for gap in describe_robot_gaps(robot, settings.spatial):
        yield CheckResult("robot", "warn", gap)
    if settings.spatial.poses:
        yield _check_poses(settings, joints)


def _read_joints(robot: RobotSettings) -> tuple[str, ...]:
    """Read the URDF with its meshes as the node would, and return the joints that move."""
    assert robot.urdf is not None
    # here, because it needs the extra robot
    from ..robot.body import RobotBody

    return RobotBody(robot.urdf, robot.base).joints


def _check_poses(settings: Settings, wanted: tuple[str, ...]) -> CheckResult:
    """Listen for a moment at spatial.poses. `wanted` are the joints of the URDF."""
    from ..transport import Security
    from ..transport.tap import PoseSubscriber

    endpoint = settings.spatial.poses
    poses: set[str] = set()
    joints: set[str] = set()
    end_s = time.monotonic() + POSES_S
    try:
        with PoseSubscriber(endpoint, security=Security.from_settings(settings.transport)) as subscriber:
            while (left_s := end_s - time.monotonic()) > 0:
                for message in subscriber.take(round(1000 * left_s)):
                    if isinstance(message, JointState):
                        joints.update(message.positions)
                    else:
                        poses.add(message.frame)
    except Sam3NodeError as error:
        return CheckResult("spatial.poses", "fix", str(error))
    # a robot that is off now is no fault of the settings
    if not poses and not joints:
        hint = "start the program that sends the robot's poses and joints, or correct --spatial.poses"
        return CheckResult("spatial.poses", "warn", f"{endpoint}: nothing came in {POSES_S:g} s", hint)
    detail = f"{endpoint}: poses {', '.join(sorted(poses)) or 'none'}; joints {', '.join(sorted(joints)) or 'none'}"
    missing = [name for name in wanted if name not in joints]
    if missing and not all(name.isdecimal() for name in joints):
        hint = f"robot.urdf needs {', '.join(missing)}: let the sender name its joints as the URDF does"
        return CheckResult("spatial.poses", "warn", detail, hint)
    return CheckResult("spatial.poses", "ok", detail)


def _check_weights(what: str, settings: Settings) -> CheckResult:
    """Check the files of the weights of `model` or `detector`, without loading them."""
    name = getattr(settings, what).name
    # `none` needs no weights, whatever the name says
    if what == "detector" and settings.detector.kind == "none":
        return CheckResult("weights", "ok", "detector: none")
    try:
        from ..detection.locating import locate_detector
        from ..models.locating import locate_weights
        from ..models.registry import is_gated
        from ..models.weight_files import is_logged_in
        from ..tracking import confidence, names
    except ImportError:
        return CheckResult(
            "weights", "warn", f"{what}: not checked, which needs torch", install_advice("node")
        )
    # other kinds cannot load gated weights
    is_wanted = what == "model" or settings.detector.kind == "sam3-concept"
    if is_wanted and is_gated(name) and not is_logged_in():
        hint = f"ask for access on the page of {name}, then: hf auth login"
        return CheckResult(
            "weights", "warn", f"{what}: {name} is gated, and nobody is logged in to the hub", hint
        )
    if what == "detector":
        path = settings.detector.name_calibration
        is_bundled = settings.detector.kind == "yolo-world" and names.BUNDLED.suits(name)
        doubt = "" if path or is_bundled else UNCALIBRATED.format("names")

        def describe() -> str:
            names.load_name_calibration(path)
            return f"{what}: {locate_detector(settings.detector)}{doubt}"

        return _check("weights", describe)
    doubt = "" if confidence.is_calibrated(name) else UNCALIBRATED.format("masks")
    return _check("weights", lambda: f"{what}: {locate_weights(name)}{doubt}")


class NodeAnswers(NamedTuple):
    """The answers of a running node: its status, and its versions by package."""

    status: Mapping[str, Any]
    versions: Mapping[str, str]


def _ask_node(settings: Settings) -> NodeAnswers | Sam3NodeError:
    """Ask the running node who it is and what it does. Return the error if none answers."""
    from ..transport import ControlClient, Security

    endpoint = settings.transport.control
    try:
        with ControlClient(endpoint, NODE_TIMEOUT_MS, Security.from_settings(settings.transport)) as client:
            return NodeAnswers(client.call("status"), client.call("describe")["versions"])
    except Sam3NodeError as error:
        return error


def _judge_node(endpoint: str, node: NodeAnswers) -> CheckResult:
    """Say what a running node does, and the first thing that is wrong with it."""
    from ..client.diagnosis import is_silent

    status = node.status
    own = find_version("sam3-node")
    ages = []
    for camera, stats in status["cameras"].items():
        age_ms = stats.get("masks_age_ms")
        ages.append(f"{camera} no masks yet" if age_ms is None else f"{camera} masks {age_ms:.0f} ms old")
    theirs = node.versions.get("sam3-node")
    state = "paused" if status["paused"] else "running"
    detail = (
        f"{endpoint}: {state} for {status['uptime_s']:.0f} s, version {theirs}, {status['model']} on "
        f"{status['device']}{_describe_threads(status)}; {', '.join(ages) or 'no camera'}"
    )
    # an older node does not tell
    if not status.get("confidence_calibrated", True):
        detail += UNCALIBRATED.format("masks")
    shared = status.get("endpoints_shared", ())
    if shared:
        detail += f"; frames of {', '.join(shared)} come in shared memory"
    # a camera whose frames are refused looks like one that is absent; one that was corrected is no news
    refused = [
        f"{found['frames']} frames of {camera or 'no camera'} refused: {found['last_error']}"
        for camera, found in status.get("frames_refused", {}).items()
        if not is_silent(found)
    ]
    if refused:
        told = "; ".join(refused)
        return CheckResult(
            "node", "warn", f"{detail}; {told}", "correct what the sender packs: docs/own-camera.md"
        )
    ended = status.get("helpers_ended", {})
    restarted = status.get("helpers_restarted", {})
    if ended or restarted:
        told = "; ".join(
            [
                *(f"{name} {reason}" for name, reason in ended.items()),
                *(f"{name} was started again {count} times" for name, count in restarted.items()),
            ]
        )
        return CheckResult(
            "node", "warn", f"{detail}; {told}", "mend the cause, and start it, or the group, again"
        )
    # an old node goes on to serve after a new version was installed
    if own is not None and theirs != own:
        return CheckResult("node", "warn", detail, f"this installation is {own}: restart the node")
    return CheckResult("node", "ok", detail)


def _describe_threads(status: Mapping[str, Any]) -> str:
    """Return how many CPU threads a node on a CPU uses, and why; nothing for a GPU, or a node too old to tell."""
    if status["device"] != "cpu" or not status.get("threads"):
        return ""
    return f" with {status['threads']} CPU threads ({status.get('threads_reason', '')})"


def _check_cpu() -> CheckResult:
    """Say how many processors there are, and whether other programs take them from the steps of a node."""
    detail = f"{_count_cpus()} processors for this process"
    if not hasattr(os, "getloadavg"):  # Windows
        return CheckResult("cpu", "ok", detail)
    load = os.getloadavg()[0]
    count = os.cpu_count() or 1
    detail += f", load {load:.1f} on all {count} in the last minute"
    hint = ""
    if load > BUSY_SHARE * count:
        hint = (
            "a node takes fewer threads by itself where steps wait for others (threads in sam3-node status); "
            "docs/troubleshooting.md#slow"
        )
    return CheckResult("cpu", "ok", detail, hint)


def _count_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: the CPUs that this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _describe_endpoint(endpoint: str, transport: TransportSettings) -> str:
    """Bind an endpoint as the node would. Raises TransportError if that is not possible now."""
    from ..transport import MaskPublisher, Security

    MaskPublisher(endpoint, security=Security.from_settings(transport)).close()
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc":
        Path(path).unlink(missing_ok=True)  # libzmq leaves it
    return f"{endpoint} is free"


def _check_clock() -> CheckResult:
    """Check for a time service: ages across machines are only as accurate as the synchronisation of their clocks."""
    if any(Path(file).exists() for file in CLOCK_SYNC_FILES):
        return CheckResult("clock", "ok", "synchronised by a time service")
    hint = "run chrony or systemd-timesyncd if cameras are on other machines: ages compare the two clocks"
    return CheckResult("clock", "warn", "no time service found", hint)
