"""The controller: the training step with correction and guard, checkpoints, files.

Read trainers first (the hooks into verl's trainer, around a StabilityRun), then run (the state from one batch to the
next), step (the decisions about a batch), queue (the batch in TransferQueue), guarding (decisions carried out).
"""
