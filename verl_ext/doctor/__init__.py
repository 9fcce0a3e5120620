"""`verl-ext doctor`: what is wrong with an installation and a run's settings, shown before anything starts.

command.py        composes the run's config, runs the checks, prints
checks.py         what a check looks at and returns, the registry of all, and fixes
installation.py   packages, imports, plugins
hooks.py          which hooks of ours attach, verl's own validation, code that a config names
engine.py         the rollout engine: attention, lengths, experts that it returns, versions of vLLM
sampling.py       what the rollout's log-probs mean, bypass mode
precision.py      number formats, quantised rollouts and training
weight_sync.py    what a sync brings to the rollout, and batches that wait
sizes.py          batches, lengths and ranks; files of the model and the data
training.py       updates that are not what the settings or the method say
zero_mismatch.py  the engines' switches for results that repeat
"""
