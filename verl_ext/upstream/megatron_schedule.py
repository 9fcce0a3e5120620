"""A checkpoint that is loaded into a Megatron engine which has trained sets its learning-rate schedule back.

megatron-core's `OptimizerParamScheduler` (0.16.1) adds the steps that it loads to those that it has taken. A resumed
run loads into a new engine, which has taken none. The guard's rollback loads into a running one, which would go on at a
step that is the sum of both.
"""

from collections.abc import Callable
from typing import Any

from verl_ext.base.patching import Undo, wrap


def load_schedule(transformer_impl: Any) -> Undo:
    """Have verl's Megatron engines forget the steps of their schedule before they load a checkpoint."""
    return wrap("load_schedule", transformer_impl.MegatronEngine, "load_checkpoint", _forget_and_load, "self, ...")


def _forget_and_load(load: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.num_steps = 0
    load(engine, *args, **kwargs)
