"""verl on CPU cores: the platform, and stand-ins for the parts of a GPU that vLLM, SGLang and Megatron need.

`base.patching.runs_on_cpu` tests whether a run asks for it. If not, nothing of this package is imported.
"""

import verl_ext.cpu.changes  # noqa: F401 (whatever is imported from here finds its changes in the table)
