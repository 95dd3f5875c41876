"""Integrations with sentence-transformers, mteb and ONNX; each requires an optional extra."""
