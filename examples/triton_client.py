"""Segment pictures by a Triton server that has an export of `sam3-node engine export-triton`.

Needs `pip install tritonclient[http] numpy`; with OpenCV: python examples/triton_client.py picture.jpg sam3 320,240
"""

import sys
from typing import Any

import numpy as np
import tritonclient.http as triton


class Segmenter:
    """Segments RGB images, uint8 [H, W, 3], by the models NAME_…: `set_image` once, `predict` often."""

    def __init__(self, name: str = "sam3", url: str = "127.0.0.1:8000") -> None:
        self.name = name
        self.client = triton.InferenceServerClient(url)
        self.side = int(self.client.get_model_config(f"{name}_encode")["input"][0]["dims"][-1])

    def set_image(self, image: Any) -> None:
        self.image = image
        self.features = self._infer("encode_image", image=image[None])

    def predict(
        self, points: Any = (), labels: Any = None, box: Any = None, names: Any = None, multimask: Any = False
    ) -> Any:
        """Return masks, bool [K, H, W], and scores [K], the best first; K is 1, or with `multimask` up to 3.

        points [n, 2] and box are in pixels; labels [n]: 1 inside, 0 outside. With names, masks have their names beside.
        """
        if names is not None:
            return self._find(names)
        labels = [1] * len(points) if labels is None else list(labels)
        if box is not None:
            points = [box[:2], box[2:], *points]
            labels = [2, 3, *labels]
        places = np.array([[points]] * (self.side / np.array(self.image.shape[1::-1])), np.float32)
        marks = np.array([[labels]], np.int32)
        found = self._infer("prompt_points", points=places, labels=marks, **self.features)
        # one point may mean a part or the whole: there the best of the masks that compete is the answer
        competes = "candidates" in found and (multimask or len(labels) == 1)
        names = ("candidates", "candidate_iou") if competes else ("logits", "iou")
        masks, iou = (found[name][0, 0] if competes else found[name][0] for name in names)
        kept = slice(None if multimask else 1)
        return self._finish(masks[kept], iou[kept], found["presence"][0])

    def _find(self, names: Any) -> Any:
        given = self.client.get_model_config(f"{self.name}_detect")["parameters"]["names"]["string_value"]
        known = np.array(given.split(","))
        if len(unknown := np.setdiff1d(names, known)):
            raise ValueError(f"names: expected some of {given}, which are served; found {', '.join(unknown)}")
        found = self._infer("segment_named", image=self.image[None])
        labels = known[found["phrases"][0]]
        kept = (found["scores"][0] > 0.3) & np.isin(labels, names)
        return *self._finish(*(found[each][0, kept] for each in ("logits", "iou", "presence"))), labels[kept]

    def _finish(self, logits: Any, iou: Any, presence: Any) -> Any:
        rows, columns = map(weigh, logits.shape[1:], self.image.shape[:2])
        return rows @ logits.astype(np.float32) @ columns.T > 0, iou / (1 + np.exp(-presence))

    def _infer(self, model: str, **tensors: Any) -> dict[str, Any]:
        given = []
        for name, values in tensors.items():
            given.append(triton.InferInput(name, values.shape, triton.np_to_triton_dtype(values.dtype)))
            given[-1].set_data_from_numpy(values)
        result = self.client.infer(f"{self.name}_{model}", given)
        return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}


def weigh(low: int, high: int) -> Any:
    """Return the shares [high, low] of a bilinear interpolation."""
    place = np.clip((np.arange(high) + 0.5) * low / high - 0.5, 0, low - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(low))).astype(np.float32)


if __name__ == "__main__":
    import cv2

    picture, model, point = sys.argv[1:]
    segmenter = Segmenter(model)
    segmenter.set_image(cv2.imread(picture, cv2.IMREAD_COLOR_RGB))
    print("score", segmenter.predict([[float(part) for part in point.split(",")]])[1][0])
