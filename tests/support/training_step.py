"""A training step of our trainers, on our own trainer and store instead of verl's."""

from typing import ClassVar

import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from recipes.make_assets import build_tokenizer
from tests.support.store import Store, compute_advantage, nested
from verl_ext.core.routing import RouterSums
from verl_ext.trainer import trainers

COLUMNS = {"raw_prompt": "of the dataset", "uid": "too"}
IMAGES = {"multi_modal_inputs": "no tensor, and read"}
READ = ["old_log_probs", *IMAGES]


class VerlTrainer:
    """Records which of verl's own steps ran, and the fields that were sent along."""

    by_workers: ClassVar[dict[str, float]] = {}  # metrics of the update

    def __init__(self, config):
        self.config = config
        self.global_steps, self.local_trigger_step = 7, 0
        self.ran = []
        self.tokenizer = build_tokenizer()

    def _compute_old_log_prob(self, batch, metrics):
        self.scored = list(batch.fields)
        return batch

    def _compute_advantage(self, batch, metrics):
        self.ran.append(("advantage", None))
        compute_advantage(batch, self.advantages)
        return batch

    def _update_actor(self, batch, metrics):
        self.ran.append(("actor", list(batch.fields)))
        self.extra_info = batch.extra_info
        metrics.update(self.by_workers)
        return batch

    def _update_critic(self, batch, metrics):
        self.ran.append(("critic", list(batch.fields)))
        return batch


class Trainer(trainers.StabilityMixin, VerlTrainer):
    pass


def one_step(
    monkeypatch,
    stability,
    loss_mode="vanilla",
    loss_agg_mode="token-mean",
    actor=None,
    rollout=None,
    bypass=False,
    tags=None,
    **fields,
):
    """(trainer, metrics, store) after one step on two responses; `fields` replace the batch's, None leaves one out."""
    defaults = {
        "rollout_log_probs": nested([-1.0, -2.0], [-3.0]),
        "old_log_probs": nested([-1.5, -2.0], [-0.5]),
        "response_mask": nested([1, 1], [1]),
        "entropy": nested([1.0, 2.0], [3.0]),
        "responses": nested([7, 1], [8]),  # 1 is the end token
        "advantages": nested([1.0, 1.0], [-1.0]),
        "rm_scores": nested([0.0, 1.0], [0.0]),
    }
    given = defaults | COLUMNS | IMAGES | fields
    store = Store(**{name: value for name, value in given.items() if value is not None}).install(monkeypatch)
    actor = {"policy_loss": {"loss_mode": loss_mode}, "loss_agg_mode": loss_agg_mode} | (actor or {})
    rollout = {"response_length": 1, "n": 1} | (rollout or {})
    parts = {"actor": actor, "rollout": rollout, "model": {"path": "/no/such/model"}}
    saved = {"default_local_dir": "/no/such/folder"}
    saved |= {"v1": {"trainer_mode": "colocate_async"}} if tags else {}
    algorithm = {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": bypass}}
    config = OmegaConf.create(
        {"stability": stability, "actor_rollout_ref": parts, "trainer": saved, "algorithm": algorithm}
    )
    trainer, metrics = Trainer(config), {}
    trainer.advantages = store.fields["advantages"]
    trainer.stability_run.guard.begin(trainer.global_steps)
    fields = [*READ, "routed_experts", "old_routed_experts", "router_sums", *COLUMNS]
    batch = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=tags or [{}, {}], partition_id="train", fields=fields)
    batch = trainer._compute_old_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    batch = trainer._update_critic(batch, metrics)
    trainer.batch = trainer._update_actor(batch, metrics)
    return trainer, metrics, store


def ran(trainer):
    return [name for name, _ in trainer.ran]


def rows(store, field):
    return [row.tolist() for row in store.fields[field].unbind()]


def router_sums(*differing):
    """Returns the sums of one trajectory per row, two layers. Of its two tokens, `differing` differ in one of two
    experts of layer 1."""
    sums, differ = RouterSums.zeros(len(differing), 2), torch.tensor(differing, dtype=torch.float64)
    sums.tokens[:], sums.first[:, 1] = 2, differ
    for by_layer, share in ((sums.agree, 0.5), (sums.own, 0.5), (sums.exact, 1.0)):
        by_layer[:, 0], by_layer[:, 1] = 2, 2 - share * differ
    return nested(*sums.pack().tolist())


OLD = [{"min_global_steps": 6, "max_global_steps": 6}, {"min_global_steps": 4, "max_global_steps": 4}]  # in step 7
