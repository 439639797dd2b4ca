"""A plan as a MuJoCo model: every object, limb and the camera is a mocap body, placed anew for each picture."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3_node.errors import require
from tools.scenes.arm import Limb
from tools.scenes.meshes import Mesh
from tools.scenes.motion import Array, frames, quaternions
from tools.scenes.parts import Part
from tools.scenes.plan import Plan
from tools.scenes.room import TABLE_HEIGHT, Room
from tools.scenes.textures import Texture

SHADOW_PIXELS = 1024
WALL_HEIGHT = 3.0
LIGHT_INSIDE = 0.8  # of the way to the walls, which would cast shadows themselves
TABLE_THICKNESS = 0.03


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
            self._spec.add_texture(
                name=image,
                type=mujoco.mjtTexture.mjTEXTURE_2D,
                builtin=mujoco.mjtBuiltin.mjBUILTIN_FLAT,
                width=width,
                height=height,
            )
            material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = image
        return name

    def _set_visuals(self) -> None:
        plan, visual = self.plan, self._spec.visual
        scale = plan.effects.supersample
        visual.global_.offwidth = plan.settings.width * scale
        visual.global_.offheight = plan.settings.height * scale
        visual.quality.offsamples = 0
        visual.quality.shadowsize = SHADOW_PIXELS
        visual.headlight.ambient = [plan.room.ambient] * 3
        visual.headlight.diffuse = [0.15] * 3
        visual.headlight.specular = [0.1] * 3
        visual.map.znear, visual.map.zfar = 0.01, 20.0
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
            place = (
                -room.wall_distance * inward[0],
                -room.wall_distance * inward[1],
                WALL_HEIGHT / 2 - TABLE_HEIGHT,
            )
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
        top = self.scene.add_material(
            room.table_texture, reflectance=room.reflectance, specular=0.2, shininess=0.3
        )
        self.scene.world.add_geom(
            type=self.kinds.mjGEOM_BOX,
            size=[*room.table, TABLE_THICKNESS / 2],
            pos=[*room.centre, -TABLE_THICKNESS / 2],
            quat=[math.cos(room.yaw / 2), 0, 0, math.sin(room.yaw / 2)],
            material=top,
            contype=0,
            conaffinity=0,
        )

    def _plane(
        self, place: tuple[float, ...], normal: tuple[float, ...], half: tuple[float, float], material: str
    ) -> None:
        sideways = np.cross((0.0, 0.0, 1.0), normal) if normal[2] == 0 else np.array((1.0, 0.0, 0.0))
        quat = quaternions(frames(np.array([normal]), sideways))[0]
        self.scene.world.add_geom(
            type=self.kinds.mjGEOM_PLANE,
            size=[*half, 0.1],
            pos=place,
            quat=quat,
            material=material,
            contype=0,
            conaffinity=0,
        )


def _poses(plan: Plan) -> tuple[Array, Array]:
    """Return positions [n, bodies, 3] and quaternions [n, bodies, 4] in the order of the mocap bodies."""
    moving: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = [
        *((actor.positions, actor.quats) for actor in plan.actors),
        *((limb.positions, limb.quats) for limb in plan.limbs),
        (plan.camera.positions, quaternions(plan.camera.rotations)),
    ]
    return np.stack([position for position, _ in moving], 1), np.stack([quat for _, quat in moving], 1)
