"""Rescoring: scores a few trajectories again with the weights that sampled them."""

from collections.abc import Iterator

from omegaconf import OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.verl_config import BYPASS, MODE, bypasses, is_asynchronous, strategy_of, trainer_mode

THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
COPIED = ("fsdp", "fsdp2", "veomni", "megatron")  # DetachActorWorker._get_strategy_handlers of verl 0.9.1


def needs(run: RunFeatures) -> Iterator[Demand]:
    if run.stability.rescoring.every:
        yield Demand("stability.rescoring.every", frozenset({Need.MEASURED_BATCHES, Need.OLD_VERSIONS}))


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks that verl keeps copies of earlier weights: only in separate_async, and not in bypass mode.

    verl's replay buffer drops prompts that are more than THRESHOLD - 1 steps old (`_stale_terminal_keys` of 0.9.1).
    """
    if not run.stability.rescoring.every:
        return
    where, never = f"stability.rescoring.every={run.stability.rescoring.every}", ("stability.rescoring=null",)
    if (mode := trainer_mode(run.config)) != "separate_async":
        keeps_none = "keeps no copy of the weights that sampled them"
        why = keeps_none if is_asynchronous(run.config) else "has no older rollouts"
        yield Problem(
            f"{where} scores rollouts again that are older than the policy, and {MODE}={mode} {why}: verl copies "
            "weights only in separate_async",
            fix=never,
        )
        return
    if bypasses(run.config):
        yield Problem(f"{where}: verl copies no weights with {BYPASS}=True", fix=never)
    if (strategy := strategy_of(run.config)) not in COPIED:
        yield Problem(f"{where}: verl copies no weights with actor.strategy={strategy}", fix=never)
    oldest, versions = OmegaConf.select(run.config, THRESHOLD), run.stability.rescoring.versions
    if oldest is None or (isinstance(oldest, int) and oldest - 1 > versions):  # verl refuses what is no number
        found = f"stability.rescoring.versions={versions}, and {THRESHOLD}={'null' if oldest is None else oldest}"
        why = f"trajectories whose newest weights are more than {versions} version(s) old are not rescored"
        otherwise = "more versions, each a copy of the weights in the host's memory"
        yield Problem(found, why, otherwise=otherwise, level="note")


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if run.stability.rescoring.every:
        yield TableLine(
            "rescoring",
            str(run.stability.rescoring),
            "{trainer}._compute_old_log_prob",
            proof=lambda engines: f"copies of the weights on {len(engines.workers.kept_versions())} rank(s)",
        )


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not run.stability.rescoring.every:
        why, switch = "nothing is rescored", ("stability.rescoring.every=10",)
        yield Idle("vllm_kl/engine/*", why, switch, ("rescoring.trajectories", "rescoring.versions"))
        for metrics in ("vllm_kl/stale/*", "vllm_kl/rescored"):
            yield Idle(metrics, why, switch)


RESCORING = Feature(needs, problems, lines=lines, idle=idle)
