"""What sees: the model, the detector, and a pipeline for each camera. The node and a replay run the same one."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import metadata
from typing import Any, Self

import cv2
import torch

from ..detection.base import Detector, PromptSet, want
from ..detection.load import NANO as NANO_DETECTOR
from ..detection.phrases import clean_prompts
from ..engines.key import checkpoint_digest
from ..errors import EngineError, RequestError
from ..models import TrackerModel
from ..settings import Settings
from ..types import MaskEncoding
from .loading import load_finder, load_model
from .pipeline import Pipeline, require_tracking


class Perception:
    """Pipelines of up to any number of cameras that share one model and one detector, and what they look for.

    It is what the operations of `operations` change.
    """

    def __init__(self, settings: Settings, model: TrackerModel, detector: Detector | None) -> None:
        self.paused = False
        self.settings, self.model, self.detector = settings, model, detector
        self._pipelines: dict[str, Pipeline] = {}
        self._wanted: PromptSet | None = None
        if settings.detector.prompts:
            self.set_prompts(settings.detector.prompts)

    @classmethod
    def load(cls, settings: Settings) -> Self:
        """With the model and the detector that `settings` name.

        Raises ModelError, VocabularyError, EngineError or MissingExtraError when they cannot serve.
        """
        model = load_model(settings.model, settings.tracker, settings.engine)
        return cls(settings, model, load_finder(settings.detector, settings.model, model, settings.engine))

    @property
    def pipelines(self) -> Mapping[str, Pipeline]:
        """One for each camera that is served."""
        return self._pipelines

    @property
    def prompts(self) -> tuple[str, ...]:
        """What is looked for by name."""
        return self._wanted.phrases if self._wanted else ()

    @property
    def mask_encoding(self) -> MaskEncoding:
        """How masks in replies travel."""
        return self.settings.tracker.mask_encoding

    def serve(self, camera: str) -> Pipeline:
        """The pipeline of a camera, a new one where it has none."""
        if camera not in self._pipelines:
            pipeline = Pipeline(
                self.model, self.settings.tracker, camera, self.detector, self.settings.detector
            )
            if self._wanted is not None:
                pipeline.set_prompts(self._wanted)
            self._pipelines[camera] = pipeline
        return self._pipelines[camera]

    def drop(self, camera: str) -> None:
        """Forget a camera and its objects; nothing happens where it is not served."""
        self._pipelines.pop(camera, None)

    def set_prompts(
        self,
        phrases: Sequence[object],
        scores: Mapping[str, float] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> tuple[str, ...]:
        """Look for these on all cameras from the next frame on; without phrases for nothing. -> them, as they are used.

        `scores` and `most` are the threshold and the greatest number of some of them. Raises RequestError, and nothing
        has changed then.
        """
        if self.detector is None:
            raise RequestError(
                "set_prompts: no detector is configured, so nothing can be looked for by name; set detector.kind, "
                "or add objects by points, box or mask with add_object"
            )
        require_tracking(self.model)
        cleaned = clean_prompts(phrases)
        score = self.settings.detector.score
        self._wanted = want(self.detector, cleaned, score, scores, most) if cleaned else None
        for pipeline in self._pipelines.values():
            pipeline.set_prompts(self._wanted)
        return cleaned

    def status(self) -> dict[str, Any]:
        """What sees, and what it looks for."""
        return {
            "paused": self.paused,
            "model": self.model.name,
            "can_track": self.model.can_track,
            "detector": self.detector.name if self.detector else None,
            "prompts": list(self.prompts),
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def describe(self) -> dict[str, Any]:
        """All that a recording must tell for its masks to be made again: settings, digests, device, versions."""
        return {
            **self.status(),
            "settings": self.settings.model_dump(mode="json"),
            **self._digests,
            "device_name": _device_name(self.model.device),
            "threads": torch.get_num_threads(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "opencv": cv2.__version__,
                "sam3-node": metadata.version("sam3-node"),
            },
        }

    @cached_property
    def _digests(self) -> dict[str, str]:
        settings = self.settings
        return {
            "model_digest": digest_of(settings.model.name),
            "detector_digest": digest_of(_detector_folder(settings)) if self.detector else "",
        }


def digest_of(name: str) -> str:
    """SHA-256 of the weights of this name or folder; empty where they are not files here."""
    try:
        return checkpoint_digest(name)
    except EngineError:
        return ""


def _detector_folder(settings: Settings) -> str:
    name = settings.detector.name
    return str(NANO_DETECTOR) if name == "nano" else name


def _device_name(device: torch.device) -> str:
    """Of a CPU its instruction set too, which decides how torch's kernels round."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or 'cpu'} {torch.backends.cpu.get_cpu_capability()}"
