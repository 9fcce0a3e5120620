"""Logits in float32 in both engines: without it, each engine rounds them to its own half precision."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_ext.base.errors import HookError, Problem
from verl_ext.features.feature import Demand, Engines, Feature, Need, RunFeatures, TableLine
from verl_ext.features.top_tokens import FUSED
from verl_ext.features.verl_config import ROLLOUT, ROLLOUTS, SGLANG_ARGUMENTS, VLLM_ARGUMENTS, rollout_name

SETTING = "stability.float32_head"
BF16_HEADS = (f"{SETTING}=false",)
# Rollout engine -> the argument that sets its head's dtype, and the value.
ARGUMENTS = {
    "vllm": (f"{VLLM_ARGUMENTS}.hf_overrides.head_dtype", "float32"),
    "sglang": (f"{SGLANG_ARGUMENTS}.enable_fp32_lm_head", True),
}


def needs(run: RunFeatures) -> Iterator[Demand]:
    if run.stability.float32_head:
        yield Demand(f"{SETTING}=true", frozenset({Need.OUR_LOSS}), off=BF16_HEADS)


def problems(run: RunFeatures) -> Iterator[Problem]:
    if not run.stability.float32_head:
        return
    if (name := rollout_name(run.config)) not in ROLLOUTS:
        yield Problem(f"{SETTING}=true sets the head of vllm and sglang, not of {ROLLOUT}.name={name}", fix=BF16_HEADS)
        return
    argument, value = ARGUMENTS[name]
    if (given := OmegaConf.select(run.config, argument)) not in (None, value):
        yield Problem(f"{argument}={given} contradicts {SETTING}=true; leave {argument} out")
    if OmegaConf.select(run.config, FUSED):
        yield Problem(f"{SETTING}=true computes logits, and {FUSED}=True makes none", fix=(f"{FUSED}=False",))
    if name == "vllm" and (quantized := OmegaConf.select(run.config, f"{ROLLOUT}.quantization")):
        yield Problem(
            f"{SETTING}=true sets vLLM's hf_overrides, which verl sets itself with {ROLLOUT}.quantization={quantized}",
            fix=BF16_HEADS,
        )


def apply(run: RunFeatures) -> None:
    if run.stability.float32_head:
        argument, value = ARGUMENTS[rollout_name(run.config)]
        OmegaConf.update(run.config, argument, value, force_add=True)


def loss_settings(run: RunFeatures) -> Mapping[str, Any]:
    return {"float32_head": True} if run.stability.float32_head else {}


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if run.stability.float32_head:
        yield TableLine("float32 logits", "both engines", "the heads of both engines", proof=_confirmed_heads)


def _confirmed_heads(engines: Engines) -> str:
    """Returns how many heads compute in float32 in each engine."""
    from verl_ext.upstream.engine_settings import logits_dtypes

    training = sum(found["float32_heads"] or 0 for found in engines.losses)
    if not training:
        raise HookError(f"{SETTING}=true, but no training rank has a head", fix=BF16_HEADS)
    rollout = [dtype for dtypes in engines.ask(logits_dtypes) for dtype in dtypes]
    if not rollout:
        raise HookError(f"{SETTING}=true, but no rollout worker has a module that computes logits", fix=BF16_HEADS)
    if others := sorted({dtype or "another dtype" for dtype in rollout} - {"float32"}):
        raise HookError(
            f"{SETTING}=true, but the rollout computes its logits in {' and '.join(others)}: this version of "
            "the engine does not support it",
            fix=BF16_HEADS,
        )
    return f"heads: {training} in training, {len(rollout)} in the rollout"


FLOAT32_HEAD = Feature(needs, problems, apply, loss_settings=loss_settings, lines=lines)
