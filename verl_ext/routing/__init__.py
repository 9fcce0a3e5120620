"""Which experts the training engine chooses: seen in `compute_log_prob`, and replayed where asked.

config_names.py  what a model's config calls the number of its experts
choices.py       where a transformers model chooses experts, and how to put others in their place
layout.py        where the tokens of a micro-batch lie in a forward pass: packed, padded, split over ranks
engines.py       the training engines, each with its adapter; what an adapter is
fsdp.py          the adapter for FSDP and FSDP2: records, compares, replays
recorded.py      the adapter for Megatron and VeOmni, where verl itself records and replays
outputs.py       what travels to the controller: agreement per response token, sums per trajectory
"""
