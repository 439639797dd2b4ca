"""Segment one picture for each HTTP request, with the extras `node` and `console` and a server such as uvicorn.

uvicorn --app-dir examples --host 127.0.0.1 --limit-concurrency 64 segment_http:app

POST /segment takes a JSON body: an image in base64 (`image` or `image_b64`) with `points` and `labels`, a `box`, or
both, in pixels; or `boxes`, of which each gets its mask. The answer is a list of {score, rle}, RLE as pycocotools reads
it. With `multimask`, all masks that may be meant are in it, the best first. GET /models names the weights, /health
and /ready are for probes. A refusal is {"error": why}: 400 for what cannot be read, 422 for what cannot be done.

SEGMENT_MODEL names the weights. With SEGMENT_KEY, requests need it in the header `X-API-Key`, or as `Authorization:
Bearer`. Without, only this machine is answered.
"""

import asyncio
import base64
import hashlib
import json
import logging
import os
import secrets
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sam3_node.addresses import is_loopback, is_loopback_header
from sam3_node.engines.oom import find_device_error
from sam3_node.errors import RequestError, WireError
from sam3_node.geometry import Scaling
from sam3_node.models import Features, load_tracker
from sam3_node.perception.output_masks import to_prompt_results
from sam3_node.perception.prompts import to_model
from sam3_node.tracking import Tracker
from sam3_node.wire import encode_mask
from sam3_node.wire.frame_prompt import FramePrompt
from sam3_node.wire.images import decode_photo

MAX_BODY = 4 << 20
"""Bytes of a request: an image of 3 MB. A longer one is answered with 413."""
BODY_S = 10.0
"""Seconds in which the whole body must come. A slower one is answered with 408."""
MAX_VALUES = 4096
"""Commas and opening brackets of a body. Four bytes of JSON can take a hundred bytes of memory."""
MAX_MEMORY = 25_000_000
"""Bytes that decoding an image may take: 4 million pixels. A larger image is answered with 400, and is not decoded."""
MAX_BOXES = 16
"""Boxes of a request. Each takes the time of a prompt."""
MAX_REQUESTS = 8
"""Requests at once, of which one is carried out. A further one is answered with 503."""
MAX_KEPT = 8
"""Images whose features are kept. Those of SAM 3 take 11 MB each."""
FIELDS = ("image", "image_b64", "points", "labels", "box", "boxes", "multimask")

KEY = os.environ.get("SEGMENT_KEY", "")
model = load_tracker(os.environ.get("SEGMENT_MODEL", "nano"), device="auto")
# a picture has no earlier ones to remember
tracker = Tracker(model, max_objects=1, bank_size=2, history=0)
places = asyncio.Semaphore(MAX_REQUESTS)
# one thread: requests wait for it in their order, and others are read and refused meanwhile
worker = ThreadPoolExecutor(1, "segment")
log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """An image that was encoded."""

    features: Features
    scaling: Scaling


kept: OrderedDict[str, Encoded] = OrderedDict()
"""Images by the SHA-256 of their file, the one that was used last at the end. The worker alone uses it."""
lost: list[str] = []
"""Why the GPU cannot be used any more. A restart helps."""


async def segment(request: Request) -> JSONResponse:
    """Answer POST /segment."""
    check_caller(request)
    # a browser asks this server before it sends JSON for a page of another site, and is refused
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "expected the header Content-Type: application/json, found another or none")
    packing = request.headers.get("content-encoding", "identity").strip().lower()
    if packing != "identity":
        raise HTTPException(415, f"expected a body as it is, without Content-Encoding, found {packing!r:.40}")
    if places.locked():
        raise HTTPException(503, "too many requests; send it again later", {"Retry-After": "1"})
    async with places:
        body = await read_body(request)
        try:
            masks = await asyncio.get_running_loop().run_in_executor(worker, find_masks, body)
        except (WireError, RecursionError) as error:
            raise HTTPException(400, str(error)) from None
        except RequestError as error:
            raise HTTPException(422, str(error)) from None
        except Exception as error:
            failed = find_device_error(error)
            if failed is not None:
                lost.append(str(failed))
            log.exception("a request failed")
            raise HTTPException(500, "the request failed in the server; see its log") from None
    return JSONResponse(masks)


def check_caller(request: Request) -> None:
    """Refuse whoever has not the key; without a key, whoever is not a program on this machine."""
    if KEY:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        found = request.headers.get("x-api-key", bearer)
        # compared in constant time, so that the time of the answer tells nothing of the key
        if not secrets.compare_digest(found.encode(), KEY.encode()):
            raise HTTPException(
                401, "expected the key in the header X-API-Key", {"WWW-Authenticate": "Bearer"}
            )
        return
    # the address at which this server was reached; without a port it is a socket of the file system
    host, port = request.scope["server"]
    if port is not None and not is_loopback(host):
        raise HTTPException(403, "expected a request from this machine; set SEGMENT_KEY to answer others")
    # a page whose name was made to resolve to this machine sends that name
    if not is_loopback_header(request.headers.getlist("host")):
        raise HTTPException(403, "expected a request for 127.0.0.1, found one for another host")


async def read_body(request: Request) -> bytearray:
    """Read a body of bounded length in bounded time."""
    body = bytearray()
    # a sender that stops in its body would keep the place of others
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise HTTPException(413, f"expected at most {MAX_BODY} bytes, found more; send a JPEG")
    except TimeoutError:
        raise HTTPException(
            408, f"expected the whole body in {BODY_S:g} s, found a part; send it faster"
        ) from None
    except ClientDisconnect:
        raise HTTPException(400, "expected the whole body, found a part") from None
    return body


def find_masks(body: bytearray) -> list[dict[str, Any]]:
    """Return the masks of a request. Raises WireError for what cannot be read, RequestError for what cannot be done."""
    asked = read_json(body)
    prompts = read_prompts(asked)
    multimask = asked.get("multimask", False)
    if not isinstance(multimask, bool):
        raise RequestError(f"multimask: expected true or false, found {multimask!r:.80}")
    image = encode(read_image(asked))
    masks = []
    for index, prompt in enumerate(prompts):
        for found in find_candidates(image, prompt, multimask):
            counts = encode_mask(found.mask, "rle")["data"].decode()
            mask: dict[str, Any] = {"score": found.score}
            mask["rle"] = {"size": image.scaling.frame_size, "counts": counts}
            # the place of its box among the boxes
            if "boxes" in asked:
                mask["box"] = index
            masks.append(mask)
    return masks


def read_json(body: bytearray) -> dict[str, Any]:
    """Return the fields of a body that say something. Values are counted before memory is allocated for them."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise WireError(f"expected a body of at most {MAX_VALUES} values, found more")
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("expected a body in JSON, found something else") from None
    if not isinstance(asked, dict):
        raise WireError(f"expected a JSON object, found {type(asked).__name__}")
    unknown = [name for name in asked if name not in FIELDS]
    if unknown:
        known = ", ".join(FIELDS)
        raise RequestError(f"expected the fields {known}, found {unknown[0]!r:.80}")
    return {name: value for name, value in asked.items() if value not in (None, [])}


def read_prompts(asked: dict[str, Any]) -> list[FramePrompt]:
    """Return one prompt for each of the boxes, or the prompt of points and a box."""
    if "boxes" not in asked:
        return [FramePrompt(asked.get("points"), asked.get("labels"), asked.get("box"))]
    boxes = asked["boxes"]
    beside = asked.keys() & {"points", "labels", "box"}
    if beside:
        raise RequestError(f"boxes: expected none of points, labels and box beside them, found {min(beside)}")
    if not isinstance(boxes, list) or not 1 <= len(boxes) <= MAX_BOXES:
        raise RequestError(f"boxes: expected a list of 1 to {MAX_BOXES} boxes, found {boxes!r:.80}")
    return [FramePrompt(box=box) for box in boxes]


def read_image(asked: dict[str, Any]) -> bytes:
    """Return the file of the image, JPEG or PNG."""
    names = asked.keys() & {"image", "image_b64"}
    if len(names) != 1:
        raise RequestError("expected the image in one of the fields image and image_b64")
    (name,) = names
    text = asked[name]
    if not isinstance(text, str):
        raise RequestError(f"{name}: expected a text in base64, found {type(text).__name__}")
    # browsers make URLs such as data:image/png;base64,…
    if text.startswith("data:"):
        text = text.partition(",")[2]
    # base64 for URLs has - and _ in the place of + and /, which a decoder would drop without a word
    try:
        return base64.b64decode(text.translate({ord("-"): "+", ord("_"): "/"}))
    except ValueError as error:
        raise WireError(f"{name}: expected base64: {error}") from None


def encode(file: bytes) -> Encoded:
    """Return an image's features. They are kept, because a person asks for several masks of one image."""
    digest = hashlib.sha256(file).hexdigest()
    if digest not in kept:
        # refused by its size before it is decoded
        image = decode_photo(file, max_memory=MAX_MEMORY)
        # what is used least makes room first, so that memory holds no more than MAX_KEPT
        while len(kept) >= MAX_KEPT:
            kept.popitem(last=False)
        height, width = image.shape[:2]
        features = model.encode(model.preprocess(image))
        kept[digest] = Encoded(features, Scaling((height, width), model.image_size))
    kept.move_to_end(digest)
    return kept[digest]


def find_candidates(image: Encoded, prompt: FramePrompt, multimask: bool) -> list[Any]:
    """Return the best mask of a prompt, or all that may be meant, by falling score."""
    placed = to_model(prompt, 0, image.scaling)
    if multimask:
        logits, scores = tracker.segment_candidates(image.features, placed)
    else:
        logits, scores = tracker.segment(image.features, placed)
        logits = logits[None]
    return to_prompt_results(0, image.scaling, logits, scores)


async def list_models(request: Request) -> JSONResponse:
    """Answer GET /models."""
    check_caller(request)
    described = {
        "name": model.name,
        "device": str(model.device),
        "image_size": model.image_size,
        "masks": model.candidates,
        "max_pixels": MAX_MEMORY // 6,
    }
    return JSONResponse({"models": [described]})


async def check_health(request: Request) -> JSONResponse:
    """Answer GET /health: 503 when only a restart helps."""
    if lost:
        raise HTTPException(503, lost[0])
    return JSONResponse({"status": "ok"})


async def check_ready(request: Request) -> JSONResponse:
    """Answer GET /ready: 503 while another server should get the next request."""
    if places.locked():
        raise HTTPException(503, f"{MAX_REQUESTS} requests wait")
    return await check_health(request)


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """Answer with a refusal."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


routes = [
    Route("/segment", segment, methods=["POST"]),
    Route("/models", list_models),
    Route("/health", check_health),
    Route("/ready", check_ready),
]
app = Starlette(routes=routes, exception_handlers={HTTPException: refuse})
