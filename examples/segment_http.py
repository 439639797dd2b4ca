"""Segment one picture for each HTTP request, with the extras `node` and `console` and a server such as uvicorn.

uvicorn --app-dir examples --host 127.0.0.1 segment_http:app

POST /segment takes a JSON body: an `image` in base64 with `points` and `labels`, a `box`, or both, in pixels. The
answer is a list of {score, rle}, RLE as pycocotools reads it. A request costs bounded memory and time, but there are no
keys.
"""

import asyncio
import base64
import json
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sam3_node.errors import Sam3NodeError
from sam3_node.models import load_tracker
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.types import Frame
from sam3_node.wire import encode_mask
from sam3_node.wire.frame_prompt import FramePrompt
from sam3_node.wire.images import decode_photo

MAX_BODY = 4 << 20
"""Bytes of a request: an image of 3 MB. A longer one is answered with 413."""
BODY_S = 10.0
"""Seconds in which the whole body must come. A slower one is answered with 408."""
MAX_MEMORY = 25_000_000
"""Bytes that decoding an image may take: 4 million pixels. A larger image is answered with 400, and is not decoded."""
MAX_REQUESTS = 4
"""Requests at once, of which one is carried out. A further one is answered with 503."""

# a picture has no earlier ones to keep
pipeline = Pipeline(load_tracker("nano"), TrackerSettings(feature_cache=1, feature_cache_s=0), "http")
places = asyncio.Semaphore(MAX_REQUESTS)
model = asyncio.Lock()


async def segment(request: Request) -> JSONResponse:
    if places.locked():
        return JSONResponse({"error": "too many requests; send it again later"}, 503)
    async with places:
        body = bytearray()
        # a sender that stops in its body would keep the place of others
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_BODY:
                        return JSONResponse(
                            {"error": f"expected at most {MAX_BODY} bytes, found more; send a JPEG"}, 413
                        )
        except TimeoutError:
            return JSONResponse(
                {"error": f"expected the whole body in {BODY_S:g} s, found a part; send it faster"}, 408
            )
        # in a thread, so that other requests are read and refused meanwhile
        async with model:
            try:
                return JSONResponse(await run_in_threadpool(find_masks, body))
            except KeyError as error:
                return JSONResponse({"error": f"expected the field {error}, found none"}, 400)
            except (Sam3NodeError, ValueError, TypeError, RecursionError) as error:
                return JSONResponse({"error": str(error)}, 400)


def find_masks(body: bytearray) -> list[dict[str, Any]]:
    asked = json.loads(body)
    image = decode_photo(base64.b64decode(asked["image"]), max_memory=MAX_MEMORY)
    height, width = image.shape[:2]
    pipeline.step(Frame("http", 0, 0, width, height, "bgr8", image.tobytes()))
    prompt = FramePrompt(asked.get("points"), asked.get("labels"), asked.get("box"))
    masks = []
    for found in pipeline.candidates(prompt):
        counts = encode_mask(found.mask, "rle")["data"].decode()
        masks.append({"score": found.score, "rle": {"size": [height, width], "counts": counts}})
    return masks


app = Starlette(routes=[Route("/segment", segment, methods=["POST"])])
