"""Networks that are served with the stages: the images' preparation, prompts, and a detector with its choice.

They have no branches that depend on values, because they are exported to ONNX.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..detection.detectors import MAX_IOU
from ..models import TrackerModel
from ..models.pixels import GREY, box_iou
from ..models.sam.encoder import Sam1PromptEncoder
from ..models.sam.stages import ABSENT_LOGIT, Decoder, Features
from ..models.sam.weights import NO_POINT
from ..models.yolo.network import YoloWorld

NAMED = 16
"""Detections that the exported detector returns for an image, the best first. The number is fixed because the export
unrolls the loop that chooses them."""
CANDIDATES = 512
"""Best-scoring boxes that enter non-maximum suppression, which compares all pairs of them."""


class PrepareImage(nn.Module):
    """Makes the pixels of the tracker, and those of a detector, from images as they are."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: TrackerModel, detector_side: int | None) -> None:
        super().__init__()
        self.side = model.image_size
        self.detector_side = detector_side
        self.dtype = model.dtype
        self.register_buffer("mean", model.mean.clone(), persistent=False)
        self.register_buffer("std", model.std.clone(), persistent=False)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Prepare RGB images uint8 [B, H, W, 3] as `TrackerModel.preprocess` does.

        Return pixels [B, 3, S, S]; with a detector, also the pixels [B, 3, D, D] that `letterbox` makes, and
        (width, height) [B, 2].
        """
        whole = image.permute(0, 3, 1, 2).float()
        size = (self.side, self.side)
        # a resized image has whole levels
        square = (
            F.interpolate(whole, size, mode="bilinear", align_corners=False, antialias=True).round() / 255
        )
        pixels = ((square - self.mean) / self.std).to(self.dtype)
        if self.detector_side is None:
            return (pixels,)
        return pixels, *_letterbox(whole, self.detector_side)


def _letterbox(image: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Fit images [B, 3, H, W] of levels 0 to 255 into a square, as `models.pixels.letterbox` does.

    Return pixels [B, 3, D, D] in 0..1, and (width, height) [B, 2]. The fitted size depends on the image's, which an
    export does not know. So each side is a product with a matrix of the square's size.
    """
    height, width = image.shape[2:]
    # float64 until they are rounded, as in `FindNamed`
    exact = torch.stack([torch.scalar_tensor(height), torch.scalar_tensor(width)]).to(image.device).double()
    fitted = (exact * (side / exact.max())).round().clamp(min=1).float()
    sizes = exact.float()
    rows = _weigh(height, sizes[0], fitted[0], side)
    columns = _weigh(width, sizes[1], fitted[1], side)
    inside = rows.sum(dim=1)[:, None] * columns.sum(dim=1)
    pixels = (rows @ image @ columns.T).round() / 255 + GREY * (1 - inside)
    return pixels, sizes.flip(0).expand(image.shape[0], -1)


def _weigh(count: int, size: Tensor, fitted: Tensor, side: int) -> Tensor:
    """Return the shares [D, n] of an image's n pixels in each of D pixels of a square, along one axis.

    size: n as a tensor. fitted: number of the square's pixels that the image takes; the others, the padding, have
    zeros. The shares are those of bilinear interpolation with antialiasing: a triangle around each centre.
    """
    offset = ((side - fitted) / 2).floor()
    index = torch.arange(side, device=size.device) - offset
    step = size / fitted
    centres = (index[:, None] + 0.5) * step
    pixels = torch.arange(count, device=size.device) + 0.5
    shares = (1 - (pixels - centres).abs() / step.clamp(min=1)).clamp(min=0)
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1e-6)
    is_inside = (index >= 0) & (index < fitted)
    return shares * is_inside[:, None]


class PromptDecode(nn.Module):
    """The decoder for N prompts on each of B images, each for an object of its own."""

    labels: Tensor

    def __init__(self, decoder: Decoder, labels: Sequence[int], multimask: bool, competes: bool) -> None:
        """`labels` are those of each prompt's points; empty: they come with the points.

        multimask: the weights have masks that compete. competes: the best of them is the mask of such a prompt.
        """
        super().__init__()
        self.decoder = decoder
        self.multimask = multimask
        self.competes = competes
        self.points = len(labels)
        # SAM 1 expects a position without a point after points without a box
        self.adds_point = isinstance(decoder.prompt_encoder, Sam1PromptEncoder) and len(labels) == 1
        device = decoder.no_memory.device
        self.register_buffer(
            "labels", torch.tensor([labels], dtype=torch.int32, device=device), persistent=False
        )

    def forward(
        self, top: Tensor, fine: Tensor, middle: Tensor, prompts: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Decode prompts with the features of B images.

        prompts: [B, N, 2] (x y) or [B, N, 4] (x0 y0 x1 y1) in model pixels; with labels [B, N, P], [B, N, P, 2].
        Return logits [B, N, 4h, 4w], predicted iou [B, N] and presence logits [B, N]; where masks compete, also these,
        [B, N, M, 4h, 4w], the best first, and their iou [B, N, M].
        """
        images, count = prompts.shape[:2]
        # each prompt has an object of its own, so the image's features are repeated for each
        features = Features(
            *(x[:, None].expand(-1, count, -1, -1, -1).flatten(0, 1) for x in (fine, middle, top))
        )
        if labels is None:
            points = prompts.reshape(images * count, self.points, 2)
            labels = self.labels.expand(images * count, -1)
        else:
            points = prompts.flatten(0, 1)
            labels = labels.flatten(0, 1)
        if self.adds_point:
            # its label makes the encoder ignore its position
            points = F.pad(points, (0, 0, 0, 1))
            labels = F.pad(labels, (0, 1), value=NO_POINT)
        tokens, fine, middle, sparse, dense = self.decoder.embed(features, points, labels)
        decoder = self.decoder.mask_decoder
        masks, iou, _, presence = decoder.decode_all(tokens + dense, fine, middle, sparse)
        masks = masks.masked_fill(presence[:, None, None, None] <= 0, ABSENT_LOGIT)
        logits, best_iou, *rivals = self._choose(masks, iou)
        return tuple(x.unflatten(0, (images, count)) for x in (logits, best_iou, presence, *rivals))

    def _choose(self, masks: Tensor, iou: Tensor) -> tuple[Tensor, ...]:
        """Return the mask of each prompt and its iou; where masks compete, also these by falling iou, and theirs."""
        single, single_iou = self.decoder.mask_decoder.pick_single(masks, iou)
        if not self.multimask:
            return single[:, 0], single_iou[:, 0]
        order = iou[:, 1:].argsort(dim=1, descending=True)
        rivals_iou = iou[:, 1:].gather(1, order)
        rivals = masks[:, 1:].gather(1, order[..., None, None].expand_as(masks[:, 1:]))
        if self.competes:
            return rivals[:, 0], rivals_iou[:, 0], rivals, rivals_iou
        return single[:, 0], single_iou[:, 0], rivals, rivals_iou


class FindNamed(nn.Module):
    """YOLO-World with the choice among overlapping boxes, for images that `letterbox` has fitted into its square.

    It chooses as `models.pixels.select` does, without a threshold and from fewer candidates.
    """

    fixed: Tensor

    def __init__(self, net: YoloWorld, segmented: int, text: Tensor | None = None) -> None:
        """`text`: vectors [K, D] of the phrases that are looked for, unless they come with the images."""
        super().__init__()
        self.net = net
        self.segmented = segmented
        self.register_buffer("fixed", text, persistent=False)

    def forward(
        self, pixels: Tensor, frame: Tensor, text: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Find objects on pixels [B, 3, S, S] by vectors [B, K, D], for frames [B, 2] of (width, height) pixels.

        Return boxes [B, 16, 4] in pixels of a square of `segmented` pixels a side, scores [B, 16] and phrases [B, 16].
        """
        if text is None:
            text = self.fixed[None].expand(pixels.shape[0], -1, -1)
        boxes, scores = self.net(pixels, text)
        best, phrases = scores.max(dim=2)
        # the choice compares all pairs of candidates, so there must be few
        best, order = best.topk(min(CANDIDATES, best.shape[1]), dim=1)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        phrases = phrases.gather(1, order)
        # only boxes of one phrase compete, as in `select`
        rivals = (box_iou(boxes, boxes) > MAX_IOU) & (phrases[:, None] == phrases[..., None])
        # a box must not be chosen twice, and an empty box has an IoU of 0 with itself
        rivals |= torch.eye(order.shape[1], dtype=torch.bool, device=order.device)
        left = best
        chosen = []
        # a fixed number of steps, because the export unrolls this loop
        for _ in range(NAMED):
            chosen.append(left.argmax(dim=1, keepdim=True))
            row = chosen[-1][..., None].expand(-1, -1, order.shape[1])
            left = left.masked_fill(rivals.gather(1, row)[:, 0], 0)
        index = torch.cat(chosen, dim=1)
        boxes = boxes.gather(1, index[..., None].expand(-1, -1, 4))
        scores = best.gather(1, index)
        return self._convert(boxes, frame.double()), scores, phrases.gather(1, index)

    def _convert(self, boxes: Tensor, frame: Tensor) -> Tensor:
        """Undo `letterbox` and clip, as `Letterbox.to_frame` does; then scale to the tracker's square."""
        side = self.net.config.image_size
        # float64, because `letterbox` computes the same sizes with Python's numbers
        fitted = (frame * (side / frame.amax(dim=1, keepdim=True))).round().clamp(min=1)
        offset = ((side - fitted) / 2).floor()
        corners = (boxes.unflatten(2, (2, 2)) - offset[:, None, None]) / fitted[:, None, None]
        within: Tensor = corners.clamp(0, 1) * self.segmented
        return within.float().flatten(2)


class FloatMemoryEncoder(nn.Module):
    """The memory encoder that returns memories in the dtype of the logits."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, top: Tensor, logits: Tensor, presence: Tensor) -> Tensor:
        """Write as the stage does."""
        result: Tensor = self.stage(top, logits, presence).to(logits.dtype)
        return result
