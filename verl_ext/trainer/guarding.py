"""The guard around verl's training loop: it feeds `guard.guard` and carries out what that decides.

Where in verl's loop each action happens: a skip in place of the update; a rollback at the end of the step, before verl
saves a checkpoint and synchronises the weights; a stop before the next step, when the metrics of this one are written.
"""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role

from verl_ext.errors import GuardStopError, HookError
from verl_ext.guard.guard import Guard
from verl_ext.guard.state import Decision, Event
from verl_ext.metrics import is_rare
from verl_ext.settings.config import StabilityConfig
from verl_ext.trainer import checkpoints
from verl_ext.trainer.logs import EventLog, events_path, keep_metrics

UNREAD_AFTER = 3  # steps with an update after which every rule must have had its signal


def build_guard(stability: StabilityConfig) -> Guard:
    settings = stability.guard
    mask = "correction/dropped" if "icepop" in stability.correction_names else ""
    return Guard(
        stability.rules,
        stop_after=settings.stop_after,
        max_rollbacks=settings.max_rollbacks,
        cooldown=settings.rollback_cooldown,
        boundary=settings.boundary,
        mask=mask,
    )


class GuardMixin:
    """Overrides of verl's PPOTrainer; without anything to guard by, they are verl's own."""

    config: DictConfig
    global_steps: int
    stability: StabilityConfig
    compares_engines: bool
    actor_rollout_wg: Any
    critic_wg: Any
    use_critic: bool

    def __init__(self, config: DictConfig):
        self.guard = build_guard(self.stability)
        self.stop_reason = ""
        self.updated_steps = 0
        self.events: EventLog | None = None
        super().__init__(config)  # type: ignore[call-arg]

    def fit(self, agent_loop_manager: Any) -> None:
        resume = self.global_steps > 0
        keep_metrics(resume=resume)
        if self.compares_engines:
            self.events = EventLog(events_path(self.config), resume=resume)
        elif not resume:
            events_path(self.config).unlink(missing_ok=True)  # of an earlier run, which would pass for this one's
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            if self.events is not None:
                self.events.close()
        self._stop_if_asked()
        if due := self.guard.state.rollback_due:
            print(f"verl_ext: the run ended with a rollback due: {due}; {self._good_checkpoint()}", flush=True)

    def on_step_begin(self) -> None:
        self._stop_if_asked()
        super().on_step_begin()  # type: ignore[misc]

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self.guard.begin(self.global_steps)
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        if not self.compares_engines:
            return batch
        self.carry_out(self.guard.judge_late(metrics))
        self.carry_out(self.guard.close())
        if self.guard.state.rollback_due and not self.stop_reason:
            self._roll_back()
        # After verl has averaged the local updates of this step: a running count must not be averaged.
        metrics["guard/skips"] = self.guard.state.skips
        metrics["guard/rollbacks"] = self.guard.state.rollbacks
        return batch

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        if self.compares_engines:
            self.carry_out(self.guard.judge_late(metrics))
            self._require_signals(metrics)
        now = self.global_steps
        if (now, now) in self.guard.state.unproven:  # saved in this step, before what was judged just now
            self._save_state()

    def carry_out(self, decision: Decision) -> None:
        """Write down what was decided, and note what is to be done later in the step."""
        for event in decision.events:
            self._tell(event)
        state = self.guard.state
        state.rollback_due = state.rollback_due or decision.reason("rollback")
        self.stop_reason = self.stop_reason or decision.reason("stop")

    def _tell(self, event: Event) -> None:
        if self.events is not None:
            self.events.write(event)
        what = "update skipped" if event.action == "skip" else event.action
        print(f"verl_ext: step {event.step}: {what}: {event.reason}", flush=True)

    def _require_signals(self, metrics: Mapping[str, float]) -> None:
        """A rule whose signal never comes would be a silent no-op."""
        self.updated_steps += "actor/grad_norm" in metrics
        if self.updated_steps < UNREAD_AFTER or not self.guard.unread:
            return
        for rule in self.guard.rules:
            if rule.name in self.guard.unread and not is_rare(rule.signal):
                near = difflib.get_close_matches(rule.signal, metrics, n=3) or sorted(metrics)[:3]
                raise HookError(
                    f"{rule.setting.rpartition('.')[0]}.signal={rule.signal} was not logged in {self.updated_steps} "
                    f"steps, so the rule cannot act; near it are: {', '.join(near)}"
                )

    def _roll_back(self) -> None:
        """Load the last good checkpoint's weights and optimizer; verl synchronises the rollout's after the step."""
        root = os.path.abspath(self.config.trainer.default_local_dir)
        folder = checkpoints.newest_of(root, self.guard.state.good)
        if folder is None:
            self.stop_reason = f"{self.guard.state.rollback_due}, and there is no checkpoint to go back to"
            self._tell(Event(self.global_steps, "rollback", "", None, None, "stop", self.stop_reason))
            return
        self.actor_rollout_wg.load_checkpoint(local_path=str(folder / "actor"), del_local_after_load=False)
        if self.use_critic:
            self.critic_wg.load_checkpoint(local_path=str(folder / str(Role.Critic)), del_local_after_load=False)
        to = int(folder.name.removeprefix("global_step_"))
        checkpoints.give_up(root, after=to)
        self._tell(self.guard.rolled_back(to))

    def _stop_if_asked(self) -> None:
        if self.stop_reason:
            raise GuardStopError(f"the guard stopped the run: {self.stop_reason}; {self._good_checkpoint()}")

    def _good_checkpoint(self) -> str:
        root = self.config.trainer.default_local_dir
        good = checkpoints.newest_of(root, self.guard.state.good)
        return f"the last good checkpoint is {good}" if good else f"no checkpoint in {root} was found good"

    def _save_checkpoint(self) -> None:
        self.guard.saved(self.global_steps)
        folder = self._save_state()
        checkpoints.forget(folder)  # what was known of an older checkpoint of this step
        super()._save_checkpoint()  # type: ignore[misc]
        if not self.config.actor_rollout_ref.actor.get("checkpoint", {}).get("async_save", False):
            checkpoints.save_sizes(folder)

    def _save_state(self) -> Path:
        folder = checkpoints.folder_of(self.config.trainer.default_local_dir, self.global_steps)
        checkpoints.save_state(folder, self.guard.state_dict())
        return folder

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        if trainer.resume_mode == "auto":
            folder = checkpoints.newest_whole(trainer.default_local_dir)
            if folder is not None:
                self._load_from(folder)
                return
        elif trainer.resume_mode == "resume_path" and trainer.resume_from_path:
            if wrong := checkpoints.damage(Path(trainer.resume_from_path)):
                raise checkpoints.CheckpointError(
                    f"trainer.resume_from_path={trainer.resume_from_path} is damaged: {wrong}; name another one"
                )
            self._load_from(Path(trainer.resume_from_path))
            return
        super()._load_checkpoint()  # type: ignore[misc]

    def _load_from(self, folder: Path) -> None:
        state = checkpoints.load_state(folder)
        trainer = self.config.trainer
        asked = trainer.resume_mode, trainer.get("resume_from_path")
        with open_dict(trainer):
            trainer.resume_mode, trainer.resume_from_path = "resume_path", str(folder)
            super()._load_checkpoint()  # type: ignore[misc]
            trainer.resume_mode, trainer.resume_from_path = asked
        if state is not None:
            self.guard.load_state_dict(state)
            print(f"verl_ext: guard state of step {self.global_steps}: {json.dumps(self._brief())}", flush=True)

    def _brief(self) -> dict[str, Any]:
        state = self.guard.state
        firing = [name for name, rule in state.rules.items() if rule.firing]
        return {"skips": state.skips, "rollbacks": state.rollbacks, "firing": firing}
