"""Render plans with MuJoCo: a scene of a plan as a model, and pictures, labels and depth of its frames."""

from __future__ import annotations

import atexit
import ctypes.util
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.errors import MissingExtraError, require
from sam3_node.types import Image
from tools.scenes.arm import Limb
from tools.scenes.camera import develop
from tools.scenes.clips import Depth, Labels
from tools.scenes.layout import TABLE_HEIGHT, Room
from tools.scenes.meshes import Mesh, Part
from tools.scenes.plan import Plan, frame_samples
from tools.scenes.stage import Array, Rng, frames, quaternions
from tools.scenes.textures import Texture

SHADOW_PIXELS = 1024
WALL_HEIGHT = 3.0
LIGHT_INSIDE = 0.8  # of the way to the walls, which would cast shadows themselves
TABLE_THICKNESS = 0.03
GPU_NODES = ("/dev/dri/renderD128", "/dev/nvidia0")
MAX_GEOMS = 1000
HIGHLIGHT = 250.0  # grey level that the exposure leaves the brightest parts
FONT = 100  # per cent; MuJoCo wants one


class MujocoScene:
    """A compiled plan. model, data: MuJoCo's. labels [geoms]: the label of each geom's pixels."""

    def __init__(self, plan: Plan) -> None:
        self._mujoco = mujoco = require("mujoco", "scenes")
        self.plan = plan
        self._spec = mujoco.MjSpec()
        self._textures: list[Texture] = []
        self._set_visuals()
        _Room(self).build(plan.room)
        bodies = [self._add_actor(actor.model.parts) for actor in plan.actors]
        for limb in plan.limbs:
            self._add_limb(limb)
        camera = self._spec.worldbody.add_body(mocap=True)
        camera.add_camera(fovy=plan.camera.fov_y)
        self.model = self._spec.compile()
        self.data = mujoco.MjData(self.model)
        self._fill_textures()
        body_labels = np.zeros(self.model.nbody, np.uint8)
        for body, actor in zip(bodies, plan.actors, strict=True):
            body_labels[body.id] = actor.label
        self.labels = body_labels[self.model.geom_bodyid]
        self._positions, self._quats = _poses(plan)

    def pose(self, sample: int) -> None:
        """Place everything as in the n-th picture."""
        self.data.mocap_pos[:] = self._positions[sample]
        self.data.mocap_quat[:] = self._quats[sample]
        self._mujoco.mj_kinematics(self.model, self.data)
        self._mujoco.mj_camlight(self.model, self.data)

    @property
    def mujoco(self) -> ModuleType:
        """The module."""
        return self._mujoco

    @property
    def world(self) -> Any:
        """The world's body in the specification."""
        return self._spec.worldbody

    def add_material(self, texture: Texture | None = None, **finish: Any) -> str:
        """Add a material, with a texture if given; return its name."""
        mujoco = self._mujoco
        name = f"material{len(self._spec.materials)}"
        material = self._spec.add_material(name=name, **finish)
        if texture is not None:
            self._textures.append(texture)
            image = f"texture{len(self._textures)}"
            height, width = texture.shape[:2]
            flat = {"type": mujoco.mjtTexture.mjTEXTURE_2D, "builtin": mujoco.mjtBuiltin.mjBUILTIN_FLAT}
            self._spec.add_texture(name=image, width=width, height=height, **flat)
            material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = image
        return name

    def _set_visuals(self) -> None:
        plan = self.plan
        visual = self._spec.visual
        scale = plan.effects.supersample
        visual.global_.offwidth = plan.settings.width * scale
        visual.global_.offheight = plan.settings.height * scale
        visual.quality.offsamples = 0
        visual.quality.shadowsize = SHADOW_PIXELS
        visual.headlight.ambient = [plan.room.ambient] * 3
        visual.headlight.diffuse = [0.15] * 3
        visual.headlight.specular = [0.1] * 3
        visual.map.znear = 0.01
        visual.map.zfar = 20.0
        self._spec.stat.extent = 1.0
        self._spec.stat.center = [0, 0, 0]

    def _add_actor(self, parts: tuple[Part, ...]) -> Any:
        body = self.world.add_body(mocap=True)
        for part in parts:
            rgba = (*part.color, part.alpha)
            finish = {"specular": part.finish.specular, "shininess": part.finish.shininess, "rgba": rgba}
            material = self.add_material(part.texture, **finish)
            mesh = self._add_mesh(part.mesh)
            geom = self._mujoco.mjtGeom.mjGEOM_MESH
            body.add_geom(type=geom, meshname=mesh, material=material, contype=0, conaffinity=0)
        return body

    def _add_mesh(self, mesh: Mesh) -> str:
        name = f"mesh{len(self._spec.meshes)}"
        self._spec.add_mesh(
            name=name,
            uservert=mesh.vertices.ravel(),
            userface=mesh.faces.ravel(),
            usertexcoord=mesh.texcoords.ravel(),
            userfacetexcoord=mesh.texfaces.ravel(),
            inertia=self._mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL,
        )
        return name

    def _add_limb(self, limb: Limb) -> None:
        kind = getattr(self._mujoco.mjtGeom, f"mjGEOM_{limb.solid.upper()}")
        material = self.add_material(rgba=(*limb.color, 1.0), specular=0.4, shininess=0.5)
        body = self.world.add_body(mocap=True)
        body.add_geom(type=kind, size=limb.size, material=material, contype=0, conaffinity=0)

    def _fill_textures(self) -> None:
        for index, texture in enumerate(self._textures):
            start = self.model.tex_adr[index]
            self.model.tex_data[start : start + texture.size] = texture.ravel()


class _Room:
    """Adds table, floor, walls and lights to a scene."""

    def __init__(self, scene: MujocoScene) -> None:
        self.scene = scene
        self.kinds = scene.mujoco.mjtGeom

    def build(self, room: Room) -> None:
        self._table(room)
        floor = self.scene.add_material(room.floor_texture, texrepeat=[2, 2])
        self._plane((0.0, 0.0, -TABLE_HEIGHT), (0.0, 0.0, 1.0), (8.0, 8.0), floor)
        wall = self.scene.add_material(room.wall_texture, texrepeat=[2, 1])
        for quarter in range(4):
            angle = room.yaw + quarter * math.pi / 2
            inward = (math.cos(angle), math.sin(angle), 0.0)
            x, y = (-room.wall_distance * along for along in inward[:2])
            place = (x, y, WALL_HEIGHT / 2 - TABLE_HEIGHT)
            self._plane(place, inward, (room.wall_distance, WALL_HEIGHT / 2), wall)
        for light in room.lights:
            self.scene.world.add_light(
                type=self.scene.mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
                pos=[LIGHT_INSIDE * room.wall_distance * value for value in light.position],
                dir=[-value for value in light.position],
                diffuse=light.color,
                specular=[0.5 * value for value in light.color],
                castshadow=light.shadow,
            )

    def _table(self, room: Room) -> None:
        finish = {"reflectance": room.reflectance, "specular": 0.2, "shininess": 0.3}
        top = self.scene.add_material(room.table_texture, **finish)
        size = [*room.table, TABLE_THICKNESS / 2]
        place = [*room.centre, -TABLE_THICKNESS / 2]
        quat = [math.cos(room.yaw / 2), 0, 0, math.sin(room.yaw / 2)]
        self._add(self.kinds.mjGEOM_BOX, size=size, pos=place, quat=quat, material=top)

    def _plane(
        self, place: tuple[float, ...], normal: tuple[float, ...], half: tuple[float, float], material: str
    ) -> None:
        sideways = np.cross((0.0, 0.0, 1.0), normal) if normal[2] == 0 else np.array((1.0, 0.0, 0.0))
        quat = quaternions(frames(np.array([normal]), sideways))[0]
        self._add(self.kinds.mjGEOM_PLANE, size=[*half, 0.1], pos=place, quat=quat, material=material)

    def _add(self, kind: Any, **geom: Any) -> None:
        self.scene.world.add_geom(type=kind, contype=0, conaffinity=0, **geom)


def _poses(plan: Plan) -> tuple[Array, Array]:
    """Return positions [n, bodies, 3] and quaternions [n, bodies, 4] in the order of the mocap bodies."""
    moving: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = [
        *((actor.positions, actor.quats) for actor in plan.actors),
        *((limb.positions, limb.quats) for limb in plan.limbs),
        (plan.camera.positions, quaternions(plan.camera.rotations)),
    ]
    return np.stack([position for position, _ in moving], 1), np.stack([quat for _, quat in moving], 1)


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
        self._mujoco = mujoco
        self._scene = scene
        self._context = mujoco.MjrContext(scene.model, FONT)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        self._geoms = mujoco.MjvScene(scene.model, MAX_GEOMS)
        self._options = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = 0
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
        mean = float(picture.mean())
        high = float(np.percentile(picture, 97))
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
        near = model.vis.map.znear * extent
        far = model.vis.map.zfar * extent
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
        set_to = self._geoms.flags
        width, height = (side * scale for side in self._size)
        set_to[flags.mjRND_SHADOW] = self._shadows and not ids
        set_to[flags.mjRND_REFLECTION] = not ids
        set_to[flags.mjRND_SEGMENT] = set_to[flags.mjRND_IDCOLOR] = ids
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
