"""A probe that looks several times, each time with another cause planted in the training engine.

python -m tests.stack.probing <overrides of a probe>
"""

from collections.abc import Callable

import torch

from verl_ext.core.fake_quant import fake_quantized

WRONG_TEMPERATURE = 0.7


def router_in_bf16(model):
    rounded = model.layers[1].mlp.gate.register_forward_pre_hook(
        lambda gate, inputs: (inputs[0].bfloat16().float(), *inputs[1:])
    )
    return [rounded.remove]


def permuted_expert(model):
    experts = model.layers[1].mlp.experts
    order = [1, 0, *range(2, len(experts.down_proj))]
    return [
        back
        for each in (experts.gate_up_proj, experts.down_proj)
        for back in changed(each, lambda weight: weight[order])
    ]


def scaled_norm(model):
    return changed(model.layers[0].self_attn.q_norm.weight, lambda weight: 1.5 * weight)


def rounded_layer(model):
    return changed(model.layers[1].self_attn.o_proj.weight, lambda weight: fake_quantized(weight, "fp4", "tensor"))


def nothing(model):
    return []


CAUSES: dict[str, tuple[Callable, str]] = {  # name -> what is done to the model, and the place where it shows
    "nothing": (nothing, ""),
    "router in bf16": (router_in_bf16, "1.router"),
    "permuted expert": (permuted_expert, "1.experts"),
    "scaled norm": (scaled_norm, "0.attention"),
    "rounded layer": (rounded_layer, "1.attention"),
    "wrong temperature": (nothing, "head"),
}


@torch.no_grad()
def changed(parameter, change) -> list[Callable[[], object]]:
    """Change a parameter of one rank's FSDP2; what makes it again what it was."""
    shard = parameter.to_local()
    before = shard.clone()
    shard.copy_(change(before))
    return [lambda: shard.copy_(before)]


def planting(worker_class: type) -> type:
    from verl.single_controller.base.decorator import Dispatch, register

    class PlantingWorker(worker_class):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def plant(self, name):
            for back in self.__dict__.pop("planted", []):
                with torch.no_grad():
                    back()
            self.planted = CAUSES[name][0](self.actor.engine.module.model)

    return PlantingWorker


def looking_often(trainer_class: type) -> type:
    class PlantingTrainer(trainer_class):
        def probe(self, batch):
            from verl_ext.trainer import sync_canary

            found = {}
            for name in CAUSES:
                self.actor_rollout_wg.plant(name)
                sync_canary.ONE_A_PASS["temperature"] = WRONG_TEMPERATURE if name == "wrong temperature" else 1.0
                found[name] = super().probe(batch)
            self.actor_rollout_wg.plant("nothing")
            sync_canary.ONE_A_PASS["temperature"] = 1.0
            super().probe(batch)
            return found

    return PlantingTrainer


def main() -> None:
    from verl_ext.probe import command, trainer
    from verl_ext.trainer import task_runner

    class PlantingTaskRunner(task_runner.StabilityTaskRunner):
        def install(self):
            from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
            from verl.workers.engine_workers import ActorRolloutRefWorker

            from verl_ext.probe.trainer import ProbeTrainer
            from verl_ext.workers.actor import ROUTING_WORKERS

            super().install()
            TRAINER_REGISTRY["sync"] = looking_often(ProbeTrainer)
            ROUTING_WORKERS[ActorRolloutRefWorker] = planting(ROUTING_WORKERS[ActorRolloutRefWorker])

    trainer.ProbeTaskRunner = PlantingTaskRunner
    command.run_engines()


if __name__ == "__main__":
    main()
