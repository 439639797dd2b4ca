"""Tiny random trackers of the real classes, and the oracle: transformers' own streaming inference."""

import atexit
import functools
import math
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    EdgeTamVideoConfig,
    EdgeTamVideoInferenceSession,
    EdgeTamVideoModel,
    Sam2VideoConfig,
    Sam2VideoInferenceSession,
    Sam2VideoModel,
    Sam3TrackerVideoConfig,
    Sam3TrackerVideoInferenceSession,
    Sam3TrackerVideoModel,
    Sam3VideoConfig,
    Sam3VideoModel,
)
from transformers.models.sam2_video.configuration_sam2_video import Sam2VideoMaskDecoderConfig

from sam3_node.models.sam.tracker_model import TrackerModel
from sam3_node.tracking import Tracks
from tools.bench import tiny_weights
from tools.bench.edgetam_weights import RepVitConfig

SESSIONS = {
    EdgeTamVideoModel: EdgeTamVideoInferenceSession,
    Sam2VideoModel: Sam2VideoInferenceSession,
    Sam3TrackerVideoModel: Sam3TrackerVideoInferenceSession,
}


def decoder_options(hidden: int) -> dict:
    sizes = {"hidden_size": hidden, "mlp_dim": 2 * hidden, "iou_head_hidden_dim": hidden}
    return {**sizes, "num_attention_heads": 4}


def memory_options(hidden: int, grid: int) -> dict:
    return {
        "memory_attention_hidden_size": hidden,
        "memory_attention_feed_forward_hidden_size": 2 * hidden,
        "memory_attention_num_layers": 2,
        "memory_attention_rope_feat_sizes": [grid, grid],
        "memory_encoder_hidden_size": hidden,
        "mask_downsampler_embed_dim": hidden,
        "memory_fuser_embed_dim": hidden,
        "memory_fuser_intermediate_dim": 2 * hidden,
    }


def sam3_config(hidden: int = 128, size: int = 112) -> Sam3TrackerVideoConfig:
    return tiny_weights.sam3_config(hidden, size // 14, 2, 4, num_hidden_layers=2, global_attn_indexes=[1])


def sam2_config(hidden: int = 128, size: int = 128) -> Sam2VideoConfig:
    grid = size // 16
    return Sam2VideoConfig(
        vision_config={
            "model_type": "sam2_vision_model",
            "backbone_config": {
                "model_type": "sam2_hiera_det_model",
                "hidden_size": 24,
                "num_attention_heads": 1,
                "blocks_per_stage": [1, 1, 2, 1],
                "embed_dim_per_stage": [24, 48, 96, 192],
                "num_attention_heads_per_stage": [1, 2, 4, 8],
                "window_size_per_stage": [4, 2, 4, 2],
                "global_attention_blocks": [3],
                "image_size": [size, size],
                "window_positional_embedding_background_size": [4, 4],
            },
            "backbone_channel_list": [192, 96, 48, 24],
            "backbone_feature_sizes": [[4 * grid, 4 * grid], [2 * grid, 2 * grid], [grid, grid]],
            "fpn_hidden_size": hidden,
        },
        prompt_encoder_config={"hidden_size": hidden, "image_size": size, "patch_size": 16},
        # an object: transformers 5.17 makes a prompt encoder's of a dictionary
        mask_decoder_config=Sam2VideoMaskDecoderConfig(**decoder_options(hidden)),
        image_size=size,
        **memory_options(hidden, grid),
    )


WINDOWS = 4
"""Windows of a side of the tiny EdgeTAM."""
FREE_LATENTS = 12
"""Its latents without a place."""


def edgetam_config(hidden: int = 128, size: int = 128) -> EdgeTamVideoConfig:
    """As the published one, it has no embedding of absence and no time of pointers."""
    base = sam2_config(hidden, size)
    grid = size // 16
    widths = [16, 24, 32, 48]
    options = memory_options(hidden, grid)
    options["memory_attention_mlp_hidden_size"] = options.pop("memory_attention_feed_forward_hidden_size")
    return EdgeTamVideoConfig(
        vision_config={
            "model_type": "edgetam_vision_model",
            "backbone_config": RepVitConfig(widths, [1, 1, 3, 2]),
            "backbone_channel_list": widths[::-1],
            "backbone_feature_sizes": base.vision_config.backbone_feature_sizes,
            "fpn_hidden_size": hidden,
        },
        prompt_encoder_config=base.prompt_encoder_config.to_dict(),
        mask_decoder_config=base.mask_decoder_config.to_dict(),
        image_size=size,
        enable_temporal_pos_encoding_for_object_pointers=False,
        enable_occlusion_spatial_embedding=False,
        perceiver_resampler_num_latents=FREE_LATENTS,
        perceiver_resampler_num_latents_2d=WINDOWS**2,
        memory_attention_rope_k_sizes=[WINDOWS, WINDOWS],
        **options,
    )


CONFIGS = {"sam3": sam3_config, "sam2": sam2_config, "edgetam": edgetam_config}
CLASSES = {"sam3": Sam3TrackerVideoModel, "sam2": Sam2VideoModel, "edgetam": EdgeTamVideoModel}


# adds to the object score's logit so that objects come into view and go out of it
PRESENCE = {"sam3": 7.8, "sam2": 9.9, "edgetam": 9.83}


def random_source(family: str, seed: int = 0, presence: float | None = None, **options: int) -> nn.Module:
    """Return a tiny transformers tracker whose random weights make every part matter."""
    torch.manual_seed(seed)
    source = CLASSES[family](CONFIGS[family](**options)).eval()
    with torch.no_grad():
        for name, value in source.named_parameters():
            if value.ndim > 1 and "embed" not in name and "pointer" not in name.split(".")[0]:
                value.normal_(0, 1.0 / math.sqrt(value[0].numel()))
            elif "norm" not in name:
                value.normal_(0, 0.5)
        for name, value in source.named_buffers():
            if "running" in name:  # of EdgeTAM's batch norms
                value.uniform_(0.2, 1)
        score = source.mask_decoder.pred_obj_score_head.proj_out
        score.weight.mul_(8)
        score.bias.fill_(PRESENCE[family] if presence is None else presence)
        for block in source.memory_encoder.memory_fuser.layers:
            block.scale.fill_(0.7)
        source.prompt_encoder.shared_embedding.positional_embedding.copy_(
            source.shared_image_embedding.positional_embedding
        )
    return source


TRAINED_LOGIT = 5.0
"""Parity is shown at logits of a trained model's size; near zero, any two implementations agree."""


def find_largest_logit(tracks: Tracks) -> float:
    """Return the largest absolute logit of the objects in view; 0 if there are none."""
    return tracks.logits[tracks.visible].abs().max().item() if tracks.visible.any() else 0.0


def stages_of(source: nn.Module, name: str = "tiny") -> TrackerModel:
    return TrackerModel(source, name=name, mean=[0.5] * 3, std=[0.5] * 3, has_memory=True)


def tiny_model(family: str = "sam3", **options: int) -> TrackerModel:
    """Return the model with the stages of a `random_source`."""
    return stages_of(random_source(family, **options))


def write_tiny(folder: Path) -> None:
    """Write a tiny tracker that always finds its objects in view, unless it is there."""
    if not folder.exists():
        shutil.copytree(_written(), folder)


@functools.cache
def _written() -> Path:
    """Return a folder with these weights, which are made once in this process."""
    folder = Path(tempfile.mkdtemp(prefix="sam3-node-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    random_source("sam3", presence=60.0).save_pretrained(folder)
    return folder


def noise_clip(size: int, frames: int, seed: int = 7) -> list[Tensor]:
    """Pixels [1, 3, size, size] that change a little from frame to frame."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(1, 3, size, size, generator=generator)
    clip = []
    for _ in range(frames):
        pixels = 0.8 * pixels + 0.6 * torch.randn(pixels.shape, generator=generator)
        clip.append(pixels)
    return clip


class Oracle:
    """transformers' streaming inference, one session an object, so that objects cannot disturb one another."""

    def __init__(self, source: nn.Module) -> None:
        self.source = source
        self.sessions: dict[int, object] = {}
        self._cache: object = None
        self.frame = 0

    def step(self, pixels: Tensor, prompts: dict[int, dict[str, Tensor]]) -> dict[int, Tensor]:
        """Low-resolution logits [h, w] of each object. A prompt is {"points", "labels"} or {"mask"}."""
        for object_id, prompt in prompts.items():
            session = self.sessions.setdefault(object_id, self._session())
            index = session.obj_id_to_idx(object_id)
            if "mask" in prompt:
                session.remove_point_inputs(index, self.frame)
                session.add_mask_inputs(index, self.frame, prompt["mask"][None, None])
            else:
                inputs = {
                    "point_coords": prompt["points"][None, None],
                    "point_labels": prompt["labels"][None, None].to(torch.int32),
                }
                session.remove_mask_inputs(index, self.frame)
                session.add_point_inputs(index, self.frame, inputs)
            session.obj_with_new_inputs.append(object_id)
        found = {
            object_id: self.source(inference_session=session, frame=pixels, frame_idx=self.frame).pred_masks[
                0, 0
            ]
            for object_id, session in self.sessions.items()
        }
        self.frame += 1
        return found

    def remove(self, object_id: int) -> None:
        del self.sessions[object_id]

    def _session(self) -> object:
        size = self.source.prompt_encoder.input_image_size
        kind = SESSIONS[type(self.source)]
        session = kind(video=None, video_height=size, video_width=size, dtype=torch.float32)
        # it holds features of images alone: each frame is encoded once for all sessions
        self._cache = self._cache or session.cache
        session.cache = self._cache
        return session


def random_composite() -> Sam3VideoModel:
    """A detector and a tracker in one, as facebook/sam3 has them: the ViT is the detector's."""
    tracker = sam3_config(hidden=64)
    small = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    detector = {
        "vision_config": tracker.vision_config.to_dict(),
        "text_config": {**text, "projection_dim": 32},
        "geometry_encoder_config": {**small, "num_layers": 1},
        "detr_encoder_config": {**small, "num_layers": 1},
        "detr_decoder_config": {**small, "num_layers": 1, "num_queries": 5},
        "mask_decoder_config": {"hidden_size": 64, "num_attention_heads": 2},
    }
    torch.manual_seed(0)
    return Sam3VideoModel(Sam3VideoConfig(tracker_config=tracker.to_dict(), detector_config=detector))
