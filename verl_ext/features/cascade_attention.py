"""vLLM's cascade attention: its kernel for shared prefixes computes other log-probabilities than the usual kernel."""

from collections.abc import Iterator

from omegaconf import OmegaConf

from verl_ext.base.errors import HookError, Problem
from verl_ext.features.feature import VLLM, Demand, Engines, Feature, RunFeatures, TableLine
from verl_ext.features.verl_config import ROLLOUT, VLLM_ARGUMENTS

DEFAULT_CASCADE = ("stability.cascade_attention=default",)
DISABLED = f"{VLLM_ARGUMENTS}.disable_cascade_attn"


def needs(run: RunFeatures) -> Iterator[Demand]:
    if (setting := run.stability.cascade_attention) != "default":
        yield Demand(f"stability.cascade_attention={setting}")


def problems(run: RunFeatures) -> Iterator[Problem]:
    if (setting := run.stability.cascade_attention) == "default":
        return
    asked = f"stability.cascade_attention={setting}"
    if (name := run.config.actor_rollout_ref.rollout.name) != "vllm":
        yield Problem(f"{asked} is a setting of vLLM, not of {ROLLOUT}.name={name}", fix=DEFAULT_CASCADE)
        return
    disabled = OmegaConf.select(run.config, DISABLED)
    if disabled is not None and disabled != (setting == "off"):
        yield Problem(f"{DISABLED}={disabled} contradicts {asked}; leave {DISABLED} out")


def apply(run: RunFeatures) -> None:
    if (setting := run.stability.cascade_attention) != "default":
        OmegaConf.update(run.config, DISABLED, setting == "off", force_add=True)


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (setting := run.stability.cascade_attention) != "default":
        yield TableLine("cascade attention", setting, VLLM, proof=lambda engines: _confirmed(setting, engines))


def _confirmed(setting: str, engines: Engines) -> str:
    """Returns how many of vLLM's workers run with the setting."""
    from verl_ext.upstream.engine_settings import uses_cascade_attention

    running = engines.ask(uses_cascade_attention)
    if not running:
        raise HookError("stability.cascade_attention: no vLLM worker answered", fix=DEFAULT_CASCADE)
    if any(value != (setting == "on") for value in running):
        state = "on" if running[0] else "off"
        raise HookError(
            f"stability.cascade_attention={setting}, but cascade attention is {state} in vLLM: this engine or device "
            "does not support the setting",
            fix=DEFAULT_CASCADE,
        )
    return f"confirmed by {len(running)} vLLM worker(s)"


CASCADE_ATTENTION = Feature(needs, problems, apply, lines=lines)
