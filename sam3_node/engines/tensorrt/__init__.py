"""TensorRT: library lookup, plan builder and runtime."""
