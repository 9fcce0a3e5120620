"""A run with another fault at each of some steps, so that many faults share one start of Ray, vLLM and the workers.

    python -m tests.stack.faults SCENARIO <overrides of the run>

SCENARIOS lists the faults by step. A fault is planted where it would occur in practice: in the batch in TransferQueue,
instead of a weight sync, or in the settings of one step.
"""

import math
import sys
import time

THROUGHOUT = 0  # in the place of a step: all of them, a resumed run's too
WARMER = "temperature 1.2"  # of the training engine alone: the rollout has its own copy of the settings
EVERY_ACTION = {
    2: "clock set back",
    3: "nan log-probs",
    5: "missed sync",  # after the update of step 5; step 6 sees it
    7: "nan advantages",
    4: "narrow band",
    8: "filters drop everything",
    9: "reward -5",
    10: "wrong experts",
    11: "reward 45",
    12: "huge advantages",
    13: "reward 100",
}
DECIDED = [  # in that scenario, with all RULES: (step, rule, action)
    (2, "norm", "warn"),
    (3, "non_finite", "skip"),
    (4, "correction", "skip"),
    (5, "weight_sync", "warn"),  # by the sync canary, then by the jump that step 6 sees
    (6, "weight_sync", "warn"),
    (6, "gap", "tighten"),
    (6, "rate", "lower_lr"),
    (6, "weight_sync", "recover"),
    (7, "gap", "recover"),
    (7, "rate", "recover"),
    (7, "non_finite", "warn"),
    (7, "non_finite", "undo"),  # of the gradient's norm, which a rule undoes by
    (7, "undo", "restored"),
    (8, "filters", "skip"),
    (9, "reward", "rollback"),
    (9, "lower_lr", "recover"),
    (9, "rollback", "restored"),
    (10, "routing", "warn"),
    (11, "purse", "undo"),
    (11, "undo", "restored"),
    (12, "burst", "undo"),
    (12, "undo", "restored"),
    (13, "purse", "undo"),
    (13, "cheat", "stop"),
]
RESTORED = {
    3: "nan advantages",
    4: "reward -5",
    5: "wrong experts",
    6: "reward 45",
    7: "huge advantages",
    8: "reward 100",
}
DECIDED_RESTORED = [  # in that scenario, with the rules of RESTORING
    (3, "non_finite", "warn"),
    (3, "non_finite", "undo"),
    (3, "undo", "restored"),
    (4, "reward", "rollback"),
    (4, "rollback", "restored"),
    (5, "routing", "warn"),
    (6, "purse", "undo"),
    (6, "undo", "restored"),
    (7, "burst", "undo"),
    (7, "undo", "restored"),
    (8, "purse", "undo"),
    (8, "cheat", "stop"),
]
SCENARIOS = {
    "every action": EVERY_ACTION,
    "restored": RESTORED,
    "lost adapter, then short log-probs": {1: "missed sync", 4: "short log-probs"},
    "doubled adapter": {1: "adapter doubled from here on"},
    "lost syncs": {4: "weights lost from here on"},
    "wrong tensors": {
        2: "expert dropped once",
        3: "experts swapped once",
        4: "router cast once",
        5: "norm late once",
        6: "layer repeated from here on",
    },
    "one server rounds": {1: "weights rounded from here on"},
    "shifted experts": {2: "shifted experts"},
    "shifted experts and an overflow": {2: "shifted experts", 3: "huge advantages"},
    "killed": {2: "nan log-probs", 4: "hang"},
    "resumed": {4: "nan log-probs", 6: "shifted recording"},
    "another temperature": {THROUGHOUT: WARMER},
    "wrong replay": dict.fromkeys((1, *range(4, 1000)), "shifted experts"),
}

RULES = {  # of the guard, which see the faults
    "gap": "{signal:vllm_kl/k3,above:1.0e-3,action:tighten}",
    "reward": "{signal:critic/score/mean,below:-1,action:rollback}",
    "purse": "{signal:critic/score/mean,above:40,action:undo}",
    "cheat": "{signal:critic/score/mean,above:50,action:stop}",
    "rate": "{signal:vllm_kl/k3,above:1.0e-3,action:lower_lr}",
    "burst": "{signal:actor/grad_norm,above:1.0e+6,action:undo}",
    "norm": "{signal:actor/grad_norm,above:1.0e-6,patience:2,action:warn}",
}
RESTORING = ("reward", "purse", "cheat", "burst")  # those that give an update back, and the one that stops
CANARY = "stability.sync_canary.trajectories=8"


def rules(*names: str) -> str:
    return f"stability.guard.rules={{{','.join(f'{name}:{RULES[name]}' for name in names)}}}"


def faulty(trainer_class: type, faults: dict[int, str]) -> type:
    """Returns a subclass of `trainer_class` that plants the fault of each step."""
    import torch
    from omegaconf import OmegaConf

    from verl_ext.core.tokens import jagged
    from verl_ext.features.stability import stability_config
    from verl_ext.features.table import read_features
    from verl_ext.trainer.queue import get_fields, put_fields

    def change(batch, field, edit):
        """Writes an edited copy of a field's values to the batch."""
        return put_fields(batch, {field: edit(get_fields(batch, [field])[field])})

    def filled(value):
        return lambda values: jagged(torch.full_like(values.values(), value), values.offsets())

    def first_nan(values):
        changed = values.values().clone()
        changed[0] = float("nan")
        return jagged(changed, values.offsets())

    def without_last(values):
        return torch.nested.as_nested_tensor([row[:-1] for row in values.unbind()], layout=torch.jagged)

    def score(total):
        def edit(values):
            changed = torch.zeros_like(values.values())
            changed[values.offsets()[1:] - 1] = total
            return jagged(changed, values.offsets())

        return edit

    def wrong(routes):
        """Returns no routes for the first trajectory's tokens, and one expert twice for the second's."""
        changed, (_, first, second, *_) = routes.values().clone(), routes.offsets()
        changed[:first] = 0
        changed[first:second, :, 1] = changed[first:second, :, 0]
        return jagged(changed, routes.offsets())

    def shifted(routes):
        """Every id one higher: experts that the rollout did not use."""
        experts = int(routes.values().max()) + 1
        return jagged((routes.values() + 1) % experts, routes.offsets())

    now = time.time

    class FaultyTrainer(trainer_class):
        def on_step_begin(self):
            match faults.get(THROUGHOUT, "").split():
                case ["temperature", value]:
                    self.config.actor_rollout_ref.rollout.temperature = float(value)
            if faults.get(self.global_steps) == "clock set back":
                time.time = lambda: now() - 3600  # of the controller, for good
            if faults.get(self.global_steps) == "hang":
                time.sleep(3600)
            super().on_step_begin()

        def _compute_old_log_prob(self, batch, metrics):
            edits = {"wrong experts": wrong, "shifted experts": shifted}
            if edit := edits.get(faults.get(self.global_steps)):
                change(batch, "routed_experts", edit)
                change(batch, "routed_experts_sum", torch.zeros_like)  # as if the engine had captured them
            return super()._compute_old_log_prob(batch, metrics)

        def _compute_advantage(self, batch, metrics):
            changed = {}
            match faults.get(self.global_steps, "").split():
                case ["nan", "log-probs"]:
                    change(batch, "rollout_log_probs", first_nan)
                case ["short", "log-probs"]:
                    change(batch, "rollout_log_probs", without_last)
                case ["reward", value]:
                    change(batch, "rm_scores", score(float(value)))
                case ["narrow", "band"]:
                    # Tightening refuses a band without 1 in it.
                    changed = {"icepop": {"alpha": 3, "beta": 4}, "guard": {"rules": {"gap": {"action": "warn"}}}}
                case ["filters", *_]:
                    changed = {"filters": {"low_probability": {"threshold": 1.0}}}
                case ["shifted", "recording"]:  # which R2 replays in the update
                    change(batch, "routed_experts", shifted)
            stability = stability_config(OmegaConf.merge(self.config.stability, changed))
            self.stability_run.features = read_features(self.config, stability)
            batch = super()._compute_advantage(batch, metrics)
            if (fault := faults.get(self.global_steps, "")).endswith(" advantages"):
                value = {"nan": float("nan"), "huge": 1e9}[fault.split()[0]]
                batch = change(batch, "advantages", filled(value))
            return batch

        def on_step_end(self):
            if faults.get(self.global_steps) == "missed sync":
                manager, self.checkpoint_manager = self.checkpoint_manager, WithoutSync(self.checkpoint_manager)
                try:
                    super().on_step_end()
                finally:
                    self.checkpoint_manager = manager
                return
            match faults.get(self.global_steps, "").split():
                case [what, how, *times] if times in (["once"], ["from", "here", "on"]):
                    self.actor_rollout_wg.change_syncs(what, how, 1 if times == ["once"] else math.inf)
            super().on_step_end()

    return FaultyTrainer


def changing_syncs(worker_class: type) -> type:
    """Returns a subclass of `worker_class` whose weight syncs can be made to send something else, without an error."""
    import torch
    from verl.single_controller.base.decorator import Dispatch, register

    from verl_ext.core.fake_quant import fake_quantized
    from verl_ext.upstream.fake_quantization import LINEAR, kind_of

    class ChangingWorker(worker_class):
        repeats = False  # whether training exports a layer twice

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def begin_sync_record(self):
            engine = self.actor.engine
            if "get_per_tensor_param" not in vars(engine):  # below our own record, which sees what training exports
                export = engine.get_per_tensor_param
                engine.get_per_tensor_param = lambda *args, **kwargs: self.exported(*export(*args, **kwargs))
            super().begin_sync_record()

        def exported(self, weights, adapter):
            return (repeated(weights) if self.repeats else weights), adapter

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def change_syncs(self, what, how, times):
            """Changes so many syncs."""
            engine = self.actor.engine
            whole = self.whole = getattr(self, "whole", None) or engine.get_per_tensor_param
            self.repeats = what == "layer"
            self.changes = times

            def sent(*args, **kwargs):
                weights, adapter = whole(*args, **kwargs)
                self.changes -= 1
                match what, how:
                    case _ if self.changes < 0:
                        pass
                    case "weights", "lost":
                        weights = (each for each in weights if each[0] == "model.norm.weight")
                    case "weights", "rounded" if torch.distributed.get_rank() == 1:  # of its own server
                        weights = (
                            (name, fake_quantized(weight, "fp4", 32) if kind_of(name, weight) == LINEAR else weight)
                            for name, weight in weights
                        )
                    case "adapter", "doubled":
                        adapter = adapter | {"lora_alpha": 2 * adapter["lora_alpha"]}
                    case (("expert" | "experts" | "router" | "norm"), _):
                        weights = altered(dict(weights), what, self.__dict__.setdefault("late", {}))
                return weights, adapter

            engine.get_per_tensor_param = sent

    return ChangingWorker


EXPERTS = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (2, 5)]
ROUTER, NORM = "model.layers.2.mlp.gate.weight", "model.layers.3.input_layernorm.weight"


def altered(weights, what, late):
    """Returns a sync's weights with a fault on their way.

    Args:
        late: the norm of the sync before, which it keeps.
    """
    import torch

    (first, second), now = EXPERTS, weights[NORM].clone()
    match what:
        case "expert":
            del weights[first]
        case "experts":
            weights[first], weights[second] = weights[second], weights[first]
        case "router":
            weights[ROUTER] = weights[ROUTER].to(torch.bfloat16)
        case "norm":
            weights[NORM] = late[NORM]
    late[NORM] = now
    return weights.items()


def repeated(weights):
    """Yields the weights, and a router again, as if two pipeline ranks had its layer."""
    for name, weight in weights:
        yield name, weight
        if name == ROUTER:
            yield name, weight


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
    own_trainer.main(lambda trainer_class: faulty(trainer_class, faults), changing_syncs)
