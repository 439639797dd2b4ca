"""Training of the bundled nano detector: a small YOLO-World and the vectors of its words, learnt together."""
