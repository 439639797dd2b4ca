"""The search for an object with a label in the newest masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import AmbiguousError, did_you_mean
from ..transport import MaskSubscriber
from ..types import CAMERA_SILENT_S, Instance, MaskFrame


class FoundObject(NamedTuple):
    """An object in the newest masks of its camera."""

    masks: MaskFrame
    instance: Instance


class LabelSearch:
    """Looks for a tracked object with `label` in the masks of cameras that send. Upper and lower case count as equal.

    Without `camera`, those of all cameras are searched. With `sure_only`, a doubtful object does not count. Of more
    objects than `most` on one camera, none is chosen.
    """

    def __init__(
        self,
        subscriber: MaskSubscriber,
        label: str,
        camera: str | None,
        sure_only: bool,
        has_ended: Callable[[str, int | None], bool],
        most: int | None = None,
    ) -> None:
        self._subscriber = subscriber
        self._label, self._camera = label, camera
        self._sure_only, self._has_ended = sure_only, has_ended
        self._most = most

    def find(self) -> FoundObject | None:
        """Return the object; that of the camera that sent last, and the surest, if there are several.

        Raises AmbiguousError, which names them, for more than `most`.
        """
        for masks in reversed(self._list_masks()):
            found = [instance for instance in masks.instances if self._fits(instance)]
            if self._most is not None and len(found) > self._most:
                raise AmbiguousError(describe_rivals(self._label, found, self._most, masks.camera))
            if found:
                return FoundObject(masks, max(found, key=lambda instance: instance.score))
        return None

    def describe_sight(self) -> str | None:
        """Return one line that says what the newest masks have instead; None if no camera sends masks."""
        sent = self._list_masks()
        if not sent:
            return None
        seen = Counter(
            f"{instance.label or 'unnamed'} ({instance.state}{', doubtful' * instance.doubtful})"
            for masks in sent
            for instance in masks.instances
        )
        prompts = sorted({prompt for masks in sent for prompt in masks.prompts})
        labels = {instance.label for masks in sent for instance in masks.instances}
        names = ", ".join(f"{count} {name}" if count > 1 else name for name, count in sorted(seen.items()))
        return (
            f"the newest masks of {', '.join(masks.camera for masks in sent)} have {names or 'no objects'}"
            f"{did_you_mean(self._label, labels)}; the node looks for {', '.join(prompts) or 'no names'}: set_prompts "
            "names objects to look for, add_object marks one"
        )

    def _list_masks(self) -> list[MaskFrame]:
        """Return the newest masks of the cameras that are searched, send, and have not begun new ids since."""
        return [
            masks
            for masks in self._subscriber.newest.get_all()
            if self._camera in (None, masks.camera)
            and (self._subscriber.silent_s(masks.camera) or 0.0) < CAMERA_SILENT_S
            and not self._has_ended(masks.camera, masks.epoch)
        ]

    def _fits(self, instance: Instance) -> bool:
        return (
            instance.label.casefold() == self._label.casefold()
            and instance.state == "tracked"
            and not (self._sure_only and instance.doubtful)
        )


def describe_rivals(label: str, found: Sequence[Instance], most: int, camera: str | None) -> str:
    """Return one line that names the objects of a label where only `most` were asked for, and the remedy."""
    names = ", ".join(_describe_rival(instance) for instance in found)
    where = f" on camera {camera}" if camera else ""
    return (
        f"expected at most {most} {label!r}{where}, found {len(found)}: {names}; remove or rename the wrong "
        f"one, name it more exactly, or let the node look for {most} with set_prompts(..., most={most})"
    )


def _describe_rival(instance: Instance) -> str:
    sure = "" if instance.name_confidence is None else f", name {instance.name_confidence:.2f}"
    return f"object {instance.id} {instance.label!r} at {instance.box}{sure}"
