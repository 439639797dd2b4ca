"""The memory write: the features of a frame and an object's mask become a memory (SAM 2, arXiv 2408.00714, sec. 4).

The arithmetic equals transformers' memory encoder on the same weights. From the mask's last convolution on, tokens are
rows [N, hw, C]: 1x1 convolutions are linear maps with fused activations, norms run along memory, and the result needs
no transposition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import apply_linear, apply_mlp, centre_convolution, patch_linear, resize_matrix, scale_linear
from .perceiver import Perceiver
from .vit import side

MASK_SCALE, MASK_BIAS = 20.0, -10.0  # turn a mask prompt in 0..1 into logits
MIN_ROW = 32  # channels from which torch's layer norm is faster than several passes


class MemoryWrite(nn.Module):
    """Turns features and masks into memories: the memory encoder, and the embedding of an object out of view."""

    from_logits: Tensor
    from_image: Tensor
    to_logits: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        encoder, config = source.memory_encoder, source.config
        self.feature_projection = patch_linear(encoder.feature_projection)
        self.downsample = nn.ModuleList(_Downsample(layer) for layer in encoder.mask_downsampler.layers)
        self.embed = patch_linear(encoder.mask_downsampler.final_conv)
        self.fuser = nn.ModuleList(map(_FuserBlock, encoder.memory_fuser.layers))
        self.projection = patch_linear(encoder.projection)
        self.scale, self.bias = config.sigmoid_scale_for_mem_enc, config.sigmoid_bias_for_mem_enc
        self.occluded = source.occlusion_spatial_embedding_parameter
        self.compress = Perceiver(source) if hasattr(source, "spatial_perceiver") else None
        image, low = side(source.prompt_encoder.input_image_size), source.prompt_encoder.mask_input_size[0]
        device = source.no_memory_embedding.device
        # the reference resizes logits to the image size, then to the memory encoder's input size; both steps are linear
        # maps, so one matrix does both
        self.register_buffer("from_logits", resize_matrix((low, image, 4 * low)).to(device), persistent=False)
        self.register_buffer("from_image", resize_matrix((image, 4 * low)).to(device), persistent=False)
        self.register_buffer("to_logits", resize_matrix((image, low)).to(device), persistent=False)

    def upsample(self, logits: Tensor) -> Tensor:
        """Resize logits [N, 4h, 4w] to the memory encoder's input [N, 1, 16h, 16w], float32."""
        return (self.from_logits @ logits.float() @ self.from_logits.T)[:, None]

    def from_mask(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Turn a mask [1, 1, S, S] in 0..1 into logits [1, 4h, 4w] and memory input [1, 1, 16h, 16w], float32."""
        high = mask.float() * MASK_SCALE + MASK_BIAS
        return (self.to_logits @ high @ self.to_logits.T)[:, 0], self.from_image @ high @ self.from_image.T

    def forward(self, top: Tensor, masks: Tensor, prompted: bool, presence: Tensor) -> Tensor:
        """Encode the memory [N, hw, 64] bfloat16 of N objects; EdgeTAM's is [N, T, 64] in the dtype of `top`.

        top [1, C, h, w] is the image's, masks [N, 1, 16h, 16w] are logits, presence [N] are logits. If `prompted`, the
        masks come from a prompt and are made binary first.
        """
        weight = (masks > 0).float() if prompted else masks.sigmoid()
        x = weight.mul_(self.scale).add_(self.bias).to(top.dtype)
        for layer in self.downsample:
            x = layer(x)
        image = apply_linear(self.feature_projection, _to_rows(top))
        rows = apply_linear(self.embed, _to_rows(x)).add_(image)
        for block in self.fuser:
            rows = block(rows, top.shape[-2:])
        memory = apply_linear(self.projection, rows)
        if self.occluded is not None:
            absent = (presence <= 0).to(memory.dtype)[:, None, None]
            memory = memory + absent * self.occluded
        return memory.to(torch.bfloat16) if self.compress is None else self.compress(memory)


class _Downsample(nn.Module):
    """Convolution, layer norm over channels, and activation. The convolution already subtracts the norm's mean.

    A convolution with stride = kernel size is computed as the linear map of patches that it is. In bfloat16 on a CPU
    with AMX, oneDNN 3.12 computes some of these convolutions wrongly (16 to 256 channels, 4x4).
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        convolution, norm = centre_convolution(source.conv), source.layer_norm
        self.activation, self.eps = source.activation, norm.eps
        self.side = convolution.kernel_size[0]
        self.patches = convolution.kernel_size == convolution.stride and convolution.padding == (0, 0)
        self.in_rows = self.patches or convolution.out_channels >= MIN_ROW
        self.map = patch_linear(convolution) if self.patches else convolution
        if self.in_rows and not self.patches:
            self.map.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weight, self.bias = (
            nn.Parameter(value.detach().clone(), False) for value in (norm.weight, norm.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Downsample a map [N, C, n, n] to [N, O, m, m]."""
        if self.in_rows:
            x = self._map_patches(x) if self.patches else self.map(x).permute(0, 2, 3, 1)
            x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)
        else:
            x = self.map(x)
            inverse = torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + self.eps).to(x.dtype)
            weight, bias = self.weight.view(-1, 1, 1), self.bias.view(-1, 1, 1)
            x = (x * inverse).mul_(weight).add_(bias)
        out: Tensor = self.activation(x)
        return out

    def _map_patches(self, x: Tensor) -> Tensor:
        """Map the patches of [N, C, n, n] to [N, m, m, O]."""
        cells = (-1, self.side)
        patches = torch.unflatten(torch.unflatten(x, 3, cells), 2, cells).permute(0, 2, 4, 1, 3, 5)
        assert isinstance(self.map, nn.Linear)
        return apply_linear(self.map, patches.flatten(3))


class _FuserBlock(nn.Module):
    """A ConvNeXt block on rows of tokens. The last linear map includes the block's scale."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.depthwise, self.norm, self.activation = (
            source.depthwise_conv,
            source.layer_norm,
            source.activation,
        )
        self.widen, self.narrow = source.pointwise_conv1, scale_linear(source.pointwise_conv2, source.scale)

    def forward(self, rows: Tensor, grid: torch.Size) -> Tensor:
        """Fuse rows [N, hw, C] with their neighbours in the grid (h, w)."""
        x = _to_rows(self.depthwise(torch.unflatten(rows, 1, grid).permute(0, 3, 1, 2)))
        norm = self.norm
        x = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        return apply_mlp(self.widen, self.activation, self.narrow, x).add_(rows)


def _to_rows(x: Tensor) -> Tensor:
    """Turn a map [N, C, h, w] into rows of tokens [N, hw, C]; a view if channels are last in memory."""
    return x.flatten(2).transpose(1, 2)
