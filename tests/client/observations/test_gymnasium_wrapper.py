"""The wrapper for environments, checked by gymnasium's own checker."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sam3_node.client.observations import ObjectSlots
from sam3_node.errors import NodeRestarted, PolicyError
from tests.support.observations import Client, fresh, make_frame, make_instance

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.spaces import Box, Dict  # noqa: E402
from gymnasium.utils.env_checker import check_env  # noqa: E402

from sam3_node.client.observations.gymnasium_wrapper import ObjectsObservation  # noqa: E402
from tests.support.refuses import refuses  # noqa: E402

SIZE = (24, 32)


class Reach(gymnasium.Env):  # type: ignore[misc]
    """An environment with an arm of two joints."""

    def __init__(self, keyed: bool = False) -> None:
        space = Box(-1, 1, (2,), np.float32)
        self.action_space = space
        self.observation_space = Dict({"arm": space}) if keyed else space
        self._keyed = keyed
        self._arm = np.zeros(2, np.float32)

    def _observe(self) -> Any:
        return {"arm": self._arm.copy()} if self._keyed else self._arm.copy()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._arm = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._arm = np.clip(self._arm + 0.1 * action, -1, 1).astype(np.float32)
        return self._observe(), 0.0, False, False, {}


def wrap(*waiting: Any, keyed: bool = False, **options: Any) -> ObjectsObservation:
    slots = ObjectSlots(["mug", "fork"], SIZE, max_age_s=50)
    return ObjectsObservation(Reach(keyed), Client(*waiting), slots, **options)


@pytest.mark.verifies("policy", "gymnasium", "own package", "its own checker of environments")
@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
@pytest.mark.parametrize("keyed", [False, True])
def test_gymnasium_accepts_it(keyed: bool) -> None:
    gymnasium.register("sam3_node/Reach-v0", Reach, nondeterministic=True)
    try:
        slots = ObjectSlots(["mug", "fork"], SIZE, max_age_s=50)
        client = Client(*[fresh(make_instance(1, "mug")), None] * 8)
        env = gymnasium.make("sam3_node/Reach-v0", keyed=keyed)
        check_env(ObjectsObservation(env, client, slots), skip_render_check=True)
    finally:
        del gymnasium.registry["sam3_node/Reach-v0"]


def test_observations_are_in_the_space_at_any_time() -> None:
    doubtful = replace(make_instance(2, "fork"), doubtful=True, confidence=0.1)
    env = wrap(None, fresh(make_instance(1, "mug"), doubtful), None, NodeRestarted("", camera="cam0"))
    empty, _ = env.reset(seed=1)
    seen, empty_again = (env.step(np.zeros(2, np.float32))[0] for _ in range(2))
    for observation in (empty, seen, empty_again):
        assert env.observation_space.contains(observation)
    assert set(seen) == {"observation", "objects"}
    objects = seen["objects"]
    assert objects["ids"].tolist() == [1, 2]
    flags = {"tracked": [1, 1], "doubtful": [0, 1], "usable": [1, 0], "stale": [0, 0]}
    assert {flag: objects[flag].tolist() for flag in flags} == flags
    assert objects["masks"].any(axis=(1, 2)).all()
    assert empty["objects"]["stale"].tolist() == [1, 1]
    assert empty["objects"]["restarts"].tolist() == [0]
    assert empty_again["objects"]["restarts"].tolist() == [1]
    assert not empty_again["objects"]["tracked"].any()


def test_masks_that_stop_become_stale_and_blank() -> None:
    env = wrap(make_frame(make_instance(1, "mug")))  # captured long ago
    objects = env.reset(seed=1)[0]["objects"]
    assert objects["ids"].tolist() == [1, 0]
    assert objects["stale"].tolist() == [1, 1]
    assert not objects["masks"].any()
    assert "stale" in env.objects.refusal("mug")


def test_keys_of_a_map_stay() -> None:
    env = wrap(keyed=True, name="seen")
    assert set(env.observation_space.spaces) == {"arm", "seen"}
    assert set(env.reset(seed=1)[0]) == {"arm", "seen"}
    with refuses(PolicyError, field="arm"):
        wrap(keyed=True, name="arm")
