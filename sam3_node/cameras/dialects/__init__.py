"""Camera servers of other projects, read as they are: GR00T's whole-body camera server, lerobot's, and imagezmq.

`sam3-node camera tcp://robot:5555 --dialect lerobot` is a camera source like any other: it subscribes there, and the
camera process publishes the images as frames. So stamps, keys, recording, the watchdog and the node are as with every
camera. `messages` reads bytes, `stamps` maps the server's clock, `source` receives and keeps the newest of each camera.
"""
