"""`verl-ext doctor`: what is wrong with an installation and a run's settings, told before anything starts.

command.py        reads the command line, prints      composed.py   the run's config, for `plan` too
context.py        what checks may look at
findings.py       what they return, and their registry
installation.py   packages, imports, plugins          hooks.py      which hooks of ours attach
sampling.py       what the rollout's log-probs mean   precision.py  number formats
engine.py         vLLM: cascade attention, routing capture, lengths
routing.py        experts that are returned and were not chosen
vllm_versions.py  what newer versions of vLLM do otherwise
training.py       updates that are not what the settings or the method say
waiting.py        refused updates in an asynchronous run
bypass.py         settings that nothing reads in verl's bypass mode
model_files.py    what of model and data is here      sizes.py      batches, lengths and ranks
validation.py     verl's own, without all of verl
foreign.py        code that a config names, and that is not run without --trust
"""
