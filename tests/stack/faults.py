"""A run that meets a fault at a step of its own, so that many share one start of Ray, vLLM and the workers.

    python -m tests.stack.faults SCENARIO <overrides of the run>

SCENARIOS names what happens at which step. A fault is put where it would come from: into the batch in TransferQueue, in
the place of a weight sync, or into the settings of one step.
"""

import sys

SCENARIOS = {
    "every action": {
        3: "nan log-probs",
        5: "missed sync",  # after the update of step 5; step 6 sees it
        7: "nan advantages",
        4: "narrow band",
        8: "filters drop everything",
        9: "reward -5",
        11: "reward 100",
    },
    "short log-probs": {2: "short log-probs"},
    "frozen rollout": dict.fromkeys(range(9, 1000), "missed sync"),
}


def faulty(trainer_class: type, faults: dict[int, str]) -> type:
    """`trainer_class` with the fault of each step."""
    from dataclasses import replace

    import torch
    import transfer_queue as tq

    from verl_ext.core.corrections import CORRECTIONS
    from verl_ext.core.filtering import BATCH_FILTERS
    from verl_ext.methods import choose
    from verl_ext.settings.guard import GuardSettings
    from verl_ext.trainer.batch import nested
    from verl_ext.trainer.trainers import _put

    def change(batch, field, edit):
        """Put an edited copy of a field's values."""
        values = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field])[field]
        return _put(batch, {field: edit(values)})

    def filled(value):
        return lambda values: nested(torch.full_like(values.values(), value), values.offsets())

    def first_nan(values):
        changed = values.values().clone()
        changed[0] = float("nan")
        return nested(changed, values.offsets())

    def without_last(values):
        return torch.nested.as_nested_tensor([row[:-1] for row in values.unbind()], layout=torch.jagged)

    def score(total):
        def edit(values):
            changed = torch.zeros_like(values.values())
            changed[values.offsets()[1:] - 1] = total
            return nested(changed, values.offsets())

        return edit

    class FaultyTrainer(trainer_class):
        def _compute_advantage(self, batch, metrics):
            settings = self.stability
            match faults.get(self.global_steps, "").split():
                case ["nan", "log-probs"]:
                    change(batch, "rollout_log_probs", first_nan)
                case ["short", "log-probs"]:
                    change(batch, "rollout_log_probs", without_last)
                case ["reward", value]:
                    change(batch, "rm_scores", score(float(value)))
                case ["narrow", "band"]:
                    self.stability = replace(
                        settings,
                        correction=(choose(CORRECTIONS["icepop"], {"alpha": 3, "beta": 4}, "stability.icepop"),),
                        guard=GuardSettings(),
                        rules=(),
                    )
                case ["filters", *_]:
                    self.stability = replace(
                        settings, filters=(choose(BATCH_FILTERS["low_probability"], {"threshold": 1.0}, "stability"),)
                    )
            try:
                batch = super()._compute_advantage(batch, metrics)
            finally:
                self.stability = settings
            if faults.get(self.global_steps) == "nan advantages":
                batch = change(batch, "advantages", filled(float("nan")))
            return batch

        def on_step_end(self):
            if faults.get(self.global_steps) == "missed sync":
                manager, self.checkpoint_manager = self.checkpoint_manager, WithoutSync(self.checkpoint_manager)
                try:
                    super().on_step_end()
                finally:
                    self.checkpoint_manager = manager
            else:
                super().on_step_end()

    return FaultyTrainer


class WithoutSync:
    """A checkpoint manager that sends the rollout no weights."""

    def __init__(self, manager):
        self.manager = manager

    def update_weights(self, global_steps=None):
        return {}

    def __getattr__(self, name):
        return getattr(self.manager, name)


if __name__ == "__main__":
    from tests.stack import own_trainer

    faults = SCENARIOS[sys.argv.pop(1)]
    own_trainer.main(lambda trainer_class: faulty(trainer_class, faults))
