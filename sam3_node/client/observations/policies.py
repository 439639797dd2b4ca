"""Observations for policies of GR00T, openpi and lerobot, and messages of their servers and of GraspGen's.

Messages are bounded msgpack in which arrays are maps. Nothing is unpickled. Images and states that a user adds to an
observation are checked.

**GR00T.** The layout follows GR00T's documentation of its policies and of its server (gr00t/policy in N1.6 and N1.7,
gr00t/eval/service.py in N1.5). A request is one message of a ZeroMQ REQ socket, a msgpack map {endpoint, data,
api_token?}; an array is {__ndarray_class__: true, as_npy: the bytes of numpy.save}.

**openpi.** The layout follows openpi's client package (openpi_client.msgpack_numpy): one msgpack value for each binary
message of a WebSocket. An array is {b"__ndarray__": true, b"data", b"dtype", b"shape"} with keys of bytes, a scalar of
numpy is {b"__npgeneric__": true, b"data", b"dtype"}.

**GraspGen.** The layout follows its documentation of the protocol (client-server) and msgpack_numpy: an array is
{b"nd": true, b"type", b"kind": b"", b"shape", b"data"}; one of objects would be a pickle.

**lerobot.** Observations, and features of a dataset. `lerobot_step` has a step for its pipelines.
"""

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypedDict, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ...errors import PolicyError, WireError
from ...types import Image
from ...wire.codec import Limits, pack, unpack
from .slots import FIELDS, ObjectSlots, SlotObservation

Array = npt.NDArray[Any]
T = TypeVar("T")
LIMITS = Limits(
    total_bytes=512 << 20, text_bytes=1 << 20, container_items=1 << 16, total_items=1 << 18, depth=32
)
"""What a server's message may contain: room for many images, and no more."""
MAX_DIMENSIONS = 16
"""Dimensions of an array in a message."""
KINDS = "biufSU"
"""Kinds of dtypes that are sent: numbers, flags and text."""
MAX_NPY_HEADER = 10_000
"""Bytes of the header of a .npy file, which numpy parses as Python."""
MAX_SCALAR_BYTES = 1 << 20
"""Bytes of a scalar. numpy would allocate what its dtype says."""
SAMPLED_GRASPS = 200
"""Grasps that a GraspGen server samples at least. It returns the best of them."""
MIN_GRASPS = 40
"""Grasps until which a GraspGen server samples again."""
IMAGES = "observation.images"
STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
"""Key of what lerobot's policies read in addition to the robot's own state."""


class Gr00tObservation(TypedDict):
    """An observation of one robot for GR00T: batches of 1."""

    video: dict[str, Array]
    state: dict[str, Array]
    language: dict[str, list[list[str]]]


FlatGr00tObservation = dict[str, Array | list[str]]
"""The same with the keys "video.KEY", "state.KEY" and the language's own."""


class LeRobotFeature(TypedDict):
    """A feature of a dataset, as `LeRobotDataset.create` takes it."""

    dtype: str
    shape: tuple[int, ...]
    names: list[str]


def pack_arrays(value: object, encode: Callable[[Array], Mapping[Any, Any]]) -> bytes:
    """Pack a value of maps and lists in which arrays are replaced by the maps that `encode` returns."""
    try:
        return pack(_encode(value, encode))
    except WireError as error:
        raise PolicyError(str(error)) from error


def unpack_arrays(data: bytes, what: str, decode: Callable[[dict[Any, Any]], Any]) -> Any:
    """Unpack a value within LIMITS, and replace each of its maps by what `decode` returns for it.

    Raises PolicyError that names `what` for anything else, and for a map with an `error` that the server reports.
    """
    # an error names the message that it is in; one of the codec does so by itself
    try:
        value = _decode(unpack(data, what=what, limits=LIMITS), decode)
    except WireError as error:
        raise PolicyError(str(error)) from error
    except PolicyError as error:
        raise PolicyError(f"{what}: {error}") from error
    # servers of all kinds report an error in the place of their result
    if isinstance(value, dict) and "error" in value:
        raise PolicyError(f"{what}: it reports an error: {value['error']!s:.300}")
    return value


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise PolicyError for a dtype of neither numbers nor text."""
    if dtype.kind not in KINDS:
        raise PolicyError(f"expected an array of numbers or text, found dtype {dtype!s:.80}")


def read_dtype(text: object) -> np.dtype[Any]:
    """Return the dtype of a string such as "<f4". numpy would parse any text."""
    if isinstance(text, str) and re.fullmatch(rf"[<>|=]?[{KINDS}]\d{{1,9}}", text):
        with suppress(TypeError, ValueError):
            return np.dtype(text)
    raise PolicyError(f"expected the dtype of an array of numbers or text, found {text!s:.80}")


def read_array(
    data: object, dtype: np.dtype[Any], shape: tuple[int, ...], order: Literal["C", "F"] = "C"
) -> Array:
    """Return a new array of these bytes. Raises PolicyError if they are not exactly its elements."""
    check_dtype(dtype)
    # the product is exact in Python, whatever sides a message claims, and nothing is allocated before it fits
    if not isinstance(data, bytes) or min(shape, default=0) < 0 or len(shape) > MAX_DIMENSIONS:
        raise PolicyError(f"expected bytes of an array, found {type(data).__name__} for shape {shape!s:.80}")
    if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise PolicyError(f"expected bytes of {dtype!s:.80} {shape!s:.80}, found {len(data)}")
    try:
        array: Array = np.ndarray(shape, dtype, data, order=order)
    except ValueError as error:  # the other sides of an empty array may be too great
        raise PolicyError(f"expected the shape of an array, found {shape!s:.80}: {error}") from error
    # a copy: the bytes of the message are read-only, and belong to it
    return array.copy(order)


def _encode(value: object, encode: Callable[[Array], Mapping[Any, Any]]) -> object:
    # arrays in maps and lists at any depth; all else is msgpack's own
    if isinstance(value, np.ndarray):
        check_dtype(value.dtype)
        return encode(value)
    if isinstance(value, Mapping):
        return {key: _encode(item, encode) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, encode) for item in value]
    return value


def _decode(value: object, decode: Callable[[dict[Any, Any]], Any]) -> Any:
    # the innermost maps first: a map of a server may hold arrays
    if isinstance(value, dict):
        return decode({key: _decode(item, decode) for key, item in value.items()})
    if isinstance(value, list):
        return [_decode(item, decode) for item in value]
    return value


def check_images(images: npt.ArrayLike, what: str, dimensions: int = 3) -> Image:
    """Return images in RGB order, uint8 [height, width, 3], or with up to `dimensions` dimensions, as an array."""
    # raw pixels in as many channels as the masks have
    array = np.asarray(images)
    if array.dtype != np.uint8 or not 3 <= array.ndim <= dimensions or array.shape[-1] != 3:
        raise PolicyError(
            f"{what}: expected uint8 [height, width, 3] in RGB order, found {array.dtype} {list(array.shape)}"
        )
    return array


def check_vectors(values: npt.ArrayLike, what: str, dimensions: int = 1) -> npt.NDArray[np.float32]:
    """Return a vector, or an array of up to `dimensions` dimensions, as float32."""
    try:
        array = np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{what}: expected a vector of numbers, found {values!r:.80}") from error
    if not 1 <= array.ndim <= dimensions:
        raise PolicyError(f"{what}: expected a vector, found shape {list(array.shape)}")
    return array


def merge(given: Mapping[str, T], added: Mapping[str, T], what: str) -> dict[str, T]:
    """Return both maps as one. Raises PolicyError for a key of both."""
    # a key of both would silently lose one of them
    if twice := sorted(given.keys() & added.keys()):
        raise PolicyError(
            f"{what}: expected none of {', '.join(twice)}, which the objects have; give them another name"
        )
    return {**given, **added}


@overload
def as_gr00t(
    objects: SlotObservation | Sequence[SlotObservation],
    *,
    video: Mapping[str, Image],
    state: Mapping[str, npt.ArrayLike],
    language: str | Mapping[str, str],
    name: str = "objects",
    flat: Literal[False] = False,
) -> Gr00tObservation: ...


@overload
def as_gr00t(
    objects: SlotObservation | Sequence[SlotObservation],
    *,
    video: Mapping[str, Image],
    state: Mapping[str, npt.ArrayLike],
    language: str | Mapping[str, str],
    name: str = "objects",
    flat: Literal[True],
) -> FlatGr00tObservation: ...


def as_gr00t(
    objects: SlotObservation | Sequence[SlotObservation],
    *,
    video: Mapping[str, Image],
    state: Mapping[str, npt.ArrayLike],
    language: str | Mapping[str, str],
    name: str = "objects",
    flat: bool = False,
) -> Gr00tObservation | FlatGr00tObservation:
    """Return an observation of one robot: batches of 1.

    `video` holds images in RGB order, uint8 [H, W, 3], or [T, H, W, 3] with T images of which the last is the newest.
    `state` holds vectors [D] or [T, D]. `language` is the task, or tasks by key. For T images give the T latest
    `objects`, as GR00T takes the same T of every stream.

    The result is {"video": {key: uint8 [1, T, H, W, 3]}, "state": {key: float32 [1, T, D]}, "language": {key:
    [[text]]}}. The masks are the video streams `name`_0, `name`_1 …, three slots in the channels of each (see
    `SlotObservation.pictures`). The state `name` has the flags, ages and boxes (`SlotObservation.vector`). List them in
    the modality configuration that the policy is trained with; a policy that is trained already ignores them.

    With `flat`, the keys are "video.KEY", "state.KEY" and the language's own, and its values are [text], as GR00T N1.5
    and the simulation wrapper of later versions take them. Raises PolicyError for a wrong shape or dtype.
    """
    # one SlotObservation for each image of a stream, all of the same slots
    history = [objects] if isinstance(objects, SlotObservation) else list(objects)
    if not history:
        raise PolicyError("objects: expected a SlotObservation for each image of a stream, found none")
    if len({(item.names, item.masks.shape) for item in history}) > 1:
        raise PolicyError(
            "objects: expected SlotObservations of the same slots, found several names or sizes"
        )
    # what the user gives, checked
    streams = {key: _stack_images(images, key, len(history)) for key, images in video.items()}
    vectors = {key: _stack_vectors(values, key, len(history)) for key, values in state.items()}
    steps = max((len(values) for values in vectors.values()), default=1)
    # what the objects add: masks as video, and flags, ages and boxes as state, of as many steps as the user's states
    pictures = [item.pictures(name) for item in history]
    masks = {key: np.stack([images[key] for images in pictures]) for key in pictures[-1]}
    flags = {name: np.stack([item.vector() for item in history[-steps:]])}
    tasks = {"task": language} if isinstance(language, str) else language
    observation: Gr00tObservation = {
        "video": {key: images[np.newaxis] for key, images in merge(streams, masks, "video").items()},
        "state": {key: values[np.newaxis] for key, values in merge(vectors, flags, "state").items()},
        "language": {key: [[text]] for key, text in tasks.items()},
    }
    if flat:
        return _flatten(observation)
    return observation


def pack_gr00t(endpoint: str, data: object = None, api_token: str | None = None) -> bytes:
    """Return a request to a policy server: one message of a ZeroMQ REQ socket.

    For `get_action`, `data` is {"observation": observation, "options": None}, and for a server of N1.5 the observation
    itself. `ping`, `reset` and `get_modality_config` are other endpoints.
    """
    given = {"endpoint": endpoint, "data": data, "api_token": api_token}
    return pack_arrays({key: each for key, each in given.items() if each is not None}, _encode_gr00t_array)


def unpack_gr00t(reply: bytes) -> Any:
    """Return the value of a policy server's reply, for `get_action` [action, info] with arrays [1, T, D] by key.

    A modality configuration is a map. Raises PolicyError for an error that the server reports, and for invalid bytes.
    """
    if reply == b"ERROR":  # of early servers
        raise PolicyError("the GR00T server reports an error; its log says which")
    return unpack_arrays(reply, "reply of the GR00T server", _decode_gr00t_map)


def _stack_images(images: Image, key: str, count: int) -> Image:
    """Return images as uint8 [count, height, width, 3]."""
    stack = check_images(images, f"video {key}", dimensions=4)
    # one image is a stream of one
    if stack.ndim == 3:
        stack = stack[np.newaxis]
    if len(stack) != count:
        raise PolicyError(f"video {key}: expected {count} images, as many as objects; found {len(stack)}")
    return stack


def _stack_vectors(values: npt.ArrayLike, key: str, limit: int) -> npt.NDArray[np.float32]:
    """Return vectors as float32 [T, D] with T up to `limit`."""
    # a state may have fewer steps than there are images, but not more
    stack = np.atleast_2d(check_vectors(values, f"state {key}", dimensions=2))
    if len(stack) > limit:
        raise PolicyError(
            f"state {key}: expected at most {limit} vectors, as many as objects; found {len(stack)}"
        )
    return stack


def _flatten(observation: Gr00tObservation) -> FlatGr00tObservation:
    return {
        **{f"video.{key}": images for key, images in observation["video"].items()},
        **{f"state.{key}": values for key, values in observation["state"].items()},
        **{key: texts[0] for key, texts in observation["language"].items()},
    }


def _encode_gr00t_array(array: Array) -> dict[str, bool | bytes]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def _decode_gr00t_map(value: dict[Any, Any]) -> Any:
    # two kinds of marked maps; any other map is a value
    if "__ModalityConfig_class__" in value:
        config = value.get("as_json")
        if not isinstance(config, str):
            return config
        try:
            return json.loads(config)
        except ValueError as error:
            raise PolicyError(f"expected a modality configuration as JSON: {error}") from error
    if "__ndarray_class__" in value:
        return _decode_npy(value.get("as_npy"))
    return value


def _decode_npy(data: object) -> Array:
    """Return the array of a .npy file. numpy.load would allocate what a header declares before it reads the data."""
    if not isinstance(data, bytes):
        raise PolicyError(f"expected the bytes of a .npy file, found {type(data).__name__}")
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            read = np.lib.format.read_array_header_1_0
        elif version == (2, 0):
            read = np.lib.format.read_array_header_2_0
        else:
            raise ValueError(f"version {version}")
        shape, fortran, dtype = read(file, MAX_NPY_HEADER)
    except Exception as error:  # numpy parses the header as Python
        raise PolicyError(f"expected a .npy file: {error!s:.200}") from error
    order: Literal["C", "F"] = "F" if fortran else "C"
    return read_array(data[file.tell() :], dtype, shape, order)


def as_openpi(
    objects: SlotObservation, inputs: Mapping[str, Any], *, prompt: str, name: str = "observation/objects"
) -> dict[str, Any]:
    """Return an observation: your `inputs` as the policy's configuration names them, its `prompt`, and the objects.

    `inputs` are for example {"observation/image": uint8 [H, W, 3] in RGB order, "observation/state": float32 [D]}. The
    masks are the images `name`_0, `name`_1 …, uint8 [H, W, 3], three slots in the channels of each (see
    `SlotObservation.pictures`). `name`_state, float32 [N * len(FIELDS)], has the flags, ages and boxes
    (`SlotObservation.vector`). Let the configuration's transform of inputs read them; transforms ignore keys that they
    do not name. Slots of 224 x 224 with fit="pad" lie on images from openpi's `resize_with_pad`. Raises PolicyError if
    `inputs` has one of these keys.
    """
    added = {"prompt": prompt, f"{name}_state": objects.vector(), **objects.pictures(name)}
    return merge(inputs, added, "inputs")


def pack_openpi(observation: Mapping[str, Any]) -> bytes:
    """Return the message of an observation for a policy server."""
    return pack_arrays(observation, _encode_openpi_array)


def unpack_openpi(message: bytes | str) -> Any:
    """Return the value of a server's message: its metadata first, then a map with "actions", float [T, D].

    Raises PolicyError for invalid bytes, and for text, in which the server reports an error.
    """
    if isinstance(message, str):
        raise PolicyError(f"the openpi server reports: {message}")
    return unpack_arrays(message, "message of the openpi server", _decode_openpi_map)


def _encode_openpi_array(array: Array) -> dict[bytes, Any]:
    # keys of bytes, as openpi's own client packs them
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": list(array.shape),
    }


def _decode_openpi_map(value: dict[Any, Any]) -> Any:
    if b"__npgeneric__" not in value:
        if b"__ndarray__" in value:
            return _read_raw_array(value, b"dtype")
        return value
    # a scalar of numpy: its dtype may claim any size
    dtype = read_dtype(value.get(b"dtype"))
    if dtype.itemsize > MAX_SCALAR_BYTES:
        raise PolicyError(f"expected a scalar of at most {MAX_SCALAR_BYTES} bytes, found {dtype}")
    try:
        return np.array(value[b"data"], dtype)[()]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PolicyError(f"expected a scalar of {dtype}: {error!s:.200}") from error


def _read_raw_array(value: dict[Any, Any], dtype_key: bytes) -> Array:
    """Return the array of a map with its bytes and shape, and its dtype by this key."""
    try:
        # what is no list of numbers is an error here; the sides themselves are checked against the bytes
        shape = tuple(int(side) for side in value[b"shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PolicyError(f"expected an array with data, dtype and shape: {error!s:.200}") from error
    return read_array(value.get(b"data"), read_dtype(value.get(dtype_key)), shape)


def pack_graspgen(points_m: npt.NDArray[np.float32], count: int) -> bytes:
    """Return the request for `count` grasps of an object's points [n, 3]."""
    # the server samples more than are asked for, and returns the best
    limits = {
        "num_grasps": max(count, SAMPLED_GRASPS),
        "topk_num_grasps": count,
        "min_grasps": min(count, MIN_GRASPS),
    }
    return pack_arrays({"action": "infer", "point_cloud": points_m, **limits}, _encode_graspgen_array)


def unpack_graspgen(reply: bytes, count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the `count` most confident grasps [M, 4, 4] of a reply, and their confidences [M], in descending order.

    Raises PolicyError for an error that the server reports, for invalid bytes, and for poses that are no rigid motions.
    """
    value = unpack_arrays(reply, "reply of the GraspGen server", _decode_graspgen_map)
    poses = _read_floats(value, "grasps", (4, 4))
    confidences = _read_floats(value, "confidences", ())
    # a robot follows these poses: a turn that mirrors or scales, or a wrong last row, must not reach it
    turns = poses[:, :3, :3]
    is_rigid = np.allclose(turns @ turns.transpose(0, 2, 1), np.eye(3), atol=1e-3)
    if not is_rigid or (np.linalg.det(turns) < 0).any() or (poses[:, 3] != (0, 0, 0, 1)).any():
        raise PolicyError("GraspGen server: expected grasps that are rigid motions, found others")
    if len(poses) != len(confidences):
        raise PolicyError(f"GraspGen server: expected {len(poses)} confidences, found {len(confidences)}")
    best = np.argsort(-confidences, kind="stable")[:count]
    return poses[best], confidences[best]


def _read_floats(reply: Any, name: str, sides: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return the floats [M, *sides] of a reply. Raises PolicyError for anything else."""
    array = np.asarray(reply.get(name) if isinstance(reply, dict) else reply)
    # a planner that fails may return NaN, which a robot must never get
    if array.dtype.kind != "f" or array.shape != (*array.shape[:1], *sides) or not np.isfinite(array).all():
        raise PolicyError(
            f"GraspGen server: expected {name} [M, {sides}], finite floats; found {array!r:.80}"
        )
    return array.astype(np.float64)


def _encode_graspgen_array(array: Array) -> dict[bytes, Any]:
    kind = {b"nd": True, b"type": array.dtype.str, b"kind": b""}
    return kind | {b"shape": list(array.shape), b"data": array.tobytes()}


def _decode_graspgen_map(value: dict[Any, Any]) -> Any:
    if value.get(b"nd") is True:
        return _read_raw_array(value, b"type")
    return value


def as_lerobot(
    objects: SlotObservation,
    *,
    images: Mapping[str, Image] | None = None,
    state: npt.ArrayLike | None = None,
    name: str = "objects",
) -> dict[str, npt.NDArray[Any]]:
    """Return an observation of arrays, as lerobot's `predict_action` and `LeRobotDataset.add_frame` take it.

    `images` are uint8 [H, W, 3] in RGB order by camera, `state` is a vector [D]. The result has
    "observation.images.KEY" of each image and of the masks, `name`_0, `name`_1 …, three slots in the channels of each
    (see `SlotObservation.pictures`); "observation.state", float32 [D]; and "observation.environment_state", float32
    [N * len(FIELDS)], with the flags, ages and boxes (`SlotObservation.vector`). For a dataset, add "action" and
    "task". Raises PolicyError for a wrong shape or dtype.
    """
    # the masks are images among the user's, and the flags a state of their own
    pictures = merge(images or {}, objects.pictures(name), "images")
    observation: dict[str, npt.NDArray[Any]] = {
        f"{IMAGES}.{key}": check_images(image, f"image {key}") for key, image in pictures.items()
    }
    if state is not None:
        observation[STATE] = check_vectors(state, "state")
    return observation | {ENVIRONMENT_STATE: objects.vector()}


def lerobot_features(
    slots: ObjectSlots, *, name: str = "objects", dtype: Literal["image", "video"] = "image"
) -> dict[str, LeRobotFeature]:
    """Return the features that the masks add to a dataset, for `LeRobotDataset.create(features=…)`.

    They are the masks' images, and "observation.environment_state" with a name for each element, SLOT.LABEL.FIELD. Of
    `dtype` "image" the masks are kept exactly; "video" is smaller, and blurs their edges.
    """
    # made from an empty observation: it has the same keys and shapes as every other
    pictures = slots.observe().pictures(name)
    # images with the channels last, as datasets have them
    images: dict[str, LeRobotFeature] = {
        f"{IMAGES}.{key}": {"dtype": dtype, "shape": image.shape, "names": ["height", "width", "channels"]}
        for key, image in pictures.items()
    }
    elements = []
    for slot, label in enumerate(slots.names):
        elements += [f"{slot}.{label}.{field}" for field in FIELDS]
    return images | {ENVIRONMENT_STATE: {"dtype": "float32", "shape": (len(elements),), "names": elements}}
