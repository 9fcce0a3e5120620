"""`verl-ext doctor`: finds faults of an installation and of a run's settings before anything starts.

command.py        composes the run's config, runs the checks, prints
checks.py         the input and the result of a check, the registry of all checks, and fixes
installation.py   packages, imports, plugins
hooks.py          our hooks, verl's own validation, code that a config names
engine.py         the rollout engine: attention, lengths, experts that it returns, versions of vLLM
sampling.py       the distribution of the rollout's log-probs, bypass mode
precision.py      number formats, quantised rollouts and training
weight_sync.py    weights that a sync brings to the rollout, and batches that wait
sizes.py          batches, lengths and ranks; files of the model and the data
training.py       updates that differ from what the settings or the method ask for
zero_mismatch.py  the engines' switches for results that repeat
"""
