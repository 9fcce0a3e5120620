"""A gap between the engines, planted on purpose: the rollout's weights are rounded as a quantised rollout has them."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError, HookError
from verl_ext.base.methods import described, require, require_one_of
from verl_ext.features.feature import Engines, Feature, RunFeatures, TableLine
from verl_ext.features.verl_config import ROLLOUT, SGLANG_ARGUMENTS, VLLM_ARGUMENTS, hf_config_of, strategy_of
from verl_ext.routing.engines import ENGINES

NONE = "none"
FORMATS = (NONE, "fp8", "int8", "int4", "fp4")
GROUPS = ("tensor", "channel")
DEFAULT_GROUP = 32
ARGUMENTS = {"vllm": VLLM_ARGUMENTS, "sglang": SGLANG_ARGUMENTS}
MODEL_OVERRIDES = f"{SGLANG_ARGUMENTS}.json_model_override_args"
SETTING = "stability.fake_quantization"
OFF = f"{SETTING}.format={NONE}"
OTHER_SYNC = "delta_sharded"  # verl patches the loaded weights with it, and asks no load_weights


@dataclass(frozen=True)
class FakeQuantization:
    """An experiment's switch: the rollout's weights are rounded as a quantised rollout has them, at the engine's start
    and at each weight sync. Everything else stays as it is. The gap of fp4 can so be studied without an fp4 kernel,
    also on a CPU, and a correction or replay can be tried against it. It saves neither time nor memory.

    Activations and the KV cache are not rounded, and scales keep full precision. A LoRA's base is rounded, its adapter
    is not. verl_ext/core/fake_quant.py has the grid of each format.

    The start-up table shows how many weights each worker of the rollout has rounded. If it is none, the run stops.
    The run is refused with `rollout.quantization`, with a model that is quantised already, and with
    `checkpoint_engine.backend=delta_sharded`, which changes weights that are loaded. To see it on a laptop:
    `bash tools/quickstart.sh stability.fake_quantization.format=fp4`.

    Attributes:
        format: round the weights of attention and experts to `fp8` (e4m3), `int8`, `int4` or `fp4` (e2m1). Embeddings,
            norms and biases are not rounded. `none` rounds nothing.
        group: the weights that share a scale: `tensor`, `channel` (one output's weights), or a number of consecutive
            inputs, at least 2, which must divide the inputs.
        router: round the routers too.
        head: round the head too.
    """

    format: str = NONE
    group: int | str = DEFAULT_GROUP
    router: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "format", FORMATS)
        # A group of one is its own scale: nothing would be rounded.
        number = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group >= 2
        holds = number or self.group in GROUPS
        require(self, "group", holds, f"must be {', '.join(GROUPS)}, or a number of inputs, at least 2")
        for name, off in (("group", DEFAULT_GROUP), ("router", False), ("head", False)):
            unused = not self.active and getattr(self, name) != off
            require(self, name, not unused, f"rounds nothing with format={NONE}", otherwise="choose a format")

    @property
    def active(self) -> bool:
        return self.format != NONE

    def __str__(self) -> str:
        """`fp4, group 32, router`"""
        besides = [name for name in ("router", "head") if getattr(self, name)]
        return ", ".join([described(self.format, {"group": self.group}), *besides])


def check(run: RunFeatures) -> None:
    asked, config = run.stability.fake_quantization, run.config
    if not asked.active:
        return
    said = f"{SETTING}.format={asked.format}"
    if (name := config.actor_rollout_ref.rollout.name) not in ARGUMENTS:
        engines = " and ".join(ARGUMENTS)
        raise ConfigError(f"{said} rounds the weights of {engines}, not of {ROLLOUT}.name={name}", fix=(OFF,))
    engine = ENGINES.get(strategy_of(config), ENGINES["fsdp"]).settings
    for setting in (f"{ROLLOUT}.quantization", f"{ARGUMENTS[name]}.quantization", f"{engine}.qat.enable"):
        if real := OmegaConf.select(config, setting):
            without = "false" if real is True else "null"
            raise ConfigError(
                f"{said} simulates a quantised rollout, and {setting}={real} makes a real one",
                fix=(OFF,),
                otherwise=f"set {setting}={without}",
            )
    if OmegaConf.select(config, f"{ROLLOUT}.checkpoint_engine.backend") == OTHER_SYNC:
        raise ConfigError(
            f"{said} rounds weights as they are loaded, and {ROLLOUT}.checkpoint_engine.backend={OTHER_SYNC} changes "
            "those that are loaded already",
            fix=(OFF,),
        )
    if run.read_model and (hf_config := hf_config_of(config.actor_rollout_ref.model)) is not None:
        _check_rounded_model(asked, hf_config, said)


def _check_rounded_model(asked: FakeQuantization, hf_config: Any, said: str) -> None:
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
                otherwise="choose a number that does",
            )


def _inputs(text: Any) -> Iterator[tuple[str, int]]:
    """Yields the inputs of weights that every model has; others, such as MLA's low ranks, are checked when they are
    loaded."""
    yield "hidden_size", text.hidden_size
    width = "moe_intermediate_size" if getattr(text, "moe_intermediate_size", None) else "intermediate_size"
    if isinstance(inputs := getattr(text, width, None), int):
        yield width, inputs


def apply(run: RunFeatures) -> None:
    """Passes the settings to the engine. vLLM's load format loads with the format that was asked for."""
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
    """Returns the entries of the model's config that the user gives SGLang."""
    given = OmegaConf.select(config, MODEL_OVERRIDES) or "{}"
    try:
        return dict(json.loads(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{MODEL_OVERRIDES}={given} is not an object in JSON", otherwise="quote it") from error


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (asked := run.stability.fake_quantization).active:
        proof = partial(_confirmed_rounding, asked)
        yield TableLine("fake quantization", str(asked), "the rollout's workers", proof=proof)


def _confirmed_rounding(asked: FakeQuantization, engines: Engines) -> str:
    """Returns how many weights of each kind each worker has rounded: the first sync is over by now."""
    from verl_ext.upstream.fake_quantization import report as rounded

    reports = engines.ask(rounded)
    for report in reports or [None]:
        if report is None or report["settings"] != asdict(asked):
            raise HookError(f"{SETTING}.format={asked.format}, but a rollout worker loads with {report}", fix=(OFF,))
        for kind, count in report["rounded"].items():
            if count == 0:
                raise HookError(
                    f"{SETTING} rounds {kind} weights, and the rollout received none with a known name", fix=(OFF,)
                )
    counts = ", ".join(f"{count} {kind}" for kind, count in reports[0]["rounded"].items())
    return f"{counts} weights in {len(reports)} worker(s) of the rollout"


FAKE_QUANTIZATION = Feature(lines, check, apply)
