"""The controller: the training step with correction and guard, checkpoints, files.

Read trainers first (the hooks into verl's trainer, around a StabilityRun), then run (the state from one batch to the
next), batch (a step's batch as it is read), step (the decisions about it), guard_actions (decisions carried out).
"""
