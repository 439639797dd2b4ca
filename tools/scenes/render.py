"""Pictures, labels and depth of a plan, by MuJoCo's renderer: OSMesa in software, EGL on a GPU."""

from __future__ import annotations

import atexit
import ctypes.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.errors import MissingExtraError, require
from tools.scenes.clips import Depth, Image, Labels
from tools.scenes.effects import develop
from tools.scenes.motion import Rng
from tools.scenes.plan import frame_samples
from tools.scenes.scene import MujocoScene

GPU_NODES = ("/dev/dri/renderD128", "/dev/nvidia0")
MAX_GEOMS = 1000
HIGHLIGHT = 250.0  # grey level that the exposure leaves the brightest parts
FONT = 100  # per cent; MuJoCo wants one


def load_mujoco() -> ModuleType:
    """Load MuJoCo with a renderer of this machine; if MUJOCO_GL is not set, set it to egl with a GPU, else to osmesa.

    Raises MissingExtraError if MuJoCo is not installed, or OSMesa's library when OSMesa renders.
    """
    has_gpu = any(Path(node).exists() for node in GPU_NODES)
    backend = os.environ.setdefault("MUJOCO_GL", "egl" if has_gpu else "osmesa")
    os.environ.setdefault("LP_NUM_THREADS", "0")  # OSMesa: one core each, clips are what runs in parallel
    mujoco = require("mujoco", "scenes")
    if backend == "osmesa" and ctypes.util.find_library("OSMesa") is None:
        raise MissingExtraError(
            "rendering without a GPU needs the system library OSMesa, found none: apt-get install libosmesa6"
        )
    return mujoco


class Renderer:
    """One OpenGL context for many scenes; width and height are the maximum of all pictures."""

    def __init__(self, width: int, height: int) -> None:
        self._mujoco = load_mujoco()
        cv2.setNumThreads(1)
        self._gl = require(f"mujoco.{os.environ['MUJOCO_GL']}", "scenes").GLContext(width, height)
        self._gl.make_current()
        atexit.register(self.close)  # while OpenGL's module is still whole

    def open(self, scene: MujocoScene) -> Film:
        """Load a scene onto the device; only one can be open at a time."""
        self._gl.make_current()
        return Film(self._mujoco, scene)

    def close(self) -> None:
        """Free the context."""
        atexit.unregister(self.close)
        self._gl.free()


class Film:
    """A scene on the device, for taking pictures of it."""

    def __init__(self, mujoco: Any, scene: MujocoScene) -> None:
        self._mujoco, self._scene = mujoco, scene
        self._context = mujoco.MjrContext(scene.model, FONT)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        self._geoms = mujoco.MjvScene(scene.model, MAX_GEOMS)
        self._options = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
        self._shadows = any(light.shadow for light in scene.plan.room.lights)
        self._gain = 1.0
        self._middle = frame_samples(scene.plan.effects, scene.plan.settings)
        self._size = (scene.plan.settings.width, scene.plan.settings.height)

    def close(self) -> None:
        """Take the scene off the device."""
        self._context.free()

    def labels(self, frame: int) -> Labels:
        """Return labels [h, w] of a frame."""
        self._update(self._middle[frame])
        colours, _ = self._draw(1, ids=True)
        ids = colours @ np.array([1, 256, 65536], np.int32)
        return self._label_of_segment()[ids]

    def expose(self) -> None:
        """Set the exposure by the first frame: its mean follows the effects, and highlights are kept."""
        picture = self._picture(0)
        mean, high = float(picture.mean()), float(np.percentile(picture, 97))
        self._gain = min(self._scene.plan.effects.brightness / max(mean, 1.0), HIGHLIGHT / max(high, 1.0))

    def image(self, rng: Rng, frame: int) -> Image:
        """Return the picture of a frame, BGR [h, w, 3]."""
        effects = self._scene.plan.effects
        pictures = [self._picture(frame * effects.samples + sample) for sample in range(effects.samples)]
        mean = pictures[0] if len(pictures) == 1 else np.mean(pictures, axis=0).astype(np.uint8)
        return develop(rng, mean, effects, self._gain)

    def depth(self, frame: int) -> Depth:
        """Return the millimetres along the optical axis [h, w]; 0 beyond 65 m."""
        self._update(self._middle[frame])
        _, depth = self._draw(1, ids=True, with_depth=True)
        model = self._scene.model
        extent = model.stat.extent
        near, far = model.vis.map.znear * extent, model.vis.map.zfar * extent
        metres = near * far / (near + depth.astype(np.float64) * (far - near))
        return np.where(metres < 0.999 * far, np.round(1000 * metres), 0).astype(np.uint16)

    def _picture(self, sample: int) -> Image:
        self._update(sample)
        scale = self._scene.plan.effects.supersample
        picture, _ = self._draw(scale, ids=False)
        picture = np.ascontiguousarray(picture[..., ::-1])
        return picture if scale == 1 else cv2.resize(picture, self._size, interpolation=cv2.INTER_AREA)

    def _update(self, sample: int) -> None:
        self._scene.pose(sample)
        everything = self._mujoco.mjtCatBit.mjCAT_ALL
        self._mujoco.mjv_updateScene(
            self._scene.model, self._scene.data, self._options, None, self._camera, everything, self._geoms
        )

    def _draw(
        self, scale: int, ids: bool, with_depth: bool = False
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        flags = self._mujoco.mjtRndFlag
        width, height = (side * scale for side in self._size)
        self._geoms.flags[flags.mjRND_SHADOW] = self._shadows and not ids
        self._geoms.flags[flags.mjRND_REFLECTION] = not ids
        self._geoms.flags[flags.mjRND_SEGMENT] = ids
        self._geoms.flags[flags.mjRND_IDCOLOR] = ids
        rectangle = self._mujoco.MjrRect(0, 0, width, height)
        pixels = np.empty((height, width, 3), np.uint8)
        depth = np.empty((height, width) if with_depth else (0, 0), np.float32)
        self._mujoco.mjr_render(rectangle, self._geoms, self._context)
        self._mujoco.mjr_readPixels(pixels, depth if with_depth else None, rectangle, self._context)
        return pixels[::-1], depth[::-1]

    def _label_of_segment(self) -> Labels:
        """Return the label of each number in the picture of ids; 0 is background."""
        table = np.zeros(MAX_GEOMS + 1, np.uint8)
        geom = self._mujoco.mjtObj.mjOBJ_GEOM
        for item in self._geoms.geoms[: self._geoms.ngeom]:
            if item.segid >= 0 and item.objtype == geom:
                table[item.segid + 1] = self._scene.labels[item.objid]
        return table
