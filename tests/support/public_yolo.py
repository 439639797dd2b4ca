"""Checkpoints in the layout of the public YOLO-World files, made of a network of ours; foreign classes are made up."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from sam3_node.models.yolo.network import (
    Bottleneck,
    ContrastiveHead,
    ConvNorm,
    CspLayer,
    MaxSigmoidAttention,
    PyramidPooling,
    TextGuidedCspLayer,
    YoloWorld,
)

BLOCKS = "ultralytics.nn.modules.block"
Named = dict[tuple[str, str], type]  # classes by module and name, as a pickle names them


class PublicLayout:
    """Turns networks into files; `foreign` are the classes that were made for it, which no module of Python's has."""

    def __init__(self) -> None:
        self.foreign: Named = {}

    def make(self, place: str, name: str, base: type = object) -> type:
        """Return a class that a pickle names `place.name`."""
        return self.foreign.setdefault((place, name), type(name, (base,), {"__module__": place}))

    def module(self, name: str, place: str = BLOCKS, **parts: Any) -> nn.Module:
        """Return a module of an invented class, with these children and parameters."""
        made = self.make(place, name, nn.Module)()
        for key, part in parts.items():
            setattr(made, key, part)
        return made

    def network(self, model: YoloWorld) -> nn.Module:
        """Return the same weights under the public names."""
        backbone = model.backbone
        neck = model.neck
        layers: list[nn.Module] = [self.public(backbone.stem)]
        layers += [self.public(part) for stage in backbone.stages for part in stage]
        layers += [self.public(backbone.pooling), nn.Upsample(scale_factor=2), self.module("Concat")]
        layers += [self.public(neck.top_down[0]), nn.Upsample(scale_factor=2), self.module("Concat")]
        layers.append(self.public(neck.top_down[1]))
        for shrink, bottom_up in zip(neck.shrink, neck.bottom_up, strict=True):
            layers += [self.public(shrink), self.module("Concat"), self.public(bottom_up)]
        layers.append(self._detect(model))
        place = "ultralytics.nn.tasks"
        return self.module("WorldModel", place, model=nn.Sequential(*layers), txt_feats=torch.ones(1, 80, 12))

    def public(self, part: nn.Module) -> nn.Module:
        """Return the public module that equals one of ours."""
        if isinstance(part, ConvNorm):
            return self.module(
                "Conv", "ultralytics.nn.modules.conv", conv=part.conv, bn=part.norm, act=nn.SiLU()
            )
        if isinstance(part, Bottleneck):
            return self.module("Bottleneck", cv1=self.public(part.first), cv2=self.public(part.second))
        if isinstance(part, CspLayer):
            return self._csp(part)
        if isinstance(part, MaxSigmoidAttention):
            project = self.public(part.project)
            return self.module(
                "MaxSigmoidAttnBlock", gl=part.guide, bias=part.bias, proj_conv=project, ec=None
            )
        if isinstance(part, PyramidPooling):
            ends = {"cv1": self.public(part.enter), "cv2": self.public(part.leave)}
            return self.module("SPPF", m=nn.MaxPool2d(5, 1, 2), **ends)
        if isinstance(part, ContrastiveHead):
            parts = {"norm": part.norm, "bias": part.bias, "logit_scale": part.logit_scale}
            return self.module("BNContrastiveHead", **parts)
        return part

    def _csp(self, part: CspLayer) -> nn.Module:
        parts: dict[str, nn.Module] = {"cv1": self.public(part.enter), "cv2": self.public(part.leave)}
        parts["m"] = nn.ModuleList(map(self.public, part.blocks))
        if isinstance(part, TextGuidedCspLayer):
            return self.module("C2fAttn", **parts, attn=self.public(part.attention))
        return self.module("C2f", **parts)

    def _detect(self, model: YoloWorld) -> nn.Module:
        bins = nn.Conv2d(model.config.bins, 1, 1, bias=False)
        towers = {
            name: nn.ModuleList(nn.Sequential(*map(self.public, tower)) for tower in column)
            for name, column in (
                ("cv2", [head.boxes for head in model.heads]),
                ("cv3", [head.embeddings for head in model.heads]),
            )
        }
        contrast = nn.ModuleList(self.public(head.contrast) for head in model.heads)
        dfl = self.module("DFL", conv=bins)
        return self.module("WorldDetect", "ultralytics.nn.modules.head", **towers, cv4=contrast, dfl=dfl)

    def save(self, path: Path, **entries: Any) -> Path:
        """Write a checkpoint of these entries beside those that the public ones have."""
        options = self.make("ultralytics.utils", "IterableSimpleNamespace")()
        options.imgsz = 640
        places: dict[str, ModuleType] = {}
        for (place, name), kind in self.foreign.items():
            parents = [place[: match.start()] for match in re.finditer(r"\.", place)]
            places.update({parent: places.get(parent) or ModuleType(parent) for parent in parents})
            setattr(places.setdefault(place, ModuleType(place)), name, kind)
        with mock.patch.dict(sys.modules, places):
            torch.save({"epoch": -1, "ema": None, "train_args": options, "date": None} | entries, path)
        return path
