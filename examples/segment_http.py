"""Segment one picture for each HTTP request, with the extras `node` and `console` and a server such as uvicorn.

uvicorn --app-dir examples --host 127.0.0.1 segment_http:app

POST /segment takes a JSON body: an `image` in base64 with `points` and `labels`, a `box`, or both, in pixels. The
answer is a list of {score, rle}, RLE as pycocotools reads it. There are neither keys nor limits.
"""

import base64

import cv2
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sam3_node.models import load_tracker
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.types import Frame
from sam3_node.wire import encode_mask
from sam3_node.wire.frame_prompt import FramePrompt

pipeline = Pipeline(load_tracker("nano"), TrackerSettings(), "http")


async def segment(request: Request) -> JSONResponse:
    body = await request.json()
    image = cv2.imdecode(np.frombuffer(base64.b64decode(body["image"]), np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        return JSONResponse({"error": "image: expected base64 of a JPEG or PNG"}, 400)
    height, width = image.shape[:2]
    pipeline.step(Frame("http", 0, 0, width, height, "bgr8", image.tobytes()))
    prompt = FramePrompt(body.get("points"), body.get("labels"), body.get("box"))
    masks = []
    for found in pipeline.candidates(prompt):
        counts = encode_mask(found.mask, "rle")["data"].decode()
        masks.append({"score": found.score, "rle": {"size": [height, width], "counts": counts}})
    return JSONResponse(masks)


app = Starlette(routes=[Route("/segment", segment, methods=["POST"])])
