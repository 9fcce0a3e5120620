"""What a run with SGLang as its rollout engine cannot do, found before Ray starts.

Read in SGLang 0.5.12, which verl 0.9.1 pins, and in verl/workers/rollout/sglang_rollout.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
MTP = "actor_rollout_ref.model.mtp"
RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"
RAW_SETTING = f"ray_kwargs.ray_init.runtime_env.env_vars.{RAW}"  # goes over the launching shell's


def raw_log_probs(config: DictConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether SGLang's log-probs are those before the temperature.

    Source: srt/layers/sampler.py. By default they are of the whole vocabulary, after the temperature and before top-p
    and top-k; `rollout.logprobs_mode` is vLLM's, and does not reach SGLang.
    """
    given = OmegaConf.select(config, RAW_SETTING)
    return str(environ.get(RAW, "") if given is None else given).lower() in ("1", "true")


def check_sglang_log_probs(config: DictConfig) -> None:
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature != 1 and raw_log_probs(config):
        raise ConfigError(
            f"{RAW}=1 has SGLang leave out {ROLLOUT}.temperature={temperature}, which the training engine applies",
            fix=(f"++{RAW_SETTING}='0'",),
            otherwise="unset it",
        )


def check_sglang_routing(config: DictConfig, asked: str, off: str) -> None:
    """Settings with which what SGLang returns is not the routing of the model that sampled."""
    for setting, value, why in _refused(config):
        to = "true" if value == "false" else "false"
        raise ConfigError(
            f"{asked} cannot use SGLang's routed experts with {setting}={value}: {why}",
            fix=(f"{'++' * setting.startswith(ARGUMENTS)}{setting}={to}",),
            otherwise=f"set {off}",
        )


def _refused(config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """(setting, its value, why)"""

    def on(setting: str) -> bool:
        return bool(OmegaConf.select(config, setting))

    if not on(f"{ROLLOUT}.skip_tokenizer_init"):
        yield f"{ROLLOUT}.skip_tokenizer_init", "false", "verl then imports their decoder from where SGLang had it once"
    if on(f"{ROLLOUT}.disaggregation.enabled"):
        why = "the server that decodes has no routing of the prompt, which another one read"
        yield f"{ROLLOUT}.disaggregation.enabled", "true", why
    if on(f"{MTP}.enable") and on(f"{MTP}.enable_rollout"):
        why = "the draft model's routers write over the model's, in SGLang before 0.5.15"
        yield f"{MTP}.enable_rollout", "true", why
    if on(f"{ARGUMENTS}.enable_hierarchical_cache"):
        why = "keys come back from the host without the routing that was kept for them"
        yield f"{ARGUMENTS}.enable_hierarchical_cache", "true", why


def check_sglang_model(text_config: Any, path: str, asked: str, off: str) -> None:
    if not hasattr(text_config, "num_experts_per_tok"):
        raise ConfigError(
            f"{asked} needs num_experts_per_tok in the model's config, by which SGLang knows how many experts to "
            f"return, and actor_rollout_ref.model.path={path} has none",
            fix=(off,),
        )
