"""Settings of the engines that the gap may depend on, changed one at a time."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf

from verl_ext.base.errors import ConfigError, require_choice
from verl_ext.features.verl_config import (
    MODEL,
    ROLLOUT,
    SGLANG_ARGUMENTS,
    VLLM_ARGUMENTS,
    key_of,
    rollout_name,
    strategy_of,
)
from verl_ext.routing.engines import ACTOR

EAGER = f"{ROLLOUT}.enforce_eager"
CHUNKED = f"{ROLLOUT}.enable_chunked_prefill"
CACHED = f"{ROLLOUT}.enable_prefix_caching"
SEQUENCES = f"{ROLLOUT}.max_num_seqs"
TENSOR = f"{ROLLOUT}.tensor_model_parallel_size"
QUANTIZED = f"{ROLLOUT}.quantization"
BACKEND = f"{VLLM_ARGUMENTS}.attention_backend"
DRAFTS = f"{MODEL}.mtp.enable_rollout"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
ALL = "all"
LAYERS = "layers"  # a sweep within one start
LAUNCH = "the launch as it is"
SENSITIVE = 2.0  # times what a layer raises k3 by in the mean


@dataclass(frozen=True)
class SettingChange:
    """One setting of a launch, changed.

    Attributes:
        name: the name of the change in tables and folders; a change for another engine may have the same name.
        overrides: given after the launch's own.
        rollout: the only rollout engine that knows the setting; "" for any.
        megatron: whether only Megatron knows the setting (True), or only the other training engines (False).
        device: "gpu" or "cpu" if the setting is only for this device; "" for any.
        sets: the setting and the value by which the launch shows that it has the change already; those of the first
            override by default.
        splits: whether it splits over two GPUs what is on one: the value is 1, and their number is even.
    """

    name: str
    overrides: tuple[str, ...]
    rollout: str = ""
    megatron: bool | None = None
    device: str = ""
    sets: tuple[str, Any] = ("", None)
    splits: bool = False

    def fits(self, config: Any) -> bool:
        """Returns True if the launch does not have these values yet, and its engines and device know the setting."""
        return (
            self.rollout in ("", rollout_name(config))
            and self.megatron in (None, strategy_of(config) == "megatron")
            and self.device in ("", "cpu" if config.trainer.device == "cpu" else "gpu")
            and self.differs(config)
        )

    def differs(self, config: Any) -> bool:
        """Returns True if the launch has another value, or none and the override adds one."""
        override = self.overrides[0]
        setting, value = self.sets if self.sets[0] else (key_of(override), yaml.safe_load(override.partition("=")[2]))
        now = OmegaConf.select(config, setting)
        if self.splits:
            return bool(now == 1 and config.trainer.n_gpus_per_node % 2 == 0)
        return now != value and (now is not None or override.startswith("++"))


WHOLE_TOKENS = 1 << 16  # tokens per pass, more than any answer has
MEGATRON_DTYPE, ROLLOUT_DTYPE = f"{ACTOR}.megatron.dtype", f"{ROLLOUT}.dtype"
NO_RADIX_CACHE, CHUNK = f"{SGLANG_ARGUMENTS}.disable_radix_cache", f"{SGLANG_ARGUMENTS}.chunked_prefill_size"
FP32, FP16 = (ROLLOUT_DTYPE, "float32"), (ROLLOUT_DTYPE, "float16")
CHANGES = (
    SettingChange("fp32", ("precision=fp32",), megatron=False, sets=FP32),
    SettingChange("fp16", ("precision=fp16",), megatron=False, sets=FP16),
    # verl refuses it on GPUs.
    SettingChange(
        "fp32", (f"{MEGATRON_DTYPE}=float32", f"{ROLLOUT_DTYPE}=float32"), megatron=True, device="cpu", sets=FP32
    ),
    SettingChange("fp16", ("precision=fp16_megatron",), megatron=True, sets=FP16),
    SettingChange("eager", (f"{EAGER}=true",)),
    SettingChange("graphs", (f"{EAGER}=false",), device="gpu"),
    SettingChange("whole_prefill", (f"{CHUNKED}=false",), "vllm"),
    SettingChange("no_prefix_cache", (f"{CACHED}=false",), "vllm"),
    # verl does not pass CHUNKED and CACHED to SGLang. Without chunks (-1), SGLang 0.5.12 has room for the experts of
    # only as many tokens per pass as it allows requests, and its scheduler fails (state_capturer/routed_experts.py).
    SettingChange("whole_prefill", (f"++{CHUNK}={WHOLE_TOKENS}",), "sglang"),
    SettingChange("no_prefix_cache", (f"++{NO_RADIX_CACHE}=true",), "sglang"),
    SettingChange(
        "no_cascade",
        ("stability.cascade_attention=off",),
        "vllm",
        device="gpu",
        sets=("stability.cascade_attention", "off"),
    ),
    SettingChange("one_at_a_time", (f"{SEQUENCES}=1",)),
    SettingChange("tensor_parallel_1", (f"{TENSOR}=1",)),
    SettingChange("tensor_parallel_2", (f"{TENSOR}=2",), splits=True),
    *(
        SettingChange(f"training_{short}_{size}", (f"{ACTOR}.megatron.{name}={size}",), megatron=True, splits=size == 2)
        for short, name in (
            ("tp", "tensor_model_parallel_size"),
            ("ep", "expert_model_parallel_size"),
            ("cp", "context_parallel_size"),
        )
        for size in (1, 2)
    ),
    SettingChange("no_quantization", (f"{QUANTIZED}=null",)),
    SettingChange("no_speculation", (f"{DRAFTS}=false",)),
    *(
        SettingChange(f"attention_{name.lower()}", (f"++{BACKEND}={name}",), "vllm", device="gpu")
        for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
    ),
    *(SettingChange(f"training_{name}", (f"++{ATTENTION}={name}",), megatron=False) for name in ("sdpa", "eager")),
)
NAMES = tuple(dict.fromkeys(change.name for change in CHANGES))


def changes_of(config: Any, names: Sequence[str], added: Mapping[str, str]) -> list[SettingChange]:
    """Returns the named changes that fit (for ALL, all that fit), and the user's own. LAYERS is no change.

    Raises:
        ConfigError: a name is unknown, its change does not fit, or an added name is taken.
    """
    for name in names:
        require_choice("--sweep", name, (ALL, LAYERS, *NAMES))
    names = [name for name in names if name != LAYERS]
    found = [change for change in CHANGES if (change.name in names or ALL in names) and change.fits(config)]
    if wrong := [name for name in names if name not in (ALL, *(change.name for change in found))]:
        raise ConfigError(f"--sweep {wrong[0]}: this run already has this setting, or its engine does not know it")
    if twice := [name for name in added if name in NAMES]:
        raise ConfigError(f"--add {twice[0]}: there is already a setting of this name", otherwise="choose another name")
    return [*found, *(SettingChange(name, tuple(text.split())) for name, text in added.items())]


def with_change(given: Sequence[str], change: SettingChange) -> list[str]:
    """Returns the launch's overrides with the change after them; it replaces another choice of the same group."""
    groups = {"precision"} & set(map(key_of, change.overrides))
    kept = [override for override in given if key_of(override) not in groups]
    return [*kept, *change.overrides]


@dataclass(frozen=True)
class SweepResult:
    """The gap of the launch with one change.

    Attributes:
        name: name of the change; "" for the launch as it is.
        k3, k3_error: k3 between sampling and training, and its standard error.
        sampling, rest: k3 between decode and prefill of the rollout engine, and between its prefill and training.
        seconds: duration of the measurement.
        error: one line, if it could not be measured; else "".
    """

    name: str
    overrides: tuple[str, ...] = ()
    k3: float = 0.0
    k3_error: float = 0.0
    sampling: float = 0.0
    rest: float = 0.0
    seconds: float = 0.0
    error: str = ""


def ranked_by_gap(swept: Sequence[SweepResult]) -> list[SweepResult]:
    """Returns the results with the smallest gap first, and those that could not be measured last."""
    return sorted(swept, key=lambda one: (bool(one.error), one.k3))


def exceeds_noise(one: SweepResult, base: SweepResult) -> bool:
    """Returns True if `one` changes the gap by more than twice the difference's error and a tenth of the gap."""
    error = (one.k3_error**2 + base.k3_error**2) ** 0.5
    return not (one.error or base.error) and abs(one.k3 - base.k3) > max(2 * error, 0.1 * base.k3)


def sweep_sentence(swept: Sequence[SweepResult]) -> str:
    """Returns the result of a sweep in a sentence; the first of `swept` is the launch as it is."""
    base, *others = swept
    if base.error:
        finite = ", ".join(one.name for one in others if not one.error)
        return "The launch as it is has no gap to compare with" + (f"; it is finite with {finite}." if finite else ".")
    less = [one for one in ranked_by_gap(others) if exceeds_noise(one, base) and one.k3 < base.k3]
    more = [one for one in ranked_by_gap(others) if exceeds_noise(one, base) and one.k3 > base.k3]
    if not less and not more:
        return "No setting tried changes the gap by more than its error."
    words = [f"{one.name} leaves {one.k3 / base.k3:.0%} of the gap" for one in less]
    words += [f"{one.name} makes it {one.k3 / max(base.k3, 1e-300):.1f} times as large" for one in more]
    return f"Of the settings tried: {', '.join(words)}."


@dataclass(frozen=True)
class GroupGap:
    """The gap with one group of the rollout's weights rounded.

    Attributes:
        group: as of `upstream.fake_quantization.groups_of`; "" for none.
        k3, k3_error: between the rollout's prefill and training; None if no token was finite.
        modules: the names of its modules.
    """

    group: str
    k3: float | None
    k3_error: float | None
    modules: Sequence[str] = ()

    @property
    def is_layer(self) -> bool:
        return self.group.startswith("layer ")


def excess(one: GroupGap, base: GroupGap) -> float:
    """Returns by how much the group raises k3."""
    return 0.0 if one.k3 is None or base.k3 is None else one.k3 - base.k3


def ranked_groups(layers: Sequence[GroupGap]) -> list[GroupGap]:
    """Returns the groups with the largest k3 first; those without a number before all others."""
    return sorted(layers, key=lambda one: (one.k3 is not None, -(one.k3 or 0.0)))


def sensitive_layers(layers: Sequence[GroupGap]) -> list[GroupGap]:
    """Returns the layers that stand out, the first one first: they raise k3 by SENSITIVE times the mean of all layers,
    and by more than twice the error of the difference; and those without a number."""
    base, *groups = layers
    only = [one for one in groups if one.is_layer]
    mean = sum(max(excess(one, base), 0.0) for one in only) / max(len(only), 1)

    def stands_out(one: GroupGap) -> bool:
        error = math.hypot(one.k3_error or 0.0, base.k3_error or 0.0)
        return one.k3 is None or excess(one, base) > max(SENSITIVE * mean, 2 * error)

    return [one for one in ranked_groups(only) if stands_out(one)]


def layers_sentences(layers: Sequence[GroupGap]) -> list[str]:
    """Returns the result of a sweep over the layers; the first of `layers` has nothing rounded."""
    base, *groups = layers
    found, only = sensitive_layers(layers), [one for one in ranked_groups(groups) if one.is_layer]
    if not only:
        return []
    if not found:
        return [
            f"No layer stands out: rounded by itself, {only[0].group} raises k3 most, by {excess(only[0], base):.1e}."
        ]
    words = ", ".join(f"{one.group} by {excess(one, base):.1e}" if one.k3 is not None else one.group for one in found)
    kept = json.dumps([module for one in found for module in one.modules])
    return [
        f"Layers that stand out when they are rounded by themselves: {words} of k3.",
        f'To keep them in 16 bits, in the quantization config of vLLM or SGLang: "ignored_layers": {kept}',
    ]
