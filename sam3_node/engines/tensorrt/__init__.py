"""TensorRT: library lookup, plan builder and plan runtime."""
