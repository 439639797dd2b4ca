"""A step of lerobot's pipelines that adds the masks of a node to observations. It needs lerobot 0.4 to 0.6."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import MissingExtraError, PolicyError, find_version, require
from .policies import as_lerobot, lerobot_features
from .slots import Fit, MaskFeed, ObjectSlots, SlotObservation

found = find_version("lerobot")
# a later version would fail somewhere in the middle of a step, or not at all and wrongly
if found is not None and re.match(r"0\.[0-6](\.|$)", found) is None:
    raise MissingExtraError(
        f"expected lerobot 0.4 to 0.6, found {found}, with which this step was never run; install one by the extra "
        "'lerobot-policy', or use `as_lerobot`, which needs no lerobot"
    )
require("lerobot.processor", "lerobot-policy")

from lerobot.configs.types import FeatureType, PipelineFeatureType, PolicyFeature  # noqa: E402
from lerobot.processor import ObservationProcessorStep, ProcessorStepRegistry  # noqa: E402
from lerobot.processor.converters import to_tensor  # noqa: E402

PLAIN_PARAMETERS = ("max_age_s", "fit", "camera", "name", "timeout_ms", "most")
"""Parameters that are saved as they are."""


@dataclass
@ProcessorStepRegistry.register(name="sam3_node_objects")
class ObjectsProcessorStep(ObservationProcessorStep):
    """A step that adds the newest masks of `client` to each observation, in the keys of `as_lerobot`.

    An observation that has these keys, of a dataset for example, stays as it is, so that training and use share a
    pipeline. Images are float32 [3, H, W] in 0..1 and "observation.environment_state" is float32 [N * len(FIELDS)],
    without a batch dimension: put the step before `AddBatchDimensionProcessorStep`. `objects` is the last
    SlotObservation of the client, or None; ask it for a `refusal` before you act.

    `ObjectSlots` has the same parameters. A saved pipeline has them without the client. Give it when you load the
    pipeline: `from_pretrained(path, overrides={"sam3_node_objects": {"client": client}})`.
    """

    names: list[str]
    size: tuple[int, int]
    max_age_s: float = 0.5
    fit: Fit = "stretch"
    camera: str | None = None
    name: str = "objects"
    client: MaskFeed | None = None
    timeout_ms: int = 0
    """Longest wait for new masks for each observation"""
    most: dict[str, int] | int | None = None
    objects: SlotObservation | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        options = {name: getattr(self, name) for name in ("max_age_s", "fit", "camera", "most")}
        self._slots = ObjectSlots(self.names, self.size, **options)
        self._features = lerobot_features(self._slots, name=self.name)

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the observation with the masks. Raises PolicyError without a client, or if it has some of the keys."""
        # an observation of a dataset has the masks already, of the time at which it was recorded
        if present := self._features.keys() & observation.keys():
            self.objects = None
            if len(present) < len(self._features):
                raise PolicyError(
                    f"sam3_node_objects: expected all or none of {', '.join(self._features)} in the observation, found "
                    f"{', '.join(sorted(present))}"
                )
            return observation
        if self.client is None:
            raise PolicyError(
                'sam3_node_objects: expected a client; load the pipeline with overrides={"sam3_node_objects": '
                '{"client": PerceptionClient()}}'
            )
        self.objects = self._slots.read(self.client, self.timeout_ms)
        for key, array in as_lerobot(self.objects, name=self.name).items():
            if array.ndim == 3:  # an image: lerobot takes the channels first, in 0..1
                array = array.transpose(2, 0, 1) / np.float32(255)
            observation[key] = to_tensor(np.ascontiguousarray(array))
        return observation

    def get_config(self) -> dict[str, object]:
        """Return the parameters without the client."""
        plain = {name: getattr(self, name) for name in PLAIN_PARAMETERS}
        return {"names": list(self.names), "size": list(self.size), **plain}

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        """Return the features, with the features of the masks added."""
        # the dimensions tell an image from the state
        shapes = {key: feature["shape"] for key, feature in self._features.items()}
        kinds = {1: FeatureType.ENV, 3: FeatureType.VISUAL}  # by the dimensions; images become [3, H, W]
        added = {key: PolicyFeature(kinds[len(own)], (*own[2:], *own[:2])) for key, own in shapes.items()}
        observed = features.get(PipelineFeatureType.OBSERVATION, {})
        return features | {PipelineFeatureType.OBSERVATION: observed | added}
