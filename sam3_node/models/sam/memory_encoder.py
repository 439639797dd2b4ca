"""Turn the features of a frame and an object's mask into a memory (SAM 2, arXiv 2408.00714, sec. 4).

The arithmetic equals transformers' memory encoder on the same weights. From the mask's last convolution on, tokens are
rows [N, hw, C]: 1x1 convolutions are linear maps with fused activations, norms run along memory, and the result needs
no transposition. EdgeTAM's `Perceiver` (arXiv 2501.07256, sec. 3.2) compresses a memory to a few latent tokens.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import (
    apply_linear,
    apply_mlp,
    apply_norm,
    axial_rotation,
    centre_convolution,
    embed_sine,
    is_exact_gelu,
    patch_linear,
    resize_matrix,
    runs_kernels,
    scale_linear,
)
from .configuration import side

MASK_SCALE = 20.0
"""Factor that turns a mask prompt in 0..1 into logits, as in the reference. With MASK_BIAS they are -10 and 10."""
MASK_BIAS = -10.0
"""Offset added after MASK_SCALE."""
MIN_ROW = 32
"""Channels from which torch's layer norm over rows of channels is faster than computing it in several passes."""


class MemoryEncoder(nn.Module):
    """Turns features and masks into memories: the memory encoder, and the embedding of an object out of view."""

    from_logits: Tensor
    from_image: Tensor
    to_logits: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        encoder = source.memory_encoder
        config = source.config
        self.feature_projection = patch_linear(encoder.feature_projection)
        self.downsample = nn.ModuleList(_MaskDownsample(layer) for layer in encoder.mask_downsampler.layers)
        self.embed = patch_linear(encoder.mask_downsampler.final_conv)
        self.fuser = nn.ModuleList(map(_FuserBlock, encoder.memory_fuser.layers))
        self.projection = patch_linear(encoder.projection)
        self.scale = config.sigmoid_scale_for_mem_enc
        self.bias = config.sigmoid_bias_for_mem_enc
        self.occluded = source.occlusion_spatial_embedding_parameter
        self.compress = Perceiver(source) if hasattr(source, "spatial_perceiver") else None
        image = side(source.prompt_encoder.input_image_size)
        low = source.prompt_encoder.mask_input_size[0]
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


class _MaskDownsample(nn.Module):
    """Convolution, layer norm over channels, and activation. The convolution already subtracts the norm's mean.

    A convolution with stride = kernel size is computed as the linear map of patches that it is. In bfloat16 on a CPU
    with AMX, oneDNN 3.12 computes some of these convolutions wrongly (16 to 256 channels, 4x4).
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        convolution = centre_convolution(source.conv)
        norm = source.layer_norm
        self.activation = source.activation
        self.eps = norm.eps
        self.applies_gelu = is_exact_gelu(source.activation)
        self.side = convolution.kernel_size[0]
        self.patches = convolution.kernel_size == convolution.stride and convolution.padding == (0, 0)
        self.in_rows = self.patches or convolution.out_channels >= MIN_ROW
        self.map = patch_linear(convolution) if self.patches else convolution
        # channels last, so that rows of channels need no copy
        if self.in_rows and not self.patches:
            self.map.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weight, self.bias = (
            nn.Parameter(value.detach().clone(), False) for value in (norm.weight, norm.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Downsample a map [N, C, n, n] to [N, O, m, m]."""
        if self.in_rows:
            x = self._map_patches(x) if self.patches else self.map(x).permute(0, 2, 3, 1)
            if runs_kernels(x):
                from .kernels import layer_norm

                x = layer_norm(x, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)
            else:
                x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)
        else:
            x = self.map(x)
            if runs_kernels(x) and self.applies_gelu:
                from .kernels import normalise_channels

                return normalise_channels(x, self.weight, self.bias, self.eps)
            # the convolution has removed the mean, so this mean of squares is the variance
            exact = x if x.dtype == torch.float64 else x.float()
            inverse = torch.rsqrt(exact.square().mean(dim=1, keepdim=True) + self.eps).to(x.dtype)
            weight = self.weight.view(-1, 1, 1)
            bias = self.bias.view(-1, 1, 1)
            x = (x * inverse).mul_(weight).add_(bias)
        return self.activation(x)

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
        self.depthwise = source.depthwise_conv
        self.norm = source.layer_norm
        self.activation = source.activation
        self.widen = source.pointwise_conv1
        self.narrow = scale_linear(source.pointwise_conv2, source.scale)

    def forward(self, rows: Tensor, grid: torch.Size) -> Tensor:
        """Fuse rows [N, hw, C] with their neighbours in the grid (h, w)."""
        x = _to_rows(self.depthwise(torch.unflatten(rows, 1, grid).permute(0, 3, 1, 2)))
        return apply_mlp(self.widen, self.activation, self.narrow, apply_norm(self.norm, x)).add_(rows)


def _to_rows(x: Tensor) -> Tensor:
    """Turn a map [N, C, h, w] into rows of tokens [N, hw, C]; a view if channels are last in memory."""
    return x.flatten(2).transpose(1, 2)


class Perceiver(nn.Module):
    """The `spatial_perceiver` of EdgeTAM, for memories of the model's grid."""

    latents: Tensor
    position: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        perceiver = source.spatial_perceiver
        self.height, self.width = source.backbone_feature_sizes[-1]
        self.free = len(perceiver.latents_1d)
        self.windows = math.isqrt(len(perceiver.latents_2d))
        if self.height % self.windows or self.width % self.windows:
            raise ModelError(
                f"EdgeTAM: expected a feature grid that divides into {self.windows} x {self.windows} windows, found "
                f"{self.height} x {self.width}; choose another --model.image_size"
            )
        latents = torch.cat([perceiver.latents_1d, perceiver.latents_2d]).detach()
        self.register_buffer("latents", latents, persistent=False)
        position = embed_sine(self.height, self.width, latents.shape[1], latents.device)
        self.register_buffer("position", position.to(latents.dtype), persistent=False)
        self.layers = nn.ModuleList(map(_PerceiverLayer, perceiver.layers))
        self.norm = perceiver.layer_norm

    def forward(self, memory: Tensor) -> Tensor:
        """Compress memories [N, hw, 64] to [N, T, 64]: the latents without a position first, then the windows'."""
        x = self.latents.expand(memory.shape[0], -1, -1)  # len() would fix the size in an export
        for layer in self.layers:
            x = layer(x, memory, self.position, self.free, self._cut)
        return self.norm(x)

    def _cut(self, rows: Tensor) -> Tensor:
        """Cut rows [N, hw, C] into windows, [N * windows, rows of a window, C]."""
        grid = (self.windows, self.height // self.windows, self.windows, self.width // self.windows)
        return torch.unflatten(rows, 1, grid).transpose(2, 3).flatten(3, 4).flatten(0, 2)


class _PerceiverLayer(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.cross = source.cross_attention
        self.own = source.self_attention
        self.cross_mlp = source.mlp
        self.own_mlp = source.self_mlp
        self.norm_input = source.layer_norm_input
        self.norm_latents = source.layer_norm_latents
        self.norm_own = source.layer_norm_self

    def forward(self, x: Tensor, memory: Tensor, position: Tensor, free: int, cut: Any) -> Tensor:
        x = x + self._attend_memory(self.norm_latents(x), self.norm_input(memory), position, free, cut)
        x = x + _apply_mlp(self.cross_mlp, x)
        x = x + self._attend_latents(self.norm_own(x), free)
        return x + _apply_mlp(self.own_mlp, x)

    def _attend_memory(self, x: Tensor, memory: Tensor, position: Tensor, free: int, cut: Any) -> Tensor:
        layer = self.cross
        query = apply_linear(layer.q_proj, x)
        key = apply_linear(layer.k_proj, memory)
        value = apply_linear(layer.v_proj, memory)
        # the latents without a position attend to the whole memory, the others to their own window
        whole = _attend(query[:, :free], key + position, value + position)
        positioned = query[:, free:]
        local = _attend(positioned.flatten(0, 1)[:, None], cut(key), cut(value)).view_as(positioned)
        return apply_linear(layer.o_proj, torch.cat([whole, local], dim=1))

    def _attend_latents(self, x: Tensor, free: int) -> Tensor:
        layer = self.own
        first = x[:, :free]
        value = apply_linear(layer.v_proj, x)
        whole = _attend(apply_linear(layer.q_proj, first), apply_linear(layer.k_proj, first), value[:, :free])
        # a latent with a position attends to itself alone, which returns its value
        return apply_linear(layer.o_proj, torch.cat([whole, value[:, free:]], dim=1))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]


def _apply_mlp(mlp: Any, x: Tensor) -> Tensor:
    return apply_linear(mlp.down_proj, apply_linear(mlp.up_proj, mlp.layer_norm(x), "gelu"))


class LatentPositions(NamedTuple):
    """Positions and rotations of the tokens of a compressed memory, for memory attention."""

    position: Tensor
    """float32 [T, 64], added to the keys"""
    rotation: Tensor
    """float32 [T, D / 2, (cos, sin)], of the projected keys"""


def find_latent_positions(source: Any, width: int) -> LatentPositions:
    """Return the positions of the tokens that `Perceiver` returns, for keys of `width` channels.

    Latents without a position are not rotated.
    """
    perceiver = source.spatial_perceiver
    free = perceiver.latents_1d
    windows = math.isqrt(len(perceiver.latents_2d))
    position = embed_sine(windows, windows, free.shape[1], free.device)
    rotation = axial_rotation(windows, windows, width, free.device)
    return LatentPositions(
        torch.cat([position.new_zeros(free.shape), position]),
        # a cosine of 1 and a sine of 0 rotate nothing
        torch.cat([rotation.new_tensor([1.0, 0.0]).expand(len(free), rotation.shape[1], 2), rotation]),
    )
