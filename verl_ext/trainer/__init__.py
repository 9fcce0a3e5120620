"""On the controller: the training step with correction and guard, checkpoints, files.

To read in this order: trainers (the hooks into verl's trainer: `super()` calls around a StabilityRun), stability_run
(what a run holds), batch_step (a batch's way through a step) with exchange (beside verl's own read and write) and
in_blocks (so many tokens at a time), step (what is decided about a batch), guarding (what the guard decides, done).
Below them: active (what is switched on), transfer and batch (verl's batch, as fields and as tokens), checkpoints, logs
and trajectories (the files that a run leaves). Beside them: startup, watch (who has died, what a slow step waits for),
advantages, task_runner (the actor that trains, which a launch imports without the trainers).
"""
