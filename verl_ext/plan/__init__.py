"""`verl-ext plan`: whether a run fits its GPUs, and where its time goes, before anybody waits in a queue for them.

Arithmetic on the composed config and the model's published shape; nothing is started. docs/plan.md has the formulas.
"""
