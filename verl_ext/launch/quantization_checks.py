"""`stability.fake_quantization` on the launching machine: what it goes together with, and how vLLM is asked for it."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.launch.routing_checks import ROLLOUT, hf_config_of
from verl_ext.routing.engines import ENGINES
from verl_ext.settings.config import StabilityConfig
from verl_ext.settings.fake_quantization import FakeQuantization

SETTING = "stability.fake_quantization"
OFF = f"{SETTING}.format=none"
ARGUMENTS = f"{ROLLOUT}.engine_kwargs.vllm"
OTHER_SYNC = "delta_sharded"  # verl patches the loaded weights with it, and asks no load_weights


def check_fake_quantization(config: DictConfig, stability: StabilityConfig, read_model: bool) -> None:
    asked = stability.fake_quantization
    if not asked.active:
        return
    said = f"{SETTING}.format={asked.format}"
    if (name := config.actor_rollout_ref.rollout.name) != "vllm":
        raise ConfigError(f"{said} rounds the weights of vLLM, not of {ROLLOUT}.name={name}", fix=(OFF,))
    engine = ENGINES.get(config.actor_rollout_ref.actor.strategy, ENGINES["fsdp"]).settings
    for setting in (f"{ROLLOUT}.quantization", f"{ARGUMENTS}.quantization", f"{engine}.qat.enable"):
        if real := OmegaConf.select(config, setting):
            without = "false" if real is True else "null"
            raise ConfigError(
                f"{said} stands for a quantised rollout, and {setting}={real} makes a real one",
                fix=(OFF,),
                otherwise=f"set {setting}={without}",
            )
    if OmegaConf.select(config, f"{ROLLOUT}.checkpoint_engine.backend") == OTHER_SYNC:
        raise ConfigError(
            f"{said} rounds weights as they are loaded, and {ROLLOUT}.checkpoint_engine.backend={OTHER_SYNC} changes "
            "those that are loaded already",
            fix=(OFF,),
        )
    if read_model and (hf_config := hf_config_of(config.actor_rollout_ref.model)) is not None:
        _check_model(asked, hf_config, said)


def apply_fake_quantization(config: DictConfig, stability: StabilityConfig) -> None:
    """Have vLLM load by the load format that rounds, which loads by the one that was asked for."""
    if not (asked := stability.fake_quantization).active:
        return
    from verl_ext.upstream.fake_quantization import LOAD_FORMAT, OURS

    inner = OmegaConf.select(config, f"{ARGUMENTS}.load_format") or config.actor_rollout_ref.rollout.load_format
    told = {**asdict(asked), "load_format": inner}
    OmegaConf.update(config, f"{ARGUMENTS}.load_format", LOAD_FORMAT, force_add=True)
    OmegaConf.update(config, f"{ARGUMENTS}.model_loader_extra_config.{OURS}", told, force_add=True)


def _check_model(asked: FakeQuantization, hf_config: Any, said: str) -> None:
    text = hf_config.get_text_config()
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError(f"{said} rounds weights that are not quantised yet, as the model's are", fix=(OFF,))
    if asked.head and text.tie_word_embeddings:
        raise ConfigError(
            f"{SETTING}.head=true has no head to round: the model's is its embedding (tie_word_embeddings)",
            fix=(f"{SETTING}.head=false",),
        )
    if not isinstance(asked.group, int):
        return
    for name, inputs in _inputs(text):
        if inputs % asked.group:
            raise ConfigError(
                f"{SETTING}.group={asked.group} does not divide the model's {name}={inputs}",
                fix=(f"{SETTING}.group=channel",),
                otherwise="a number that does",
            )


def _inputs(text: Any) -> Iterator[tuple[str, int]]:
    """Of weights that every model has; others, as of MLA's low ranks, are looked at when they are loaded."""
    yield "hidden_size", text.hidden_size
    width = "moe_intermediate_size" if getattr(text, "moe_intermediate_size", None) else "intermediate_size"
    if isinstance(inputs := getattr(text, width, None), int):
        yield width, inputs
