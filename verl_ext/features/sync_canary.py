"""The sync canary: both engines score a few trajectories again at weight syncs, to check that updates arrive."""

from collections.abc import Iterator
from dataclasses import replace

from omegaconf import OmegaConf

from verl_ext.base.errors import HookError, Problem
from verl_ext.base.names import FEWEST_PROMPTS
from verl_ext.features.feature import Demand, Engines, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.settings import SyncCanarySettings
from verl_ext.features.verl_config import (
    MERGE_LORA,
    ROLLOUTS,
    drafts,
    rollout_name,
    sends_adapter,
    trainer_mode,
    trains_lora,
)

WITHOUT_CANARY = ("stability.sync_canary.trajectories=0", "stability.sync_canary.every=1")
METRICS = "sync/[!w]*"  # all of sync/ but sync/wrong_tensors, of the sync check
DEFAULT = 8  # trajectories, if the canary turns itself on
NAMED = 4  # how many of the names that vLLM did not use an error lists
BATCH = "data.train_batch_size"
AFTER_SYNC = "{trainer}.on_step_end"


def canary_settings(run: RunFeatures) -> SyncCanarySettings:
    """Returns the settings with a number of trajectories.

    The canary turns itself on if the gap is measured anyway, for a LoRA and in `separate_async`, but not with
    speculative decoding, where vLLM gave wrong prompt log-probs (vLLM issue 53488).

    Source: `PPOTrainerSeparateAsync` of verl 0.9.1 refuses the naive transfer; the other trainers use only that. In
    verl issue 7495, no sync of `separate_async` delivered a LoRA; in verl PR 7014, a merged one lacked its adapter.
    """
    asked = run.stability.sync_canary
    if asked.trajectories is not None:
        return asked
    doubted = trains_lora(run.config) or trainer_mode(run.config) == "separate_async"
    scores = rollout_name(run.config) in ROLLOUTS and not drafts(run.config)
    on = doubted and scores and Need.MEASURED_BATCHES in run.needs
    return replace(asked, trajectories=DEFAULT if on else 0)


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks that a batch has as many prompts as the canary needs."""
    syncs = OmegaConf.select(run.config, f"trainer.v1.{trainer_mode(run.config)}.parameter_sync_step") or 1
    prompts = (OmegaConf.select(run.config, BATCH) or FEWEST_PROMPTS * syncs) // syncs
    if (canary := run.stability.sync_canary).trajectories and prompts < FEWEST_PROMPTS:
        yield Problem(
            f"stability.sync_canary.trajectories={canary.trajectories} needs answers to {FEWEST_PROMPTS} prompts, and "
            f"a batch has {prompts}",
            fix=(f"{BATCH}={FEWEST_PROMPTS * syncs}",),
            leave_out=WITHOUT_CANARY,
        )


def needs(run: RunFeatures) -> Iterator[Demand]:
    if canary_settings(run).trajectories:
        needed = frozenset({Need.ROLLOUT_LOG_PROBS, Need.MEASURED_BATCHES})
        yield Demand("stability.sync_canary.trajectories", needed)


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (canary := canary_settings(run)).trajectories:
        often = "each sync" if canary.every == 1 else f"every {canary.every} syncs"
        setting = f"{canary.trajectories} trajectories, {often}"
        proof = _confirmed_adapter if sends_adapter(run.config) else None
        yield TableLine("sync canary", setting, AFTER_SYNC, proof=proof)


def _confirmed_adapter(engines: Engines) -> str:
    """Returns how many modules of the model have weights of the LoRA. It is called after the first sync."""
    from verl_ext.upstream.engine_settings import adapter

    reports = engines.ask(adapter)
    for report in reports or [None]:
        if not report or not report["adapters"]:
            raise HookError("the model is trained as a LoRA, and a vLLM worker received no adapter", fix=(MERGE_LORA,))
        if unused := report["unused"]:
            raise HookError(
                f"vLLM has no modules for {len(unused)} names of the LoRA, such as {', '.join(unused[:NAMED])}: it "
                "would sample without them",
                fix=(MERGE_LORA,),
                otherwise="leave them out of actor_rollout_ref.model.target_modules",
            )
    return f"{AFTER_SYNC}; {reports[0]['used']} modules with the LoRA in {len(reports)} vLLM worker(s)"


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not canary_settings(run).trajectories:
        switch = (f"stability.sync_canary.trajectories={DEFAULT}",)
        yield Idle(METRICS, "no weight sync is checked", switch, ("sync_canary.every",))


CANARY = Feature(needs, problems=problems, lines=lines, idle=idle)
