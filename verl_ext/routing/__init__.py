"""Which experts the training engine chooses: seen in `compute_log_prob`, and replayed where asked.

choices.py       where a transformers model chooses experts, and how to put others in their place
engines.py       the training engines, each with its adapter; what an adapter is; the names of a model's sizes
fsdp.py          the adapter for FSDP and FSDP2: records, compares, replays
recorded.py      the adapter for Megatron and VeOmni, where verl itself records and replays
router_shift.py  how far the current routers have moved from the old ones, for the loss router_shift
outputs.py       where tokens lie in a forward pass, and what travels to the controller: agreement per token, sums
"""
