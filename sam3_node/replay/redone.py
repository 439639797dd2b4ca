"""Keeps what was made again of finished results, and puts it in the place of what was there.

A redo makes the masks of some objects again on some frames, in a layer of its own beside the shards of the passes. The
index names the layers in their order. It is replaced in one write when a new layer is complete, so results are those
before or those after a redo, and the passes' own results stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import ReplayError, WireError
from ..schema.fields import Natural, Text, convert, decode_json
from ..schema.marks import Mark
from ..types import Instance, MaskFrame
from .second_pass import merge
from .shards import SECOND_PASS, Shards
from .store import WORK, ReplayCounts, Store

INDEX = f"{WORK}/redo.json"
"""File that names the layers."""
LAYERS = f"{WORK}/redo"
"""Folder of the layers, a folder for each."""


class Stretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Frames on which an object was made again: results `first` to `stop` (exclusive), counted over all cameras."""

    camera: Text
    id: Natural
    first: Natural
    stop: Natural
    removed: bool = False
    """True: the object is on none of these frames."""


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One redo: the marks that it carried out, and where their objects were made again."""

    name: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    """of its folder"""
    marks: tuple[Mark, ...]
    stretches: tuple[Stretch, ...]
    settings: dict[str, dict[str, object]] = {}
    """Settings other than the job's that its masks were made with, by section and field."""

    @property
    def folder(self) -> str:
        """Folder of its shards in the store."""
        return f"{LAYERS}/{self.name}"


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the index."""

    layers: tuple[Layer, ...] = ()


def read_layers(store: Store) -> tuple[Layer, ...]:
    """Return the layers of a store in their order; none before the first redo. Raises ReplayError if it is damaged."""
    if not store.exists(INDEX):
        return ()
    try:
        return convert(decode_json(store.read(INDEX), INDEX), _Index, INDEX).layers
    except WireError as error:
        raise ReplayError(
            f"{INDEX}: expected the index of redone results, found {error}; start over with --again"
        ) from error


def write_layers(store: Store, layers: Sequence[Layer]) -> None:
    """Make these layers the results, in one write. Then delete all others."""
    store.write(INDEX, msgspec.json.format(msgspec.json.encode(_Index(tuple(layers))), indent=1))
    clear_layers(store, layers)


def clear_layers(store: Store, kept: Sequence[Layer] = ()) -> None:
    """Delete the layers that are not kept."""
    folders = tuple(f"{layer.folder}/" for layer in kept)
    for name in store.names(LAYERS):
        if not name.startswith(folders):
            store.delete(name)


def name_newest(store: Store) -> str:
    """Return the name of the last layer, by which outputs are told from older ones; "" for none."""
    layers = read_layers(store)
    return layers[-1].name if layers else ""


def count_objects(store: Store) -> dict[str, int]:
    """Return the number of objects by camera, with those that marks have added."""
    first = ReplayCounts.from_totals(Shards(store).cursor().totals)
    ids = {camera: set(labels) for camera, labels in first.objects.items()}
    for layer in read_layers(store):
        for stretch in layer.stretches:
            ids.setdefault(stretch.camera, set()).add(str(stretch.id))
    return {camera: len(found) for camera, found in ids.items()}


def read_results(store: Store, layers: Sequence[Layer] | None = None) -> Iterator[MaskFrame]:
    """Yield the masks of a replay whose shards are complete: of both passes, with its layers or with these."""
    # a replay forward alone has no second pass
    masks = Shards(store).masks()
    second = Shards(store, SECOND_PASS)
    if len(second):
        masks = merge(masks, second.masks_backward())
    for layer in read_layers(store) if layers is None else layers:
        masks = replace_stretches(masks, layer.stretches, Shards(store, layer.folder).masks())
    return masks


def replace_stretches(
    results: Iterable[MaskFrame], stretches: Sequence[Stretch], redone: Iterable[MaskFrame]
) -> Iterator[MaskFrame]:
    """Yield the results. In each stretch, its object is as in `redone`, which has some of the frames in their order.

    All else stays as it is, also on the same frames. A frame that could not be made again keeps what it had. Raises
    ReplayError at the end if a frame of `redone` is not among the results.
    """
    remaining = iter(redone)
    again = next(remaining, None)
    for index, masks in enumerate(results):
        found = None
        if again is not None and again.key == masks.key:
            found = again
            again = next(remaining, None)
        own = [one for one in stretches if one.camera == masks.camera and one.first <= index < one.stop]
        yield _replace(masks, own, found) if own else masks
    if again is not None:
        raise ReplayError(
            f"camera {again.camera}: expected the redone frame {again.seq} among the results, found no such frame; "
            "start over with --again"
        )


def _replace(masks: MaskFrame, stretches: Sequence[Stretch], found: MaskFrame | None) -> MaskFrame:
    """Return the masks of one frame with the objects of its stretches as they were found."""
    instances: dict[int, Instance] = {instance.id: instance for instance in masks.instances}
    redone = {} if found is None else {instance.id: instance for instance in found.instances}
    for stretch in stretches:
        before = instances.get(stretch.id)
        if stretch.removed:
            instances.pop(stretch.id, None)
        elif (instance := redone.get(stretch.id)) is not None:
            # links between cameras, and the age since the object was first there, are the results' own
            if before is not None:
                instance = replace(instance, age=before.age, world_id=before.world_id)
            instances[stretch.id] = instance
    return replace(masks, instances=tuple(instances.values()))
