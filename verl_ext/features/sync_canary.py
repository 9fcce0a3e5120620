"""The `stability.sync_canary` settings: a check that updates reach the rollout."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_ext.base.errors import HookError
from verl_ext.base.methods import require
from verl_ext.features.feature import MEASURED, Engines, Feature, RunFeatures, TableLine
from verl_ext.features.verl_config import MERGE_LORA, sends_adapter

NAMED = 4  # names that an error lists, of those that vLLM did not use
AFTER_SYNC = "{trainer}.on_step_end"


@dataclass(frozen=True)
class SyncCanarySettings:
    """The trajectories that show if a weight sync happened, and how often they are checked.

    Attributes:
        trajectories: how many trajectories of the first batch both engines score again at weight syncs, to check that
            the weights arrived (docs/guard.md#a-weight-sync-that-did-not-happen). 0 turns the check off.
        every: check every this many syncs.
    """

    trajectories: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        require(self, "trajectories", self.trajectories >= 0, "must be at least 0")
        require(self, "every", self.every >= 1, "must be at least 1")


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (canary := run.stability.sync_canary).trajectories:
        often = "each sync" if canary.every == 1 else f"every {canary.every} syncs"
        setting = f"{canary.trajectories} trajectories, {often}"
        proof = _confirmed_adapter if sends_adapter(run.config) else None
        yield TableLine("sync canary", setting, AFTER_SYNC, MEASURED, proof=proof)


def _confirmed_adapter(engines: Engines) -> str:
    """Returns how many modules of the model have weights of the LoRA: the first sync is over by now."""
    reports = engines.vllm("adapter")
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


CANARY = Feature(lines)
