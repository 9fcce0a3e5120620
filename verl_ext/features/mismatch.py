"""The metrics of the gap, `vllm_kl/*`: they compare l_infer with the training engine's log-probs in every batch."""

import os
from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.features.feature import IN_THE_STEP, Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.reuse import measured_late
from verl_ext.features.verl_config import (
    MODE,
    ROLLOUT,
    RUNTIME,
    compares_in_update,
    is_asynchronous,
    logprobs_mode,
    rollout_name,
)

RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"
RAW_SETTING = f"{RUNTIME}.{RAW}"  # overrides the value of the launching shell


def raw_log_probs(config: DictConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """Returns True if SGLang computes log-probs before the temperature.

    By default it computes them after the temperature and before top-p and top-k, over the whole vocabulary, whatever
    `rollout.logprobs_mode` is. Source: srt/layers/sampler.py of SGLang 0.5.12.
    """
    given = OmegaConf.select(config, RAW_SETTING)
    return str(environ.get(RAW, "") if given is None else given).lower() in ("1", "true")


def needs(run: RunFeatures) -> Iterator[Demand]:
    """Yields the demand to measure, if `metrics` is on or another feature needs it. In the update, the experts are
    compared only with the measurements."""
    late = measured_late(run)
    compares_late = late and run.stability.router_agreement and compares_in_update(run.config)
    if not (run.stability.metrics or compares_late or Need.MEASURED_BATCHES in run.needs):
        return
    needed = {Need.ROLLOUT_LOG_PROBS, Need.MEASURED_BATCHES}
    if late:
        needed |= {Need.OUR_LOSS, Need.MEASURED_IN_UPDATE}
    yield Demand("stability.metrics", frozenset(needed))


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks that the rollout returns log-probabilities, and that they mean the same as the training engine's."""
    if Need.ROLLOUT_LOG_PROBS not in run.needs:
        return
    rollout = run.config.actor_rollout_ref.rollout
    if not rollout.calculate_log_probs:
        yield Problem(
            f"{ROLLOUT}.calculate_log_probs=False returns no log-probs, which stability.* compares",
            fix=(asked := (f"{ROLLOUT}.calculate_log_probs=True",)),
            leave_out=asked,
        )
        return
    if rollout_name(run.config) == "sglang":
        yield from _temperature_problems(run.config)
        return
    mode, setting = logprobs_mode(run.config)
    if mode == "processed_logprobs":  # with top-k, over the kept tokens only: the feature top_tokens handles it
        return
    if mode != "raw_logprobs":
        yield Problem(f"{setting}={mode} gives no log-probabilities to compare", fix=(f"{setting}=processed_logprobs",))
    elif rollout.temperature != 1:
        yield Problem(
            f"{setting}=raw_logprobs leaves out {ROLLOUT}.temperature={rollout.temperature}, which the training engine "
            "applies",
            fix=(f"{setting}=processed_logprobs",),
        )


def _temperature_problems(config: DictConfig) -> Iterator[Problem]:
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature != 1 and raw_log_probs(config):
        yield Problem(
            f"{RAW}=1 has SGLang leave out {ROLLOUT}.temperature={temperature}, which the training engine applies",
            fix=(f"++{RAW_SETTING}='0'",),
            otherwise="unset it",
        )


def idle(run: RunFeatures) -> Iterator[Idle]:
    """Yields the parts of the gap that the run does not measure."""
    yield from idle_unmeasured(run, "breakdown")
    if not run.stability.breakdown:
        for names in ("*/prob/*", "*/entropy/*", "*/position/*", "*/turn/*", "*/advantage*"):
            yield Idle(names, "stability.breakdown=false", ("stability.breakdown=true",))
    if not is_asynchronous(run.config):
        yield Idle("*/lag/*", f"no rollout is older than the policy with {MODE}=sync")


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if Need.MEASURED_IN_UPDATE in run.needs:
        yield TableLine(
            "mismatch metrics",
            "vllm_kl/*",
            "first mini-batch, {loss}",
            in_loss=lambda found: found["first_pass"],
        )
    elif Need.MEASURED_BATCHES in run.needs:
        yield TableLine("mismatch metrics", "vllm_kl/*", IN_THE_STEP)


def idle_unmeasured(run: RunFeatures, *settings: str) -> Iterator[Idle]:
    """Yields settings that act only if the gap is measured, if it is not."""
    if Need.MEASURED_BATCHES not in run.needs:
        yield Idle("", "the gap is not measured", ("stability.metrics=true",), settings)


MISMATCH = Feature(
    needs,
    problems,
    agent_loop=lambda run: {"answers": Need.MEASURED_BATCHES in run.needs},
    lines=lines,
    idle=idle,
)
