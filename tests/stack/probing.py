"""A probe that looks several times, each time with another cause planted in the training engine.

If the model has a LoRA, the probe looks with a LoRA that the rollout lacks, and over batches without updates.

python -m tests.stack.probing <overrides of a probe>
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_ext.base.names import HEAD
from verl_ext.routing.layers import megatron_layers, megatron_points

WRONG_TEMPERATURE = 0.7
LAST_LAYER = 3


@dataclass(frozen=True)
class Parts:
    """The parts of a layer that the tests change, in both training engines."""

    attention: torch.nn.Module
    router: torch.nn.Module
    experts: list[list[torch.Tensor]]  # matrix of an expert -> that of each expert
    query_norm: torch.Tensor


def parts_of(engine, number) -> list[Parts]:
    """Returns the parts of a layer, if this rank has the layer."""
    if engine.engine_config.strategy == "megatron":
        layers = [layer for its_number, layer in megatron_layers(engine.module) if its_number == number]
        return [
            Parts(
                layer.self_attention,
                layer.mlp.router,
                [
                    [getattr(linear, f"weight{expert}").data for expert in range(linear.num_gemms)]
                    for linear in layer.mlp.experts.children()
                    if hasattr(linear, "weight0")
                ],
                layer.self_attention.q_layernorm.weight.data,
            )
            for layer in layers
        ]
    layer = engine.module.model.layers[number]
    experts = layer.mlp.experts
    stacked = [weight.to_local() for weight in (experts.gate_up_proj, experts.down_proj)]
    norm = layer.self_attn.q_norm.weight.to_local()
    return [Parts(layer.self_attn, layer.mlp.gate, [list(weight) for weight in stacked], norm)]


def router_in_bf16(engine):
    def rounded(router, inputs):
        return (inputs[0].bfloat16().float(), *inputs[1:])

    return [part.router.register_forward_pre_hook(rounded).remove for part in parts_of(engine, 1)]


def permuted_expert(engine):
    """Each expert gets the weights of the one before it, so that every token shows it."""
    return [
        changed(weight, before)
        for part in parts_of(engine, LAST_LAYER)
        for weights in part.experts
        for weight, before in zip(weights, [one.clone() for one in weights[-1:] + weights[:-1]], strict=True)
    ]


def scaled_norm(engine):
    return [changed(part.query_norm, 1.5 * part.query_norm) for part in parts_of(engine, 0)]


def leaking_attention(engine):
    def leak(attention, inputs, named, output):
        state, *others = output
        if (packed := named.get("packed_seq_params")) is None:  # [sequences, tokens, width]
            sequences, other = len(state), state.roll(1, 0)
        else:  # [tokens of all sequences, 1, width]
            sequences, other = len(packed.cu_seqlens_q) - 1, state.roll(int(packed.cu_seqlens_q[1]), 0)
        return (state + 0.5 * other, *others) if sequences > 1 else output

    return [part.attention.register_forward_hook(leak, with_kwargs=True).remove for part in parts_of(engine, 0)]


def head_in_bf16(engine):
    def rounded(head, inputs, output):
        return output.bfloat16().float() if isinstance(output, torch.Tensor) else (rounded(head, (), output[0]), None)

    if engine.engine_config.strategy == "megatron":
        heads = [point.module for point in megatron_points(engine.module) if point.name == HEAD]
    else:
        heads = [engine.module.lm_head]
    return [head.register_forward_hook(rounded).remove for head in heads]


def nothing(engine):
    return []


CAUSES: dict[str, tuple[Callable, str, str | None]] = {
    # name -> what is done to the engine, the place where it shows, the finding of it
    "nothing": (nothing, "", "probe_gap.none"),
    "router in bf16": (router_in_bf16, "1.router", None),  # no gap, unless a token takes another expert
    "permuted expert": (permuted_expert, f"{LAST_LAYER}.experts", "probe_start.layer"),  # no router follows
    "scaled norm": (scaled_norm, "0.attention", "probe_first_layer.attention"),
    "wrong temperature, and a head in bf16": (head_in_bf16, "lm_head", "probe_start.head"),
    "leaking attention": (leaking_attention, "", "probe_packing.harms"),
}
BATCHES = 4


def zero_adapters(engine):
    for name, parameter in engine.module.named_parameters():
        if ".lora_B." in name:
            parameter.zero_()
    return []


def grown_norm(engine):
    for name, parameter in engine.module.named_parameters():
        if name.endswith("layers.0.self_attn.q_norm.weight"):
            parameter.mul_(1.2)
    return []


PLANTS = {name: plant for name, (plant, *_) in CAUSES.items()} | {"no adapter": zero_adapters, "grown": grown_norm}


def changed(weight, value) -> Callable[[], object]:
    """Writes these values to a rank's weight; returns the function that restores the old ones."""
    before = weight.clone()
    weight.copy_(value)
    return lambda: weight.copy_(before)


def planting(worker_class: type) -> type:
    from verl.single_controller.base.decorator import Dispatch, register

    class PlantingWorker(worker_class):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def plant(self, name):
            with torch.no_grad():
                for back in self.__dict__.pop("planted", []):
                    back()
                self.planted = PLANTS[name](self.actor.engine)

    return PlantingWorker


def looking_often(trainer_class: type) -> type:
    class PlantingTrainer(trainer_class):
        def probe(self, batch):
            from verl_ext.trainer import canary_scores

            found = {}
            for name in CAUSES:
                self.actor_rollout_wg.plant(name)
                canary_scores.TEMPERATURE = WRONG_TEMPERATURE if "temperature" in name else 1.0
                found[name] = super().probe(batch)
            self.actor_rollout_wg.plant("nothing")
            canary_scores.TEMPERATURE = 1.0
            super().probe(batch)
            return found

    return PlantingTrainer


def losing_adapters(trainer_class: type) -> type:
    class LosingTrainer(trainer_class):
        grows = False

        def sampled(self):
            if self.grows:  # the weights that a LoRA is added to are not synced again
                self.actor_rollout_wg.plant("grown")
            return super().sampled()

        def measurements(self, batch):
            found = {"nothing": self.probe(batch)}
            *_, found["same weights"] = self.batches()
            first = self.gap
            self.actor_rollout_wg.plant("no adapter")
            self.checkpoint_manager.update_weights(self.global_steps)
            batch = self.sampled()
            assert all(self.actor_rollout_wg.fill_adapters())  # and no sync
            found["no adapter"] = self.probe(batch)
            self.grows, self.gap = True, first
            *_, found["growing"] = self.batches()
            yield found

    return LosingTrainer


def main() -> None:
    adapts = any("lora_rank" in override for override in sys.argv)
    from verl_ext.probe import engines, trainer
    from verl_ext.trainer import task_runner

    class PlantingTaskRunner(task_runner.StabilityTaskRunner):
        def install(self):
            from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
            from verl.workers.engine_workers import ActorRolloutRefWorker

            from verl_ext.probe.trainer import ProbeTrainer
            from verl_ext.workers.actor import LOSS_WORKERS, ROUTING_WORKERS

            super().install()
            TRAINER_REGISTRY["sync"] = (losing_adapters if adapts else looking_often)(ProbeTrainer)
            for workers in (LOSS_WORKERS, ROUTING_WORKERS):
                workers[ActorRolloutRefWorker] = planting(workers[ActorRolloutRefWorker])

    trainer.ProbeTaskRunner = PlantingTaskRunner
    engines.run_engines()


if __name__ == "__main__":
    main()
