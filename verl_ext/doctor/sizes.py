"""Batches, lengths and ranks against each other, the model and the machines."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from verl_ext.doctor.applied import applied
from verl_ext.doctor.context import MODEL, Context
from verl_ext.doctor.findings import Finding, check

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_ext.errors import ConfigError
    from verl_ext.launch.models import ModelShape

STRATEGIES = ("fsdp", "fsdp2", "megatron")


@check("sizes")
def sizes(context: Context) -> Iterable[Finding]:
    """What the rules of `verl_ext/launch/sizes.py` refuse; those on the model, where its shape is in the table.

    Source: the comments there, on verl 0.9.1, megatron-core 0.16, transformers and vLLM 0.27.
    """
    if context.config is None or context.engine is None or context.strategy not in STRATEGIES:
        return
    from verl_ext.errors import ConfigError
    from verl_ext.launch.models import shape_of

    try:
        shape = shape_of(str(context.get(f"{MODEL}.path", "")))
    except ConfigError:
        shape = None
    if error := _refused(context.config, shape):
        _, fix = applied(context.config, error, lambda fixed: _refused(fixed, shape))
        yield Finding("error", str(error), "the workers would stop with it, or leave part of the machines idle", fix)
        return
    beside = "" if shape else "; the model's shape is not in verl_ext/launch/models.py, and was left out"
    yield Finding("ok", f"batches, lengths and ranks fit each other{beside}")


def _refused(config: "DictConfig", shape: "ModelShape | None") -> "ConfigError | None":
    from verl_ext.errors import ConfigError
    from verl_ext.plan.sizes import check_sizes

    try:
        check_sizes(config, shape)
    except ConfigError as error:
        return error
    return None


@check("gpu")
def gpu(context: Context) -> Iterable[Finding]:
    """A run on GPUs, looked at from a machine without.

    Source: `torch.cuda.is_available`, and --gpu.
    """
    if context.get("trainer.device") == "cuda" and context.gpu is None:
        yield Finding(
            "note", "trainer.device=cuda, and no GPU is seen here", "give --gpu: cascade attention depends on it"
        )
