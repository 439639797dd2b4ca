"""Tiny networks with the inputs and outputs of exported detectors, which find the red, green or blue of each place."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

CLASSES = ("red mug", "green bottle", "blue box")
SIDES = (96, 128)
"""(H, W) of the inputs."""
STRIDES = (8, 16, 32)


class TinyDetector(nn.Module):
    """Random weights under the outputs of one layout."""

    def __init__(self, layout: str, classes: int = len(CLASSES)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout = layout
        self.classes = classes
        # boxes and scores of each place, by a random look at its colours
        self.looks = nn.ModuleList(nn.Conv2d(3, 6 + classes, stride, stride) for stride in STRIDES)
        for look in self.looks:
            nn.init.normal_(look.weight, std=2.0 / look.weight[0].numel() ** 0.5)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Sequence[Tensor]:
        """Return the outputs of an image [1, 3, H, W] or [3, H, W]."""
        image = image.reshape(1, 3, *image.shape[-2:])
        if self.layout == "yolox":
            image = image / 255
        height, width = image.shape[-2:]
        raw = torch.cat([look(image).flatten(2) for look in self.looks], dim=2)[0].T
        shares = raw[:, :4].sigmoid()
        cells, strides = list_cells((height, width))
        sides = torch.tensor([width, height], dtype=torch.float32)
        centres = (cells + shares[:, :2]) * strides
        extents = strides * (1 + 3 * shares[:, 2:])
        boxes = torch.cat([centres, extents], dim=1)
        logits = raw[:, 6:]
        return self.pack(boxes, logits, raw, sides)

    def pack(self, boxes: Tensor, logits: Tensor, raw: Tensor, sides: Tensor) -> Sequence[Tensor]:
        """Return boxes (centres and extents in pixels) and logits as the layout has them."""
        scores = logits.sigmoid()
        half = boxes[:, 2:] / 2
        corners = torch.cat([boxes[:, :2] - half, boxes[:, :2] + half], dim=1)
        if self.layout == "rf-detr":
            spare = torch.cat([logits, logits[:, :1] - 9], dim=1)
            return (boxes / sides.repeat(2))[None], spare[None]
        if self.layout in ("detr", "rt-detr"):
            rows = torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1) if self.layout == "detr" else logits
            return rows[None], (boxes / sides.repeat(2))[None]
        if self.layout == "yolov8":
            return (torch.cat([boxes, scores], dim=1).T[None],)
        if self.layout == "yolov8-seg":
            # coefficients and prototypes of masks
            table = torch.cat([boxes, scores, raw[:, :5]], dim=1)
            return table.T[None], raw[None, :5, :4].reshape(1, 5, 2, 2)
        if self.layout == "yolox":
            cells, strides = list_cells((int(sides[1]), int(sides[0])))
            table = [boxes[:, :2] / strides - cells, (boxes[:, 2:] / strides).log(), raw[:, 4:5].sigmoid(), scores]
            return (torch.cat(table, dim=1)[None],)
        if self.layout == "yolox-decoded":
            return (torch.cat([boxes, raw[:, 4:5].sigmoid(), scores], dim=1)[None],)
        best, classes = scores.max(dim=1)
        order = best.topk(60).indices
        if self.layout == "yolo-end2end":
            table = [corners[order], best[order, None], classes[order, None].float()]
            return (torch.cat(table, dim=1)[None],)
        assert self.layout == "torchvision"
        return corners[order], classes[order] + 1, best[order]


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
    path: Path,
    layout: str,
    *,
    metadata: dict[str, str] | None = None,
    outputs: Sequence[str] = (),
    change: Callable[[object], object] | None = None,
    external: bool = False,
) -> Path:
    """Export a TinyDetector, with names of classes beside it unless `metadata` is given."""
    import onnx

    shape = (3, *SIDES) if layout == "torchvision" else (1, 3, *SIDES)
    path.parent.mkdir(parents=True, exist_ok=True)
    program = torch.onnx.export(
        TinyDetector(layout).eval(),
        (torch.zeros(shape),),
        input_names=["images"],
        output_names=list(outputs or OUTPUTS[layout]),
        dynamo=True,
        verbose=False,
    )
    program.save(path, external_data=external)
    model = onnx.load(path, load_external_data=False)
    for key, value in (metadata or {}).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    if change is not None:
        change(model)
    path.write_bytes(model.SerializeToString())
    if metadata is None:
        (path.parent / "classes.txt").write_text("\n".join(CLASSES))
    return path
