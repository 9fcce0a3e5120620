"""Makes a gap between the engines on purpose: the rollout's weights are rounded as in a quantised rollout."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError, HookError, Problem
from verl_ext.features.feature import Demand, Engines, Feature, Idle, RunFeatures, TableLine
from verl_ext.features.settings import NONE, FakeQuantization
from verl_ext.features.verl_config import ROLLOUT, SGLANG_ARGUMENTS, VLLM_ARGUMENTS, hf_config_of, strategy_of
from verl_ext.routing.engines import ENGINES

ARGUMENTS = {"vllm": VLLM_ARGUMENTS, "sglang": SGLANG_ARGUMENTS}
MODEL_OVERRIDES = f"{SGLANG_ARGUMENTS}.json_model_override_args"
SETTING = "stability.fake_quantization"
WITHOUT_ROUNDING = f"{SETTING}.format={NONE}"
OTHER_SYNC = "delta_sharded"  # with it, verl patches the loaded weights and does not call load_weights


def needs(run: RunFeatures) -> Iterator[Demand]:
    if run.stability.fake_quantization.active:
        yield Demand(f"{SETTING}.format")


def problems(run: RunFeatures) -> Iterator[Problem]:
    asked, config = run.stability.fake_quantization, run.config
    if not asked.active:
        return
    said = f"{SETTING}.format={asked.format}"
    if (name := config.actor_rollout_ref.rollout.name) not in ARGUMENTS:
        engines = " and ".join(ARGUMENTS)
        yield Problem(f"{said} rounds the weights of {engines}, not of {ROLLOUT}.name={name}", fix=(WITHOUT_ROUNDING,))
        return
    engine = ENGINES.get(strategy_of(config), ENGINES["fsdp"]).settings
    for setting in (f"{ROLLOUT}.quantization", f"{ARGUMENTS[name]}.quantization", f"{engine}.qat.enable"):
        if real := OmegaConf.select(config, setting):
            without = "false" if real is True else "null"
            yield Problem(
                f"{said} simulates a quantised rollout, and {setting}={real} makes a real one",
                fix=(WITHOUT_ROUNDING,),
                otherwise=f"set {setting}={without}",
            )
    if OmegaConf.select(config, f"{ROLLOUT}.checkpoint_engine.backend") == OTHER_SYNC:
        yield Problem(
            f"{said} rounds weights while they are loaded, and {ROLLOUT}.checkpoint_engine.backend={OTHER_SYNC} "
            "changes weights that are already loaded",
            fix=(WITHOUT_ROUNDING,),
        )
    if run.read_model and (hf_config := hf_config_of(config.actor_rollout_ref.model)) is not None:
        yield from _rounded_model_problems(asked, hf_config, said)


def _rounded_model_problems(asked: FakeQuantization, hf_config: Any, said: str) -> Iterator[Problem]:
    text = hf_config.get_text_config()
    if getattr(hf_config, "quantization_config", None):
        yield Problem(
            f"{said} needs weights that are not quantised, and the model's already are", fix=(WITHOUT_ROUNDING,)
        )
    if asked.head and text.tie_word_embeddings:
        yield Problem(
            f"{SETTING}.head=true has no head to round: the model's is its embedding (tie_word_embeddings)",
            fix=(f"{SETTING}.head=false",),
        )
    if not isinstance(asked.group, int):
        return
    for name, inputs in _inputs(text):
        if inputs % asked.group:
            yield Problem(
                f"{SETTING}.group={asked.group} does not divide the model's {name}={inputs}",
                fix=(f"{SETTING}.group=channel",),
                otherwise="choose a number that does",
            )


def _inputs(text: Any) -> Iterator[tuple[str, int]]:
    """Yields name and size of the inputs that every model has; others, such as MLA's low ranks, are checked on load."""
    yield "hidden_size", text.hidden_size
    width = "moe_intermediate_size" if getattr(text, "moe_intermediate_size", None) else "intermediate_size"
    if isinstance(inputs := getattr(text, width, None), int):
        yield width, inputs


def apply(run: RunFeatures) -> None:
    """Passes the settings to the engine. vLLM gets our load format, which loads with the format that the user set."""
    if not (asked := run.stability.fake_quantization).active:
        return
    from verl_ext.upstream.fake_quantization import LOAD_FORMAT, OURS

    if run.config.actor_rollout_ref.rollout.name == "sglang":
        overrides = _model_overrides(run.config) | {OURS: asdict(asked)}
        OmegaConf.update(run.config, MODEL_OVERRIDES, json.dumps(overrides), force_add=True)
        return
    given = OmegaConf.select(run.config, f"{VLLM_ARGUMENTS}.load_format")
    inner = given or run.config.actor_rollout_ref.rollout.load_format
    settings = {**asdict(asked), "load_format": inner}
    OmegaConf.update(run.config, f"{VLLM_ARGUMENTS}.load_format", LOAD_FORMAT, force_add=True)
    OmegaConf.update(run.config, f"{VLLM_ARGUMENTS}.model_loader_extra_config.{OURS}", settings, force_add=True)


def _model_overrides(config: DictConfig) -> dict[str, Any]:
    """Returns the entries of the model's config that the user overrides for SGLang."""
    given = OmegaConf.select(config, MODEL_OVERRIDES) or "{}"
    try:
        return dict(json.loads(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{MODEL_OVERRIDES}={given} is not a JSON object", otherwise="quote it") from error


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (asked := run.stability.fake_quantization).active:
        proof = partial(_confirmed_rounding, asked)
        yield TableLine("fake quantization", str(asked), "the rollout's workers", proof=proof)


def _confirmed_rounding(asked: FakeQuantization, engines: Engines) -> str:
    """Returns how many weights of each kind each worker has rounded. It is called after the first sync."""
    from verl_ext.upstream.fake_quantization import report as rounded

    reports = engines.ask(rounded)
    for report in reports or [None]:
        if report is None or report["settings"] != asdict(asked):
            raise HookError(
                f"{SETTING}.format={asked.format}, but a rollout worker reports {report}", fix=(WITHOUT_ROUNDING,)
            )
        for kind, count in report["rounded"].items():
            if count == 0:
                raise HookError(
                    f"{SETTING} rounds {kind} weights, but the rollout received none with a known name",
                    fix=(WITHOUT_ROUNDING,),
                )
    counts = ", ".join(f"{count} {kind}" for kind, count in reports[0]["rounded"].items())
    return f"{counts} weights in {len(reports)} worker(s) of the rollout"


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not run.stability.fake_quantization.active:
        settings = tuple(f"fake_quantization.{name}" for name in ("group", "router", "head"))
        yield Idle("", "nothing is rounded", (f"{SETTING}.format=fp4",), settings)


FAKE_QUANTIZATION = Feature(needs, problems, apply, lines=lines, idle=idle)
