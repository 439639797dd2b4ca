"""Tiny networks with the inputs and outputs of exported detectors."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

CLASSES = ("red mug", "green bottle", "blue box")
SIDES = (96, 128)
"""(H, W) of the inputs."""
STRIDES = (8, 16, 32)


class TinyDetector(nn.Module):
    """Random weights, with the outputs of one layout."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout = layout
        self.cells, self.strides = list_cells(SIDES)
        # a box, how sure it is, and a logit of each class, of each place
        self.looks = nn.ModuleList(nn.Conv2d(3, 5 + len(CLASSES), stride, stride) for stride in STRIDES)
        for look in self.looks:
            nn.init.normal_(look.weight, std=3.0 / look.weight[0].numel() ** 0.5)

    def forward(self, image: Tensor) -> Sequence[Tensor]:
        """Return the outputs of an image [1, 3, H, W] or [3, H, W]."""
        image = image.reshape(1, 3, *SIDES)
        if self.layout.startswith("yolox"):
            image = image / 255
        raw = torch.cat([look(image).flatten(2) for look in self.looks], dim=2)[0].permute(1, 0)
        shares = raw[:, :4].sigmoid()
        centres = (self.cells + shares[:, :2]) * self.strides
        extents = self.strides * (1 + 3 * shares[:, 2:])
        return self.pack(torch.cat([centres, extents], dim=1), raw[:, 5:], raw)

    def pack(self, boxes: Tensor, logits: Tensor, raw: Tensor) -> Sequence[Tensor]:
        """Return boxes (centres and extents in pixels) and logits as the layout has them."""
        scores = logits.sigmoid()
        parts = boxes / torch.tensor([SIDES[1], SIDES[0]] * 2)
        spare = torch.cat([logits, logits[:, :1] * 0 - 1], dim=1)
        best, classes = scores.max(dim=1)
        corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], dim=1)
        decoded = torch.cat([boxes, raw[:, 4:5].sigmoid(), scores], dim=1)
        undecoded = [
            boxes[:, :2] / self.strides - self.cells,
            (boxes[:, 2:] / self.strides).log(),
            decoded[:, 4:],
        ]
        rows = torch.cat([corners, best[:, None], classes[:, None].float()], dim=1)
        packed: dict[str, Sequence[Tensor]] = {
            "rf-detr": (parts[None], spare[None]),
            "detr": (spare[None], parts[None]),
            "rt-detr": (logits[None], parts[None]),
            "yolov8": (torch.cat([boxes, scores], dim=1).permute(1, 0)[None],),
            # coefficients and prototypes of masks
            "yolov8-seg": (
                torch.cat([boxes, scores, raw[:, :5]], dim=1).permute(1, 0)[None],
                raw[None, :5, :4].reshape(1, 5, 2, 2),
            ),
            "yolox": (torch.cat(undecoded, dim=1)[None],),
            "yolox-decoded": (decoded[None],),
            "yolo-end2end": (rows[None, :100],),
            "torchvision": (corners[:100], classes[:100] + 1, best[:100]),
        }
        return packed[self.layout]


OUTPUTS = {
    "rf-detr": ["dets", "labels"],
    "detr": ["logits", "pred_boxes"],
    "rt-detr": ["logits", "pred_boxes"],
    "yolov8": ["output0"],
    "yolov8-seg": ["output0", "output1"],
    "yolox": ["output"],
    "yolox-decoded": ["output"],
    "yolo-end2end": ["output0"],
    "torchvision": ["boxes", "labels", "scores"],
}
"""Names of the outputs, by layout."""


def list_cells(size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return column and row [A, 2] and stride [A, 1] of each place."""
    cells = []
    for stride in STRIDES:
        for row in range(size[0] // stride):
            cells += [(column, row, stride) for column in range(size[1] // stride)]
    table = torch.tensor(cells, dtype=torch.float32)
    return table[:, :2], table[:, 2:]


def write_onnx(
    path: Path, layout: str, outputs: Sequence[str] = (), metadata: Mapping[str, str] = {}
) -> Path:
    """Export a TinyDetector to `path`, whose folder has names of the classes unless the metadata has."""
    import onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        # the exporter that takes a tenth of the time is deprecated
        warnings.simplefilter("ignore")
        torch.onnx.export(
            TinyDetector(layout).eval(),
            (torch.zeros((3, *SIDES) if layout == "torchvision" else (1, 3, *SIDES)),),
            str(path),
            input_names=["images"],
            output_names=list(outputs or OUTPUTS[layout]),
            dynamo=False,
        )
    if metadata:
        model = onnx.load(path)
        onnx.helper.set_model_props(model, dict(metadata))
        onnx.save(model, path)
    else:
        (path.parent / "classes.txt").write_text("\n".join(CLASSES))
    return path
