"""On the controller: the training step with correction and guard, checkpoints, files.

To read in this order: trainers (the hooks into verl's trainer: `super()` calls around a StabilityRun), run (what a run
holds from one batch to the next), step (what is decided about a batch), queue (the batch in TransferQueue, so many
tokens at a time), guarding (what the guard decides, done). Below them: batch (tokens and
the filters' view, from fields), checkpoints, logs and trajectories (the files that a run leaves). Beside them: startup,
watch (who has died, what a slow step waits for), advantages, task_runner (the actor that trains, which a launch imports
without the trainers).
"""
