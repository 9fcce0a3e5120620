"""Runs as a rank of test_megatron_gate.py: the gate and the undo on verl's Megatron engine, two mini-batches each.

python -m tests.stack.megatron_gate TASK RANK WORLD FOLDER
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.stack import gate_ranks
from tests.stack.megatron_engine import DP2, EP2, PP2_VPP2, TP2, TP2_EP2, main
from tests.stack.megatron_recipes import parallel_state
from tests.support.fsdp_ranks import join_ranks

OFFLOADED = {"param_offload": True, "optimizer_offload": True}
WHOLE = {"use_distributed_optimizer": False}
CPU_ADAM = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True}
BIAS = {"moe_router_bias_update_rate": 0.1, "gradient_accumulation_fusion": False}


class Case(NamedTuple):
    """An engine.

    Attributes:
        engine: its layout and settings.
        optimizer: overrides of megatron-core's.
        model: the folder of its weights.
    """

    dtype: str
    engine: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    model: str = "qwen3"


CASES = {
    "float32 TP2 EP2": Case("float32", TP2_EP2),
    "float32 TP2, an optimizer that is not distributed": Case("float32", TP2 | WHOLE),
    "bfloat16 PP2 VPP2, offloaded by verl": Case("bfloat16", PP2_VPP2 | OFFLOADED),
    "bfloat16 EP2, an optimizer that is not distributed": Case("bfloat16", EP2 | WHOLE),
    "bfloat16 DP2, Adam on the CPU": Case("bfloat16", DP2, CPU_ADAM),
    "float16 DP2": Case("float16", DP2, {"use_precision_aware_optimizer": False}),
    # As of DeepSeek-V3: megatron-core moves it in the pass, before any optimizer step.
    "float32 DP2, a bias of the routers": Case("float32", {"override_transformer_config": BIAS}, model="moonlight"),
}


def build_worker(folder: Path, case: Case):
    """verl's training worker on its Megatron engine, through Megatron-Bridge."""
    import verl  # noqa: F401  its plugins
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    join_ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    layers = {"attention_backend": "auto", "moe_permute_fusion": False, "apply_rope_fusion": False}
    batches = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "infer_micro_batch_size_per_gpu": 1}
    layers |= case.engine.get("override_transformer_config", {})
    settings = batches | case.engine | {"override_transformer_config": layers}
    model = str(folder / case.model / "model")
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=model, override_config={"attn_implementation": "eager"}),
            engine_config=McoreEngineConfig(strategy="megatron", dtype=case.dtype, **settings),
            optimizer_config=McoreOptimizerConfig(
                lr=1e-2,
                weight_decay=0.01,
                clip_grad=1.0,
                lr_decay_style="constant",
                total_training_steps=10,
                override_optimizer_config=case.optimizer or {},
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def offload_as_on_gpus() -> None:
    """Makes verl's engine offload to `cpu`, which it takes for a move to the accelerator if that is the CPU itself."""
    from verl.workers.engine import base
    from verl.workers.engine.megatron import transformer_impl

    base.get_device_name = transformer_impl.get_device_name = lambda: "cuda"


def everything(worker):
    """Copies all that a step changes: weights, buffers, what the optimizers hold, their settings, the schedule.
    Compared bit for bit."""
    engine = worker.engine
    with engine.train_mode():
        found = [[dict(chunk.named_parameters()), dict(chunk.named_buffers())] for chunk in engine.module]
        for one in engine.optimizer.chained_optimizers:
            for each in (one.optimizer, *getattr(one.optimizer, "sub_optimizers", ())):
                parameters = [parameter for group in each.param_groups for parameter in group["params"]]
                groups = [{key: value for key, value in g.items() if key != "params"} for g in each.param_groups]
                found.append((parameters, [dict(each.state.get(parameter, {})) for parameter in parameters], groups))
            found.append(one.grad_scaler.state_dict() if getattr(one, "grad_scaler", None) else None)
        found.append(engine.lr_scheduler.state_dict())
        return copied(found)


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list | tuple) else copy.copy(value)


def weights_of(worker):
    """Returns the parameters of this rank; verl exports none if the optimizer is not distributed."""
    with worker.engine.train_mode():
        parameters = [parameter for chunk in worker.engine.module for parameter in chunk.parameters()]
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def judge_norms(gate, share):
    """Updates with a limit on the gradient's norm, each from the same start: a wide one, none, and a narrow one."""
    from verl_ext.features.settings import MiniBatchLimits
    from verl_ext.workers.undo import keep_updates_of
    from verl_ext.workers.worker_loss import LossSettings

    worker, start = gate.worker, everything(gate.worker)
    gate.undo = keep_updates_of(gate.engine)
    gate_ranks.set_loss(worker, gate, LossSettings())
    found, left = {}, {}
    for step, (name, limit) in enumerate({"wide": 1e6, "none": None, "narrow": 1e-6}.items(), start=1):
        gate.limits = MiniBatchLimits(grad_norm=limit)
        metrics = gate_ranks.update_once(worker, share, step)
        found[name] = [metrics.get(key) for key in ("gate/grad_norm", "grad_norm", "gate/refused")]
        left[name] = everything(worker)
        if name != "narrow":
            gate.take_back(step - 1)
            found[f"{name}, taken back"] = gate_ranks.equal(everything(worker), start)
    gate.limits = MiniBatchLimits()
    found["an allowed one is verl's"] = gate_ranks.equal(left["wide"], left["none"])
    chunks = (what[: len(gate.engine.module)] for what in (left["narrow"], start))
    found["a refused one leaves the weights"] = gate_ranks.equal(*chunks)  # and the bias of routers
    return found


def judge_and_undo(folder: Path) -> None:
    from verl_ext.workers.gate import Gate

    offload_as_on_gpus()
    for name, case in CASES.items():
        with parallel_state():
            gate = Gate(build_worker(folder, case))
            engine = gate.engine
            share = engine.get_data_parallel_rank()
            named = [dict(chunk.named_buffers()) for chunk in engine.module]
            before = copied(named)
            found = {"norms": judge_norms(gate, share)}
            # An interleaved pipeline takes two micro-batches at a time.
            again = 3 if len(engine.module) > 1 else 4
            found |= gate_ranks.take_back_updates(gate, share, everything, weights_of, again)
            found["buffers moved"] = not gate_ranks.equal(copied(named), before)  # by the update that is left
            found["offloaded"] = bool(case.engine.get("param_offload")) and all(
                buffer.param_data.untyped_storage().size() == 0 for buffer in engine.module[0].buffers
            )
            found["dropping"] = gate_ranks.drop_tokens(gate, share, weights_of)
            found["reuse"] = gate_ranks.reuse_log_probs(gate, share, weights_of)
            found["outputs"] = engine.is_mp_src_rank_with_outputs()
            print(f"checked: {json.dumps({'case': name} | found)}", flush=True)


if __name__ == "__main__":
    main({"judge_and_undo": judge_and_undo}, *sys.argv[1:])
