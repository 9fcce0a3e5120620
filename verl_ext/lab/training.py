"""GRPO on a task of the lab: verl's step, with the same functions, in one process.

The lab's engines sample, score and update. The code that measures, judges, weighs and filters, and the loss, are those
of `verl_ext.trainer.run` and `verl_ext.workers.actor`: `Step`, `worker_loss`, in bypass mode `FirstPass`, the guard and
its actions.

Shape legend: B trajectories, T columns of padded responses, N response tokens of all of them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from verl_ext.base import names
from verl_ext.core.advantages import reward_metrics
from verl_ext.core.arrival import new_prefixes, prompt_numbers, spread_rows
from verl_ext.core.expert_load import ExpertLoad
from verl_ext.core.losses import name_clipped
from verl_ext.core.routing import router_metrics
from verl_ext.core.tokens import Lag
from verl_ext.features.advantages import session_keys
from verl_ext.features.feature import Need, RunFeatures
from verl_ext.features.verl_config import bypasses
from verl_ext.lab.engine import score
from verl_ext.lab.learner import LabBatch, Learner, compare_routing
from verl_ext.lab.model import rollout_log_probs, sample_responses
from verl_ext.lab.regimes import History, Regimes
from verl_ext.lab.tasks import draw, rewards
from verl_ext.lab.warm_up import LabSettings
from verl_ext.trainer import checkpoints
from verl_ext.trainer.guard_actions import GuardActions, build_guard
from verl_ext.trainer.step import Step, update_request
from verl_ext.trainer.sync_canary import SyncCanary

MOST_TOP_TOKENS = 128  # more than the tasks' vocabulary


@dataclass(frozen=True)
class Setup:
    """The settings of a lab run.

    Attributes:
        features: what verl's config, composed and checked, switches on.
        lab, regimes: its parsed `lab` node.
        seed: the seed of prompts and samples.
    """

    features: RunFeatures
    lab: LabSettings
    regimes: Regimes
    seed: int

    @property
    def config(self) -> DictConfig:
        return self.features.config


class Training:
    """One run of the lab.

    Args:
        weights: the weights that RL begins with.

    Attributes:
        actions: the guard's actions; `log_to` of theirs logs them.
    """

    def __init__(self, setup: Setup, weights: Mapping[str, Tensor]):
        self.setup, self.features = setup, setup.features
        self.history = History(setup.regimes.keeps)
        self.history.add(weights)
        knows_kept = setup.regimes.engine(self.history).reports_kept
        self.learner = Learner(setup.features, setup.lab.model, weights, knows_kept)
        self.policy = self.learner.engine
        self.load = ExpertLoad(setup.lab.model.layers, setup.lab.model.experts)
        self.guard = build_guard(setup.features.stability)
        self.actions = GuardActions(self.guard, setup.config.trainer.default_local_dir)
        self.canary = SyncCanary(setup.features.stability.sync_canary.every)
        self._watched: tuple[Tensor, Tensor, Tensor] | None = None  # prompts, responses, and which of these tokens
        self._prompts = torch.Generator().manual_seed(2 * setup.seed)
        self._samples = torch.Generator().manual_seed(2 * setup.seed + 1)

    def step(self, number: int) -> dict[str, float]:
        """Samples, scores, judges and updates; returns the step's metrics, under verl's names and ours."""
        start = time.perf_counter()
        self.actions.stop_if_asked()
        self.guard.begin(number)
        batch = self.rollout(number)
        self._watch(number, batch)
        metrics: dict[str, float] = {
            **summary("critic/score", batch.rewards),
            **summary("response_length", lengths := batch.sampled.mask.sum(1).float()),
            "response_length/clip_ratio": (lengths == lengths.max()).float().mean().item(),
            **reward_metrics(batch.rewards, batch.keys),
        }
        if batch.lag is not None:
            metrics["training/off_policy/trajectory_staleness/mean"] = batch.lag.newest.float().mean().item()
        batch.scored = self.learner.score_old(batch)
        metrics["actor/entropy"] = batch.packed(batch.scored.entropy).mean().item()
        agreement_N = None
        if Need.COMPARED_ROUTERS in self.features.needs:
            agreement_N, sums = compare_routing(batch, self.load)
            metrics |= router_metrics(sums)
        metrics |= self.learner.top_token_metrics(batch)
        batch.begin_step(agreement_N, bypass=bypasses(self.setup.config))
        step = Step(self.features, self.guard, self.actions)
        step.measure(batch, metrics)
        advantages = batch.fields[names.ADVANTAGES] = self.advantages(batch, refused=step.outcome.refused is not None)
        metrics |= summary("critic/advantages", batch.packed(advantages))
        outcome = step.settle(batch, metrics)
        if outcome.refused is None:
            if self.setup.config.actor_rollout_ref.actor.use_kl_loss:
                batch.fields[names.REF_LOG_PROBS] = self.learner.score_reference(batch)
            has_l_old = not bypasses(self.setup.config)
            asked = update_request(self.features, self.guard, outcome, has_l_old)
            metrics |= self.learner.update(batch, asked)
            name_clipped(metrics)
        step.judge_first_pass(metrics)
        metrics["actor/lr"] = self.policy.lr
        self.policy.lr_scheduler_step()  # once per step, as verl does
        metrics |= self.load.take()
        self.actions.end_step(metrics, {"actor": self.learner})
        self._save(number)
        self.setup.regimes.train(self.policy.weights, self.setup.lab.model)
        self.history.add(self.policy.weights)
        metrics |= self._look_at_sync(number)
        metrics["timing_s/step"] = time.perf_counter() - start
        self.actions.judge_logged(metrics)
        return metrics

    def rollout(self, number: int) -> LabBatch:
        """Samples the answers to a step's prompts, and grades them."""
        config = self.setup.config
        count, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
        prompts = draw(self.setup.lab.task, count, self._prompts)[0].repeat_interleave(n, 0)
        engine = self.setup.regimes.engine(self.history)
        length = config.data.max_response_length
        top_tokens = (self.features.stability.top_tokens.k or MOST_TOP_TOKENS) if self.policy.use is not None else 0
        sampled = sample_responses(engine, self.setup.lab.model, prompts, length, self._samples, top_tokens)
        keys = [f"{number}-{row // n}_{row % n}_0" for row in range(len(prompts))]
        lag = None
        if engine.lag is not None:
            newest, oldest = (torch.full((len(keys),), ago) for ago in engine.lag)
            lag = Lag(newest, oldest, sampled.mask[:, length - length // len(engine.parts) :].sum(1))
        right = rewards(self.setup.lab.task, prompts, sampled.responses)
        graded = self.setup.lab.grader.grade(right, sampled.mask.sum(1) / length, self._samples)
        return LabBatch(prompts, sampled, graded, keys, lag)

    def advantages(self, batch: LabBatch, *, refused: bool) -> Tensor:
        """Returns advantages [B, T] from the estimator that is registered in verl as algorithm.adv_estimator."""
        algorithm = self.setup.config.algorithm
        grpo = {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo}
        with session_keys(batch.keys, refused=refused):
            advantages, _ = get_adv_estimator_fn(algorithm.adv_estimator)(
                token_level_rewards=batch.token_rewards(),
                response_mask=batch.sampled.mask.float(),
                index=np.array([key.split("_")[0] for key in batch.keys], dtype=object),
                config=algorithm,
                **(grpo if algorithm.adv_estimator == "grpo" else {}),
            )
        return advantages

    def _watch(self, number: int, batch: LabBatch) -> None:
        """Keeps trajectories of the first batch for the sync canary, if it is on: those that a run on verl would keep
        (`CanaryTrajectories`)."""
        count = self.features.stability.sync_canary.trajectories
        if not count or self._watched is not None:
            return
        prompt_B = torch.tensor(prompt_numbers(batch.keys))
        rows = spread_rows(prompt_B.tolist(), count)
        prompts, responses = batch.prompts[rows], batch.sampled.responses[rows]
        new = torch.tensor(new_prefixes(torch.cat([prompts, responses], 1).tolist()))[:, prompts.shape[1] :]
        mask = batch.sampled.mask[rows] & new
        self._watched = prompts, responses, mask
        self.canary.begin(number - 1, *self._canary_scores(), prompt_B[rows, None].expand_as(mask)[mask])

    def _look_at_sync(self, number: int) -> dict[str, float]:
        if self._watched is None or not self.canary.is_due(number):
            return {}
        metrics, decision = self.canary.check(number, *self._canary_scores())
        self.actions.record_decision(decision)
        return metrics

    def _canary_scores(self) -> tuple[Tensor, list[Tensor]]:
        """Returns both engines' log-probabilities of the canary's tokens, with their current weights.

        The rollout scores at temperature 1 and without truncation, because that is how a server scores given tokens.
        """
        assert self._watched is not None
        prompts, responses, mask = self._watched
        model, engine = self.setup.lab.model, self.setup.regimes.engine(self.history)
        engine = replace(engine, temperature=1.0, top_k=0, top_p=1.0, reported=None)
        with torch.no_grad():
            train = score(self.policy.weights, model, prompts, responses).log_probs
        return train[mask], [rollout_log_probs(engine, model, prompts, responses)[mask]]

    def _save(self, number: int) -> None:
        every = self.setup.config.trainer.save_freq
        if every > 0 and number % every == 0:
            with checkpoints.saving(self.guard, self.actions.diagnosis, self.setup.config, number):
                folder = checkpoints.folder_of(self.setup.config.trainer.default_local_dir, number)
                self.policy.save_checkpoint(folder / "actor")


def summary(name: str, values: Tensor) -> dict[str, float]:
    """Returns `name`/mean, max and min, as verl logs them."""
    return {f"{name}/{kind}": getattr(values, kind)().item() for kind in ("mean", "max", "min")}
