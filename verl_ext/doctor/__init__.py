"""`verl-ext doctor`: finds faults of an installation and of a run's settings before anything starts.

command.py        composes the run's config, runs the checks, prints
checks.py         the input and the result of a check, the registry of all checks, and fixes
installation.py   packages, imports, plugins, files
hooks.py          our hooks, verl's own validation, code that a config names
engine.py         the rollout engine: attention, lengths, experts that it returns, versions of vLLM
sampling.py       the distribution of the rollout's log-probs, bypass mode
precision.py      number formats, quantised rollouts and training
weight_sync.py    weights that a sync brings to the rollout, and batches that wait
reloads.py        the rollout engine over weight syncs and drafts
sizes.py          batches, lengths and ranks
training.py       updates that differ from what the settings or the method ask for
updates.py        what an update does to the weights
objective.py      rewards, advantages, the loss, settings that verl does not read
zero_mismatch.py  the engines' switches for results that repeat
"""
