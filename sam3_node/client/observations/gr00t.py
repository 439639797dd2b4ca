"""Observations for Isaac GR00T, and the messages of its policy server.

The layout is that of GR00T's documentation of its policies and of its server (gr00t/policy in N1.6 and N1.7,
gr00t/eval/service.py in N1.5). A request is one message of a ZeroMQ REQ socket, a msgpack map {endpoint, data,
api_token?}; an array is {__ndarray_class__: true, as_npy: the bytes of numpy.save}.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import PolicyError
from ...types import Image
from .codec import Array, pack_arrays, read_array, unpack_arrays
from .inputs import check_images, check_vectors, merge
from .slots import SlotObservation

MAX_NPY_HEADER = 10_000


def as_gr00t(
    objects: SlotObservation | Sequence[SlotObservation],
    *,
    video: Mapping[str, Image],
    state: Mapping[str, npt.ArrayLike],
    language: str | Mapping[str, str],
    name: str = "objects",
    flat: bool = False,
) -> dict[str, Any]:
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
    history = [objects] if isinstance(objects, SlotObservation) else list(objects)
    if not history:
        raise PolicyError("objects: expected a SlotObservation for each image of a stream, found none")
    if len({(item.names, item.masks.shape) for item in history}) > 1:
        raise PolicyError(
            "objects: expected SlotObservations of the same slots, found several names or sizes"
        )
    streams = {key: _stack_images(images, key, len(history)) for key, images in video.items()}
    vectors = {key: _stack_vectors(values, key, len(history)) for key, values in state.items()}
    steps = max((len(values) for values in vectors.values()), default=1)
    pictures = [item.pictures(name) for item in history]
    masks = {key: np.stack([images[key] for images in pictures]) for key in pictures[-1]}
    flags = {name: np.stack([item.vector() for item in history[-steps:]])}
    tasks = {"task": language} if isinstance(language, str) else language
    observation = {
        "video": {key: images[np.newaxis] for key, images in merge(streams, masks, "video").items()},
        "state": {key: values[np.newaxis] for key, values in merge(vectors, flags, "state").items()},
        "language": {key: [[text]] for key, text in tasks.items()},
    }
    return _flatten(observation) if flat else observation


def pack_gr00t(endpoint: str, data: object = None, api_token: str | None = None) -> bytes:
    """Return a request to a policy server: one message of a ZeroMQ REQ socket.

    For `get_action`, `data` is {"observation": observation, "options": None}, and for a server of N1.5 the observation
    itself. `ping`, `reset` and `get_modality_config` are other endpoints.
    """
    request: dict[str, Any] = {"endpoint": endpoint}
    if data is not None:
        request["data"] = data
    if api_token is not None:
        request["api_token"] = api_token
    return pack_arrays(request, _encode_array)


def unpack_gr00t(reply: bytes) -> Any:
    """Return the value of a policy server's reply, for `get_action` [action, info] with arrays [1, T, D] by key.

    A modality configuration is a map. Raises PolicyError for an error that the server reports, and for invalid bytes.
    """
    if reply == b"ERROR":  # of early servers
        raise PolicyError("the GR00T server reports an error; its log says which")
    value = unpack_arrays(reply, "reply of the GR00T server", _decode_map)
    if isinstance(value, dict) and "error" in value:
        raise PolicyError(f"the GR00T server reports: {value['error']}")
    return value


def _stack_images(images: Image, key: str, count: int) -> Image:
    """Return images as uint8 [count, height, width, 3]."""
    stack = check_images(images, f"video {key}", dimensions=4)
    stack = stack if stack.ndim == 4 else stack[np.newaxis]
    if len(stack) != count:
        raise PolicyError(f"video {key}: expected {count} images, as many as objects; found {len(stack)}")
    return stack


def _stack_vectors(values: npt.ArrayLike, key: str, limit: int) -> npt.NDArray[np.float32]:
    """Return vectors as float32 [T, D] with T up to `limit`."""
    stack = np.atleast_2d(check_vectors(values, f"state {key}", dimensions=2))
    if len(stack) > limit:
        raise PolicyError(
            f"state {key}: expected at most {limit} vectors, as many as objects; found {len(stack)}"
        )
    return stack


def _flatten(observation: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **{f"video.{key}": images for key, images in observation["video"].items()},
        **{f"state.{key}": values for key, values in observation["state"].items()},
        **{key: texts[0] for key, texts in observation["language"].items()},
    }


def _encode_array(array: Array) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def _decode_map(value: dict[Any, Any]) -> Any:
    if "__ModalityConfig_class__" in value:
        config = value.get("as_json")
        try:
            return json.loads(config) if isinstance(config, str) else config
        except ValueError as error:
            raise PolicyError(f"expected a modality configuration as JSON: {error}") from error
    return _decode_npy(value.get("as_npy")) if "__ndarray_class__" in value else value


def _decode_npy(data: object) -> Array:
    """Return the array of a .npy file. numpy.load would allocate what a header declares before it reads the data."""
    if not isinstance(data, bytes):
        raise PolicyError(f"expected the bytes of a .npy file, found {type(data).__name__}")
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[
            version
        ]
        shape, fortran, dtype = read(file, MAX_NPY_HEADER)
    except Exception as error:  # numpy parses the header as Python
        raise PolicyError(f"expected a .npy file: {error!s:.200}") from error
    return read_array(data[file.tell() :], dtype, shape, "F" if fortran else "C")
