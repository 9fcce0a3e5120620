"""`verl-ext plan`: estimates whether a run fits its GPUs and how it spends its time, before it waits in a queue.

It computes from the composed config and the model's published shape, and starts nothing. docs/plan.md has the formulas.
"""
