"""Publish the frames of a webcam, or of a video file, to the node.

    python examples/publish_webcam.py [SOURCE] [ENDPOINT]

`sam3-node camera webcam:0` does this and more. Start from here for a camera that it does not know.
"""

import sys
import time

import cv2

from sam3_node.transport import FramePublisher
from sam3_node.types import Frame
from sam3_node.wire import encode_image

source = sys.argv[1] if len(sys.argv) > 1 else "0"
endpoint = sys.argv[2] if len(sys.argv) > 2 else "tcp://127.0.0.1:5550"
capture = cv2.VideoCapture(int(source) if source.isdigit() else source)
if not capture.isOpened():
    sys.exit(f"cannot open {source}: expected the number of a webcam, or a video file")
pause_s = 0.0 if source.isdigit() else 1 / (capture.get(cv2.CAP_PROP_FPS) or 30)  # a file at its own rate
with FramePublisher(endpoint) as publisher:
    while not publisher.wait_for_peer(1000):
        print(f"no node reads frames from {endpoint} yet", file=sys.stderr)
    seq = 0
    while True:
        grabbed, image = capture.read()  # BGR uint8 [height, width, 3]
        if not grabbed:
            break
        now_ns = time.time_ns()  # of the capture, as near as OpenCV lets us know it
        height, width = image.shape[:2]
        publisher.send(Frame("webcam", seq, now_ns, width, height, "jpeg", encode_image(image, "jpeg")))
        seq += 1
        time.sleep(pause_s)
print(f"published {seq} frames")
