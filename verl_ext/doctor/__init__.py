"""`verl-ext doctor`: finds faults of an installation and of a run's settings before anything starts.

command.py        the command: its options, and what it prints
diagnose.py       composes the run's config, runs the checks, and fixes until nothing new can be fixed
checks.py         the input and the result of a check, the registry of all checks, and fixes
installation.py   packages, imports, plugins, files
hooks.py          our hooks, verl's own validation, and code that a config names
engine.py         the rollout engine: attention, lengths, placement, versions of vLLM
experts.py        the experts that the rollout returns
sampling.py       the distribution of the rollout's samples and log-probs, bypass mode
precision.py      number formats, quantised rollouts and training
weight_sync.py    weights that a sync sends, drafts that it leaves stale, batches that wait
sizes.py          batches, lengths and ranks
training.py       the training engines: what an update does to the weights
objective.py      rewards, advantages, the loss, and settings that verl does not read
zero_mismatch.py  the engines' switches for reproducible results
"""
