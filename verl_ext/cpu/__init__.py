"""verl on CPU cores: the platform, and stand-ins for what vLLM, SGLang and Megatron take from a GPU.

`base.patching.runs_on_cpu` says whether a run asks for it. Where none does, nothing of this package is imported.
"""
