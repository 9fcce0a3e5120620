"""Reads the experts that the training engine chooses, and replays others if asked.

choices.py       finds where a transformers model chooses experts, and replaces the choice
engines.py       the training engines, each with its adapter; the interface of an adapter; the names of a model's sizes
hooked.py        the adapter for FSDP, FSDP2 and VeOmni: records, compares, replays
megatron.py      the adapter for Megatron, on which verl itself records and replays
recorder.py      hooks that record a model's states on the way from tokens to logits, in any engine
layers.py        the layers of a model in each training engine, for recorders of states
outputs.py       the places of tokens in a forward pass, and the outputs for the controller: agreement per token, sums
"""
