"""On the controller: checks before the run, and the training step with correction and guard."""
