"""What moves or logs tensors in training: the trainers and their objectives, batches, arguments and callbacks."""
