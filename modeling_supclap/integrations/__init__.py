"""Integrations with other libraries: sentence-transformers, mteb and ONNX, each behind an extra."""
