"""On the controller: the training step with correction and guard, checkpoints, files."""
