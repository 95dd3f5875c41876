"""Integrations with sentence-transformers, mteb and ONNX. Each requires an optional extra."""
