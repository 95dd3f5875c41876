"""Evaluation metrics. Each metric has a numpy function, an `evaluate.Metric` that wraps it, and a metric card."""
