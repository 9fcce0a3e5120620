"""Environment variables of a run's Ray processes: by them a process learns what is to change in it, before its imports.

Ray takes them when it starts or when the run connects to it; a session that this process has open already keeps its
environment.
"""

from typing import Any


def ask(config: Any, variable: str, value: str, *, keep: bool = False) -> None:
    """Have all Ray processes of a run start with it; vLLM's own processes have theirs from them.

    Args:
        keep: a value that the run's own runtime_env has already stays.
    """
    from omegaconf import OmegaConf

    place = f"ray_kwargs.ray_init.runtime_env.env_vars.{variable}"
    if not keep or OmegaConf.select(config, place) is None:
        OmegaConf.update(config, place, value, force_add=True)
