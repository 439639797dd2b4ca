"""Hiera in Z order against transformers' own."""

import pytest
import torch
from transformers import Sam2HieraDetConfig, Sam2HieraDetModel

from sam3_node.errors import ModelError
from sam3_node.models.sam.encoder import Sam2Encoder
from sam3_node.models.sam.vit import Hiera, z_order
from tests.support.refuses import refuses
from tests.support.tiny import random_source


def hiera(size: int, windows: list[int], everywhere: list[int], **options) -> Sam2HieraDetModel:
    torch.manual_seed(0)
    config = Sam2HieraDetConfig(
        image_size=[size, size],
        hidden_size=16,
        embed_dim_per_stage=[16, 32, 48, 64],
        blocks_per_stage=[1, 2, 3, 1],
        num_attention_heads_per_stage=[1, 2, 4, 4],
        window_size_per_stage=windows,
        global_attention_blocks=everywhere,
        window_positional_embedding_background_size=[4, 4],
        **options,
    )
    model = Sam2HieraDetModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize(
    ("size", "windows", "everywhere"),
    [
        pytest.param(128, [8, 4, 8, 4], [], id="runs of neighbours, the coarse ones whole maps"),
        pytest.param(128, [4, 2, 4, 2], [4, 5], id="everywhere"),
        pytest.param(256, [8, 4, 14, 7], [5], id="windows that overhang, as in the public weights"),
        pytest.param(192, [8, 4, 14, 7], [4], id="a map whose side is no power of two"),
        pytest.param(96, [8, 4, 16, 8], [], id="windows larger than the map"),
    ],
)
def test_every_stage_equals_transformers(size: int, windows: list[int], everywhere: list[int]) -> None:
    source = hiera(size, windows, everywhere)
    ours = Hiera(source)
    pixels = torch.randn(2, 3, size, size)
    with torch.inference_mode():
        wanted = source(pixels).intermediate_hidden_states
        for level, (mine, theirs) in enumerate(zip(ours(pixels), wanted, strict=True)):
            theirs = theirs.flatten(1, 2)[:, z_order(ours.grid >> level)]
            assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_the_encoder_equals_transformers() -> None:
    source = random_source("sam2")
    pixels = torch.randn(2, 3, source.config.image_size, source.config.image_size)
    decoder = source.mask_decoder
    with torch.inference_mode():
        fine, middle, top = source.vision_encoder(pixels, return_dict=True).fpn_hidden_states
        wanted = decoder.conv_s0(fine), decoder.conv_s1(middle), top
        for mine, theirs in zip(Sam2Encoder(source)(pixels), wanted, strict=True):
            assert (mine - theirs).abs().max() < 1e-5 * max(1.0, theirs.abs().max())


def test_gradients_reach_the_source() -> None:
    source = hiera(64, [4, 2, 4, 2], [])
    ours = Hiera(source)
    ours(torch.randn(1, 3, 64, 64), ours.position_map(source))[-1].sum().backward()
    assert all(parameter.grad is not None for parameter in source.parameters())


def test_z_order_is_nested() -> None:
    assert z_order(4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    for grid in (6, 7, 12, 64):
        assert z_order(grid).sort().values.tolist() == list(range(grid * grid))


def test_another_pooling_is_refused() -> None:
    with refuses(ModelError, field=("2", "pooling")):
        Hiera(hiera(64, [4, 2, 4, 2], [], query_stride=[1, 1]))
