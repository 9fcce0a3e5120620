"""Records the guard's decisions and carries them out in verl's training loop.

A skip replaces the update. An undo or a rollback happens at the end of the step, before verl saves a checkpoint and
synchronises the weights. A stop happens before the next step, when the metrics of this one are written.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson

from verl_ext.base.errors import GuardStopError, HookError
from verl_ext.base.metrics import is_rare
from verl_ext.diagnosis.judge import RunningDiagnosis
from verl_ext.features.settings import StabilityConfig
from verl_ext.guard.guard import LR_SCALE, Guard
from verl_ext.guard.levels import level_rules
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer import checkpoints
from verl_ext.trainer.logs import LineFile

UNREAD_AFTER = 3  # steps with an update after which every rule must have had its signal


def build_guard(stability: StabilityConfig) -> Guard:
    settings = stability.guard
    return Guard(
        (*stability.rules, *level_rules(settings.level)),
        stop_after=settings.stop_after,
        max_rollbacks=settings.max_rollbacks,
        cooldown=settings.rollback_cooldown,
        lower_lr=settings.lower_lr,
        boundary=settings.boundary,
        mask="correction/dropped" if stability.bands else "",
    )


class GuardActions:
    """Carries out the decisions of a run's guard.

    Args:
        root: the folder of the run's checkpoints, trainer.default_local_dir.

    Attributes:
        stop: the event that ends the run before its next step, if there is one.
        diagnosis: the diagnosis of the run, over restarts.
    """

    def __init__(self, guard: Guard, root: str):
        self._events: LineFile | None = None
        self._early: list[Event] = []  # without a file yet, such as those of the first weight sync
        self.stop: Event | None = None
        self.diagnosis = RunningDiagnosis()
        self._guard, self._root = guard, root
        self._updated_steps = 0

    @property
    def due(self) -> str | None:
        """The reason why no batch may update the weights until the step ends, when they are given up or the run
        stops."""
        state = self._guard.state
        return state.rollback_due or state.undo_due or (self.stop.reason if self.stop else None)

    def record_decision(self, decision: Decision) -> None:
        """Records a decision, and notes what to do later in the step."""
        for event in decision.events:
            self._tell(event)
        state = self._guard.state
        if rollback := decision.first("rollback"):
            state.rollback_due = state.rollback_due or rollback.reason
        if undo := decision.first("undo"):
            state.undo_due = state.undo_due or undo.reason
        self.stop = self.stop or decision.first("stop")

    def end_step(self, metrics: dict[str, float], groups: Mapping[str, Any]) -> None:
        """Judges the metrics of the updates, and gives the weights up if that is due.

        Args:
            metrics: the step's metrics, averaged by verl over the step's local updates.
            groups: folder in a checkpoint -> the workers whose weights and optimizer it holds; an undo covers only
                `actor`.
        """
        self.record_decision(self._guard.judge_late(metrics))
        self.record_decision(self._guard.close())
        state = self._guard.state
        if state.rollback_due and self.stop is None:
            self._roll_back(groups)
        elif state.undo_due and self.stop is None:
            self._take_back(groups["actor"])
        metrics["guard/skips"] = state.skips  # here, because a running count must not be averaged
        metrics["guard/rollbacks"] = state.rollbacks
        actions = {rule.action for rule in self._guard.rules}
        if "undo" in actions:
            metrics["guard/undos"] = state.undos
        if "lower_lr" in actions:
            metrics[LR_SCALE] = self._guard.lr_scale

    def judge_logged(self, metrics: Mapping[str, float]) -> None:
        """Judges the metrics that verl logs last, after it has saved a checkpoint."""
        self.record_decision(self._guard.judge_late(metrics))
        if (named := self.diagnosis.add(self._guard.step, metrics)) is not None:
            self._tell(Event(self._guard.step, "diagnosis", "", None, None, "warn", named.sentence))
        self._require_signals(metrics)

    def log_to(self, events: LineFile) -> None:
        """Writes the decisions so far, and each one from now on, to this file: one JSON line each."""
        self._events = events
        for event in self._early:
            self._log(event)

    def stop_if_asked(self) -> None:
        if self.stop is not None:
            found = self.diagnosis.look()
            cause = f" Likely cause: {found.cause.title}; {found.advice}." if found is not None else ""
            raise GuardStopError(f"the guard stopped the run: {self.stop.reason}; {self._good_checkpoint()}.{cause}")

    def end_run(self) -> None:
        """Prints the likeliest cause, and a rollback that is still due. Raises GuardStopError if a stop is due."""
        self.stop_if_asked()
        if (found := self.diagnosis.look()) is not None:
            print(f"verl_ext: {found.sentence}", flush=True)
        if due := self._guard.state.rollback_due:
            print(f"verl_ext: the run ended with a rollback due: {due}; {self._good_checkpoint()}", flush=True)

    def _tell(self, event: Event) -> None:
        self._log(event)
        what = "update skipped" if event.action == "skip" else event.action
        print(f"verl_ext: step {event.step}: {what}: {event.reason}", flush=True)

    def _log(self, event: Event) -> None:
        if self._events is None:
            self._early.append(event)
        else:
            self._events.write(orjson.dumps(asdict(event)) + b"\n")

    def _require_signals(self, metrics: Mapping[str, float]) -> None:
        """Raises HookError if the signal of a rule never comes: the rule would silently do nothing."""
        self._updated_steps += "actor/grad_norm" in metrics
        if self._updated_steps < UNREAD_AFTER or not self._guard.unread:
            return
        for rule in self._guard.rules:
            if rule.name in self._guard.unread and not is_rare(rule.signal):
                near = difflib.get_close_matches(rule.signal, metrics, n=3) or sorted(metrics)[:3]
                raise HookError(
                    f"{rule.setting.rpartition('.')[0]}.signal={rule.signal} was not logged in {self._updated_steps} "
                    f"steps, so the rule cannot act; similar names: {', '.join(near)}"
                )

    def _roll_back(self, groups: Mapping[str, Any]) -> None:
        """Loads the last good checkpoint's weights and optimizer; verl synchronises the rollout's after the step."""
        state = self._guard.state
        root = os.path.abspath(self._root)
        folder = checkpoints.newest_of(root, state.good)
        if folder is None:
            reason = f"{state.rollback_due}, and there is no checkpoint to go back to"
            self.record_decision(Decision((Event(self._guard.step, "rollback", "", None, None, "stop", reason),)))
            return
        for name, workers in groups.items():
            workers.load_checkpoint(local_path=str(folder / name), del_local_after_load=False)
        to = checkpoints.step_of(folder)
        restored = self._guard.rolled_back(to)
        checkpoints.go_back(folder, self._guard.restart_state(to))
        self._tell(restored)

    def _take_back(self, workers: Any) -> None:
        """Undoes the last update, from the state that the workers kept. If the rollout has that update already, the
        sync after the step replaces it."""
        (of,) = set(workers.take_back(after=self._guard.state.given_up))
        if of is not None:
            checkpoints.give_up(os.path.abspath(self._root), after=of - 1)
        self._tell(self._guard.undone(of))

    def _good_checkpoint(self) -> str:
        good = checkpoints.newest_of(self._root, self._guard.state.good)
        return f"the last good checkpoint is {good}" if good else f"no good checkpoint was found in {self._root}"
