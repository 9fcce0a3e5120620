"""A training run whose weights count its updates: our trainer's hooks around a trainer that calls them in the order of
verl's `PPOTrainer.fit`, and saves files in verl's order."""

from itertools import count
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.utils import tracking

from tests.support.store import Store, compute_advantage, nested
from tests.support.training_step import router_sums
from verl_ext.core.expert_load import ExpertLoad
from verl_ext.trainer import checkpoints, trainers

SAVES = count()  # numbers every checkpoint that is written, so that none is like another


class Workers:
    """Weights that count the updates, saved to and loaded from a file."""

    def __init__(self):
        self.weights, self.kept, self.rates = 0, None, []
        self.load = ExpertLoad(2, 8)

    def update(self, step, lr_scale, has_l_old):
        if self.kept is None or self.kept[0] != step:
            self.kept = (step, self.weights)
        self.weights += 1
        self.rates.append(lr_scale)

    def take_back(self, after):
        """Takes the update back on two ranks."""
        if (kept := self.kept) is None or kept[0] <= after:
            return [None, None]
        self.kept, self.weights = None, kept[1]
        return [kept[0]] * 2

    def take_expert_load(self):
        """Two ranks, of which one compares routing; each update moves some choices."""
        ids = torch.arange(6).clamp(min=self.weights % 5).view(1, 2, 3)
        self.load.add(ids, ids)
        return [{}, self.load.take()]

    def first_expert_load(self, counts):
        return [[], self.load.first(counts)]

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        content = f"{self.weights:08d} {next(SAVES):08d}"
        for file in (folder / "model.pt", folder / "optimizer.pt"):
            file.write_text(content)

    def load_checkpoint(self, local_path, del_local_after_load):
        assert not del_local_after_load
        weights, optimizer = (Path(local_path, file).read_text() for file in ("model.pt", "optimizer.pt"))
        assert weights == optimizer, "a mixture of two checkpoints"
        self.weights = int(weights.split()[0])


class VerlTrainer:
    def __init__(self, config):
        self.config, self.use_critic, self.tokenizer = config, False, None
        self.actor_rollout_wg = Workers()
        self.synchronised = []
        self._load_checkpoint()

    def fit(self, series):
        self.logger = tracking.Tracking(self.config.trainer.project_name, self.config.trainer.experiment_name, "file")
        for values in series:
            self.global_steps += 1
            self.values, metrics = values, {}
            self.on_step_begin()
            self.step(metrics, {})
            if self.config.trainer.save_freq > 0 and self.global_steps % self.config.trainer.save_freq == 0:
                self._save_checkpoint()
            self.synchronised.append(self.actor_rollout_wg.weights)
            self._compute_metrics(None, metrics, {}, global_steps=self.global_steps, epoch=0)
            self.logger.log(metrics, self.global_steps)
        self.logger.finish()

    def on_step_begin(self):
        pass

    def step(self, metrics, timing_raw):
        batch = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=[{}, {}], partition_id="train", fields=["old_log_probs"])
        metrics["actor/entropy"] = 1.0
        self._compute_advantage(batch, metrics)
        return self._update_actor(batch, metrics)

    def _compute_advantage(self, batch, metrics):
        compute_advantage(batch, nested([1.0, 1.0], [-1.0]))
        return batch

    def _update_actor(self, batch, metrics):
        self.actor_rollout_wg.update(**batch.extra_info["guarded_update"])
        metrics["actor/grad_norm"] = self.values.get("grad_norm", 1.0)
        return batch

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        metrics["response_length/mean"] = self.values.get("length", 5.0)

    def _save_checkpoint(self):
        root = checkpoints.folder_of(self.config.trainer.default_local_dir, self.global_steps)
        self.actor_rollout_wg.save(root / "actor")
        (root.parent / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))

    def _load_checkpoint(self):
        self.global_steps = self.local_trigger_step = 0
        if self.config.trainer.resume_mode == "resume_path":
            folder = self.config.trainer.resume_from_path
            self.global_steps = int(folder.split("global_step_")[-1])
            self.actor_rollout_wg.load_checkpoint(f"{folder}/actor", False)


class Trainer(trainers.StabilityMixin, VerlTrainer):
    pass


def training_in(folder, monkeypatch):
    """Returns train(stability, series, **trainer) -> the trainer after a run over `series` in this folder.

    An entry of `series` is a step: its reward, `k` (l_old - l_infer), gradient norm and response length.
    """
    monkeypatch.chdir(folder)
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT", raising=False)
    monkeypatch.setattr(tracking, "FileLogger", tracking.FileLogger)  # back to verl's afterwards
    trainers_made = []

    class Now(Store):
        def kv_batch_get(self, keys, partition_id, select_fields):
            values = trainers_made[-1].values
            k, reward = values.get("k", 0.001), values.get("reward", 1.0)
            self.fields |= {
                "rollout_log_probs": nested([-1.0, -2.0], [-3.0]),
                "old_log_probs": nested([-1.0 + k, -2.0 + k], [-3.0 + k]),
                "response_mask": nested([1, 1], [1]),
                "rm_scores": nested([0.0, reward], [reward]),
                "router_sums": router_sums(0, 0),
                "router_agreement": nested([1.0, 1.0], [1.0]),
            }
            return super().kv_batch_get(keys, partition_id, select_fields)

    Now().install(monkeypatch)

    def run(stability, series, **trainer):
        defaults = {
            "default_local_dir": "checkpoints",
            "resume_mode": "auto",
            "resume_from_path": None,
            "save_freq": 1,
            "project_name": "p",
            "experiment_name": "e",
        }
        parts = {"actor": {"policy_loss": {"loss_mode": "vanilla"}}}
        config = OmegaConf.create(
            {
                "stability": stability,
                "actor_rollout_ref": parts,
                "trainer": defaults | trainer,
                "data": {},
                "algorithm": {"adv_estimator": "grpo"},
            }
        )
        made = Trainer(config)
        trainers_made.append(made)
        made.fit(series)
        return made

    return run
