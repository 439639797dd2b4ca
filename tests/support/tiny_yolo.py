"""A YOLO-World small enough for any test: random weights, phrase vectors of 12 numbers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sam3_node.models.yolo.network import YoloWorld, YoloWorldConfig

TINY = YoloWorldConfig(
    channels=(8, 8, 16, 32, 16),
    depths=(1, 2, 1, 1),
    neck_depth=1,
    box_channels=8,
    embedding_channels=8,
    text_channels=12,
    attention_channels=8,
    bins=4,
)


def tiny_yolo(seed: int = 0) -> YoloWorld:
    """Weights and running statistics such that logits vary with pixels and phrases."""
    generator = torch.Generator().manual_seed(seed)
    model = YoloWorld(TINY).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            elif value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.4)
    return model


def phrases(count: int, seed: int = 1) -> Tensor:
    """Vectors [count, 12] of length 1."""
    return F.normalize(torch.randn(count, 12, generator=torch.Generator().manual_seed(seed)), dim=1)
