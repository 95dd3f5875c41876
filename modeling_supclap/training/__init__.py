"""Training: trainers, training arguments, objectives, collators and callbacks."""
