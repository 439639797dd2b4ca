"""Carries out the services of ROS, by requests to the node. It needs no ROS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sam3_node.client import PerceptionClient, Segmentation
from sam3_node.errors import RequestError, Sam3NodeError, UnknownObjectError

from .messages import (
    MaskMessages,
    Picture,
    SegmentPrompt,
    assign_values,
    make_mask_frame,
    read_exemplar,
    read_picture,
    read_prompt,
    read_prompts,
    read_scores,
    read_segment_prompt,
)
from .parts import format_id, parse_id
from .picks import PickMessages, read_pick_request
from .sent_images import SentImages


class Services:
    """The services of one camera. `searcher` is the connection for what takes seconds, `client` that for the rest."""

    def __init__(
        self,
        camera: str,
        base_frame: str,
        client: PerceptionClient,
        searcher: PerceptionClient,
        images: SentImages,
    ) -> None:
        self._camera = camera
        self._client = client
        self._searcher = searcher
        self._images = images
        self._messages = MaskMessages(base_frame)
        self._picks = PickMessages(base_frame)
        self._names: dict[str, str] = {}  # ids that callers of Isaac ROS' service gave, to ours

    def list_by_name(self) -> dict[str, Callable[[Any, Any], Any]]:
        """Return functions that fill the response to a request, and return it. They wait for the node's answer."""
        served = {
            "add_object": self._add_object,
            "refine_object": self._refine_object,
            "remove_object": self._remove_object,
            "set_prompts": self._set_prompts,
            "add_exemplar": self._add_exemplar,
            "segment": self._segment,
            "segment_everything": self._segment_everything,
            "where": self._where,
            "next_pick": self._next_pick,
            "isaac_add_objects": self._add_objects,
            "isaac_remove_object": self._remove_named,
        }
        return {name: self._answering(serve) for name, serve in served.items()}

    def _add_object(self, request: Any, response: Any) -> None:
        added = self._client.add_object(
            **read_prompt(request),
            label=request.label or None,
            seq=self._images.find_seq(request.stamp),
            camera=self._camera,
        )
        response.id = format_id(added.id, added.epoch)

    def _refine_object(self, request: Any, response: Any) -> None:
        object_id, epoch = parse_id(request.id)
        refined = self._client.refine_object(
            object_id,
            **read_prompt(request),
            seq=self._images.find_seq(request.stamp),
            camera=self._camera,
            epoch=epoch,
        )
        response.score = float(refined.score)

    def _remove_object(self, request: Any, _: Any) -> None:
        object_id, epoch = parse_id(request.id)
        self._client.remove_object(object_id, camera=self._camera, epoch=epoch)

    def _add_objects(self, request: Any, response: Any) -> None:
        """Add all objects, or none: those of before an error are removed again. Labels are the caller's ids."""
        camera = self._camera
        prompts = read_prompts(request)
        seq = self._images.find_seq(request.request_header.stamp)
        self._forget_names()
        for name in prompts.keys() & self._names.keys():
            raise RequestError(f"object ids: expected new ones, found {name[:40]!r}, which is tracked")
        added: dict[str, str] = {}
        try:
            for name, prompt in prompts.items():
                result = self._client.add_object(**prompt, label=name, seq=seq, camera=camera)
                added[name] = format_id(result.id, result.epoch)
        except BaseException:
            for text in added.values():
                with suppress(Sam3NodeError):
                    self._client.remove_object(parse_id(text)[0], camera=camera)
            raise
        self._names |= added
        self._list_names(response)

    def _remove_named(self, request: Any, response: Any) -> None:
        self._forget_names()
        text = self._names.get(request.object_id)
        if text is None:
            raise UnknownObjectError(
                f"no object {request.object_id[:40]!r}; there are {list(self._names) or 'none'}"
            )
        object_id, epoch = parse_id(text)
        self._client.remove_object(object_id, camera=self._camera, epoch=epoch)
        del self._names[request.object_id]
        self._list_names(response)

    def _forget_names(self) -> None:
        """Forget the names of objects that the node tracks no longer."""
        objects = self._client.list_objects(camera=self._camera)
        tracked = {format_id(one.id, one.epoch) for one in objects}
        self._names = {name: text for name, text in self._names.items() if text in tracked}

    def _list_names(self, response: Any) -> None:
        """Fill in all names, with the values of their objects in the label image."""
        response.object_ids = list(self._names)
        response.object_indices = assign_values(parse_id(text)[0] for text in self._names.values())

    def _set_prompts(self, request: Any, _: Any) -> None:
        names = [str(name) for name in request.prompts]
        self._client.set_prompts(names, scores=read_scores(request.scores, names))

    def _add_exemplar(self, request: Any, _: Any) -> None:
        seq = self._images.find_seq(request.stamp)
        photo = bytes(request.photo.data)
        # a photo is no image of the camera
        place = {"photo": photo} if photo else {"seq": seq, "camera": self._camera}
        self._client.add_exemplar(request.name, text=request.text or None, **read_exemplar(request), **place)

    def _segment(self, request: Any, response: Any) -> None:
        asked = read_segment_prompt(request)
        picture = read_picture(request)
        if picture is None and asked.names:
            # sam3-node looks for names on pictures that are sent, so the camera's image is sent again
            picture = self._images.find_picture(request.stamp)
        if picture is not None:
            self._segment_picture(request, response, asked, picture)
            return
        camera = self._camera
        seq = self._images.find_seq(request.stamp)
        found: list[Segmentation] = []
        for prompt in asked.prompts:
            segmentation = self._client.segment(
                **prompt, seq=seq, camera=camera, multimask=bool(request.multimask)
            )
            # all are of one image, also if the next one has come
            seq = segmentation.seq
            found.extend(segmentation.candidates or [segmentation])
        self._fill_masks(request, response, found)

    def _segment_picture(self, request: Any, response: Any, asked: SegmentPrompt, picture: Picture) -> None:
        found = self._client.segment_photo(
            picture.pack(),
            asked.prompts,
            names=asked.names,
            scores=asked.scores,
            multimask=bool(request.multimask),
        )
        size = picture.colour.height, picture.colour.width
        shown = make_mask_frame(self._camera, found, size)
        self._messages.fill_masks(response, shown, picture.header, bool(request.with_label_image))

    def _segment_everything(self, request: Any, response: Any) -> None:
        # for the message, 0 is the node's own: an option cannot be absent
        options = {
            name: getattr(request, name) or None
            for name in ("grid", "min_iou", "min_stability", "max_overlap", "most")
        }
        found = self._searcher.segment_everything(
            **options, seq=self._images.find_seq(request.stamp), camera=self._camera
        )
        response.message = found.note
        self._fill_masks(request, response, found)

    def _fill_masks(self, request: Any, response: Any, found: Sequence[Segmentation]) -> None:
        """Fill in the masks of one image of the camera. Raises UnknownFrameError for one that was not sent here."""
        if not found:
            return
        header = self._images.require_header(found[0].seq, self._camera)
        masks = make_mask_frame(self._camera, found, found[0].mask.size)
        self._messages.fill_masks(response, masks, header, bool(request.with_label_image))

    def _where(self, request: Any, response: Any) -> None:
        camera = self._camera
        if request.name and request.id:
            raise RequestError("expected a name or an id, found both")
        if request.id:
            object_id, epoch = parse_id(request.id)
            places = self._client.where(object_id, camera=camera, epoch=epoch)
        else:
            places = self._client.where(str(request.name) or None, camera=camera)
        self._messages.fill_places(response, places, [self._images.find_header_of(place) for place in places])

    def _next_pick(self, request: Any, response: Any) -> None:
        reply = self._client.next_pick(**read_pick_request(request), camera=self._camera)
        header = self._images.require_header(reply.seq, self._camera)
        self._picks.fill_picks(response, reply, header)

    def _answering(self, serve: Callable[[Any, Any], None]) -> Callable[[Any, Any], Any]:
        """Return a service that gives success, or the code and text of an error. It never raises."""

        def answer(request: Any, response: Any) -> Any:
            try:
                serve(request, response)
                response.success = True
            except Sam3NodeError as error:
                _fail(response, error.code, str(error))
            except Exception as error:  # no request may end the process
                _fail(response, "internal", f"{type(error).__name__}: {error}")
            return response

        return answer


def _fail(response: Any, code: str, message: str) -> None:
    response.success = False
    if hasattr(response, "code"):
        response.code = code
        response.message = message
    else:  # Isaac ROS' answers have a message only
        response.message = f"{code}: {message}"
