"""What a spawned rank of test_gate_ranks.py runs: verl's real FSDP2 engine, two mini-batches of two trajectories."""

import os

import torch
import torch.distributed as dist

LENGTHS = [(3, 5), (2, 4), (4, 6), (3, 3)]  # prompt and response, of the trajectories of one rank
CASES = {
    "no limits": ({}, {}),
    "within": ({"vllm_kl": 0.5, "policy_kl": 10.0, "grad_norm": 1e6}, {}),
    "mismatch": ({"vllm_kl": 0.5}, {"gap": 3.0}),
    "nan": ({"policy_kl": 10.0}, {"gap": float("nan")}),
    "infinite": ({"policy_kl": 10.0}, {"gap": float("-inf")}),
    "moved": ({"policy_kl": 1e-9}, {}),
    "steep": ({"grad_norm": 1e-6}, {}),
}


def batch(rank, gap=0.0):
    """`gap` is added to l_infer of the last two trajectories of rank 1 alone."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(5, 90, (prompt + response,), generator=generator) for prompt, response in LENGTHS]

    def nested(values):
        return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)

    old = [torch.full((response,), -4.5) for _, response in LENGTHS]
    off = [gap if rank == 1 and index >= 2 else 0.0 for index in range(len(LENGTHS))]
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "position_ids": nested(torch.arange(len(row)) for row in rows),
            "prompts": nested(row[:prompt] for row, (prompt, _) in zip(rows, LENGTHS, strict=True)),
            "responses": nested(row[prompt:] for row, (prompt, _) in zip(rows, LENGTHS, strict=True)),
            "response_mask": nested(torch.ones(response, dtype=torch.long) for _, response in LENGTHS),
            "loss_mask": nested(torch.ones(response, dtype=torch.long) for _, response in LENGTHS),
            "old_log_probs": nested(old),
            "rollout_log_probs": nested(row + shift for row, shift in zip(old, off, strict=True)),
            "advantages": nested(torch.ones(response) for _, response in LENGTHS),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(data, temperature=1.0, global_batch_size=4, mini_batch_size=4, calculate_entropy=False)
    return data


def run(case, rank, folder):
    """The weights' change in the update, and what the update reported on this rank."""
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker

    from verl_ext.workers.gate import Gate
    from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

    limits, settings = CASES[case]
    torch.manual_seed(0)
    engine = {
        "strategy": "fsdp2",
        "dtype": "float32",
        "mixed_precision": {"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"},
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1,
        "infer_micro_batch_size_per_gpu": 1,
    }
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=folder, use_remove_padding=False, override_config={"attn_implementation": "eager"}
            ),
            engine_config=FSDPEngineConfig(**engine),
            optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    steps = []
    verls = worker.engine.optimizer_step
    worker.engine.optimizer_step = lambda: steps.append(verls()) or steps[-1]
    gate = Gate(worker.engine)
    wanted = LossSettings.from_dict({"mini_batch": limits})
    gate.limits = wanted.mini_batch
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    worker.set_loss_fn(build_worker_loss(config, wanted, gate)[0])
    output = worker.train_mini_batch(batch(rank, **settings))
    weights = torch.cat([p.detach().full_tensor().flatten() for p in worker.engine.module.parameters()])
    return {"steps": len(steps), "weights": weights, "metrics": dict(tu.get(output, "metrics"))}


def rank_main(rank, ranks, folder, address, results):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"DIST_INIT_METHOD": address, "MASTER_ADDR": "unused", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    torch.save({case: run(case, rank, folder) for case in CASES}, f"{results}/{rank}.pt")
    dist.destroy_process_group()
