"""Neighbours that a checkpoint also works in, each behind an extra: sentence-transformers, mteb and ONNX Runtime."""
