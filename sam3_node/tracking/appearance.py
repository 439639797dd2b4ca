"""The appearance of an object: a few embeddings, by which it is known again after it was out of view.

An embedding is a vector of two halves, each of length 1: the mean of the encoder's features under the mask, less their
mean beside it, and the square roots of a histogram of its colours. The product of two embeddings is 2 for the same
picture. The mean beside the mask takes out what all of a picture has in common, such as its light.
"""

from collections.abc import Sequence

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from msgspec import field
from torch import Tensor

from ..schema.state import SavedState
from ..types import Image, Mask

COLOUR_BINS = (4, 8, 8)
"""Bins of lightness and of the two axes of colour in CIE Lab. Light changes more than colour, so it has fewer."""
COLOURS = COLOUR_BINS[0] * COLOUR_BINS[1] * COLOUR_BINS[2]
_FIRST_COLOUR = 64
"""Lowest value of an axis of colour, 0..255, that has a bin of its own; few things are more colourful."""
_COLOUR_STEP = 16
"""Width of a bin of an axis of colour"""
MAX_PIXELS = 2048
"""Pixels of an object whose colours are counted: a sample, whatever its size."""
MAX_EMBEDDINGS = 8
"""Embeddings that are kept of an object. A side that is not among them is compared with the most similar one."""
MAX_COMPONENT = 1.001
"""Largest component of a half, whose length is 1, with what rounding adds."""
NEW_EMBEDDING = 1.8
"""Similarity to the nearest embedding from which on an embedding shows nothing new."""


def describe_features(top: Tensor, logits: Tensor) -> Tensor:
    """Return the first halves [N, C] of the embeddings of N masks, on the device of `top`.

    top [1, C, h, w] are the coarsest features of the image, and logits [N, H, W] the masks.
    """
    channels, height, width = top.shape[1:]
    inside = F.interpolate((logits > 0).float()[:, None], size=(height, width), mode="area").flatten(1)
    cells = top[0].float().reshape(channels, height * width).T
    # a cell that is partly covered shows as much of its surroundings, so it counts less
    weights = inside.square()
    outside = (1 - inside).square()
    own = weights @ cells / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)
    rest = outside @ cells / outside.sum(dim=1, keepdim=True).clamp(min=1e-6)
    return F.normalize(own - rest, dim=1)


def describe_colours(image: Image, mask: Mask) -> Tensor:
    """Return the second half [COLOURS] of the embedding of a mask that is not empty, on the host."""
    x0, y0, x1, y1 = mask.box
    stride = max(1, int((mask.area / MAX_PIXELS) ** 0.5))
    inside = mask.crop[::stride, ::stride]
    crop = np.ascontiguousarray(image[y0:y1:stride, x0:x1:stride])
    if crop.ndim == 2:
        crop = cv2.cvtColor(crop, cv2.COLOR_GRAY2BGR)
    lightness, a, b = cv2.cvtColor(crop, cv2.COLOR_BGR2LAB)[inside].T.astype(np.int64)
    bins = [
        lightness * COLOUR_BINS[0] // 256,
        ((a - _FIRST_COLOUR) // _COLOUR_STEP).clip(0, COLOUR_BINS[1] - 1),
        ((b - _FIRST_COLOUR) // _COLOUR_STEP).clip(0, COLOUR_BINS[2] - 1),
    ]
    counts = np.bincount(np.ravel_multi_index(bins, COLOUR_BINS), minlength=COLOURS)
    # the square roots of shares have length 1, and their product is Bhattacharyya's coefficient
    return torch.from_numpy(np.sqrt(counts / max(1, counts.sum())).astype(np.float32))


def make_embeddings(features: Tensor, colours: Sequence[Tensor]) -> Tensor:
    """Return embeddings [N, C + COLOURS] of their halves, all on the host."""
    return torch.cat([features, torch.stack(list(colours))], dim=1)


class Gallery(SavedState):
    """Embeddings of one object that differ from each other."""

    embeddings: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """float32 [n, C + COLOURS], on the host"""

    def __post_init__(self) -> None:
        # a saved state may come from a file
        embeddings = self.embeddings
        if (
            embeddings.ndim != 2
            or embeddings.dtype != torch.float32
            or len(embeddings) > MAX_EMBEDDINGS
            or (len(embeddings) and not embeddings.shape[1])
            or not (embeddings.abs() <= MAX_COMPONENT).all()
        ):
            raise ValueError(
                f"expected at most {MAX_EMBEDDINGS} embeddings of numbers in -1..1, found {list(embeddings.shape)}"
            )

    def __len__(self) -> int:
        return len(self.embeddings)

    def add(self, embedding: Tensor) -> None:
        """Keep an embedding [C + COLOURS] if it shows something new.

        Beyond MAX_EMBEDDINGS, the most redundant one makes room.
        """
        if not len(self.embeddings) or self.embeddings.shape[1] != len(embedding):
            self.embeddings = embedding[None]
            return
        if self.compare(embedding[None])[0] >= NEW_EMBEDDING:
            return
        embeddings = torch.cat([self.embeddings, embedding[None]])
        if len(embeddings) > MAX_EMBEDDINGS:
            alike = embeddings.numpy() @ embeddings.numpy().T
            np.fill_diagonal(alike, -1.0)
            # of the two that resemble each other most, the older one goes
            redundant = int(alike.max(axis=1).argmax())
            embeddings = torch.cat([embeddings[:redundant], embeddings[redundant + 1 :]])
        self.embeddings = embeddings

    def compare(self, embeddings: Tensor) -> npt.NDArray[np.float32]:
        """Return the similarity [N] of embeddings [N, C + COLOURS] to the nearest one here, -2 if there is none."""
        # embeddings of other features are not comparable
        if not len(self.embeddings) or self.embeddings.shape[1] != embeddings.shape[1]:
            return np.full(len(embeddings), -2.0, np.float32)
        # arrays, because torch may take a number of a tensor for one that the device has yet to compute
        similarity: npt.NDArray[np.float32] = (embeddings.numpy() @ self.embeddings.numpy().T).max(axis=1)
        return similarity
