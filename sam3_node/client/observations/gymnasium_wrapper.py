"""A wrapper for environments of gymnasium that adds the masks of a node to observations. It needs gymnasium 1."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import PolicyError, require
from .slots import FLAGS, MAX_AGE_S, MaskFeed, ObjectSlots, SlotObservation

require("gymnasium", "gym")

from gymnasium import Env, ObservationWrapper  # noqa: E402
from gymnasium.spaces import Box, Dict, MultiBinary  # noqa: E402
from gymnasium.utils import RecordConstructorArgs  # noqa: E402

MAX_ID = np.iinfo(np.int64).max
"""Upper bound of the spaces of ids and restarts, which are counted without end."""


class ObjectsObservation(ObservationWrapper, RecordConstructorArgs):
    """A wrapper that adds the objects in `slots`, as `client` sees them after each step, as the map `name`.

    An observation that is a map keeps its keys; another one gets the key "observation". The map has, for N slots of
    (H, W) pixels, `masks` int8 [N, H, W]; `boxes` float32 [N, 4] in pixels of the masks; `ids` int64 [N], 0 for an
    empty slot; `tracked`, `visible`, `doubtful`, `stale` and `usable`, int8 [N]; `confidences` float32 [N] in 0..1;
    `ages_s` float32 [N] in seconds; and `restarts` int64 [1]. `SlotObservation` describes them. Act on `usable` masks
    only.

    Each step waits up to `timeout_ms` for new masks. Without any, the last ones stay, their ages grow, and when they
    are stale the masks are blank. `objects` is the last SlotObservation. The observations depend on the time: register
    an environment that is checked for determinism with `nondeterministic=True`.
    """

    def __init__(
        self, env: Env, client: MaskFeed, slots: ObjectSlots, *, timeout_ms: int = 0, name: str = "objects"
    ) -> None:
        # gymnasium copies an environment by these arguments; a client with sockets cannot be copied
        RecordConstructorArgs.__init__(
            self, client=client, slots=slots, timeout_ms=timeout_ms, name=name, _disable_deepcopy=True
        )
        ObservationWrapper.__init__(self, env)
        self._client = client
        self._slots = slots
        self._timeout_ms = timeout_ms
        self._name = name
        self.objects: SlotObservation | None = None
        # the objects lie beside the environment's own keys, or beside one key for an observation that is no map
        inner = env.observation_space
        self._is_map = isinstance(inner, Dict)
        spaces = dict(inner.spaces) if self._is_map else {"observation": inner}
        if name in spaces:
            raise PolicyError(
                f"name: expected none of the environment's keys, {', '.join(spaces)}; found {name!r}"
            )
        self.observation_space = Dict({**spaces, name: make_space(slots)})

    def observation(self, observation: Any) -> dict[str, object]:
        """Return the environment's observation with the objects."""
        # asked after the environment's step, so that the masks are as new as its own observation
        self.objects = self._slots.read(self._client, self._timeout_ms)
        outer = observation if self._is_map else {"observation": observation}
        return {**outer, self._name: to_arrays(self.objects)}


def make_space(slots: ObjectSlots) -> Dict:
    """Return the space of the map of these slots."""
    count = len(slots.names)
    height, width = slots.size
    # a box may reach to the edges of the masks
    edges = np.tile(np.array([width, height, width, height], np.float32), (count, 1))
    return Dict(
        {
            "masks": MultiBinary((count, height, width)),
            "boxes": Box(np.zeros_like(edges), edges, dtype=np.float32),
            "ids": Box(0, MAX_ID, (count,), np.int64),
            **{flag: MultiBinary(count) for flag in FLAGS},
            "confidences": Box(0, 1, (count,), np.float32),
            "ages_s": Box(0, MAX_AGE_S, (count,), np.float32),
            "restarts": Box(0, MAX_ID, (1,), np.int64),
        }
    )


def to_arrays(objects: SlotObservation) -> dict[str, npt.NDArray[Any]]:
    """Return the map of an observation: an element of the space of `make_space`."""
    # gymnasium's MultiBinary is of int8, in the place of bool
    return {
        **{name: getattr(objects, name) for name in ("boxes", "ids", "confidences", "ages_s")},
        **{name: getattr(objects, name).astype(np.int8) for name in ("masks", *FLAGS)},
        "restarts": np.array([objects.restarts], np.int64),
    }
