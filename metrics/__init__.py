"""Scores to numbers: each metric is a numpy function, a thin `evaluate.Metric` around it, and a card."""
