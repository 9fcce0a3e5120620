"""What a spawned rank of test_gate_ranks.py runs: verl's real FSDP2 engine, two mini-batches of two trajectories."""

import os

import torch
import torch.distributed as dist

LENGTHS = [(3, 5), (2, 4), (4, 6), (3, 3)]  # prompt and response, of the trajectories of one rank
BYPASS = {"corrections": {"icepop": {"alpha": 0.5, "beta": 5.0}}}
CASES = {
    "no limits": ({}, {}),
    "within": ({"vllm_kl": 0.5, "policy_kl": 10.0, "grad_norm": 1e6}, {}),
    "mismatch": ({"vllm_kl": 0.5}, {"gap": 3.0}),
    "nan": ({"policy_kl": 10.0}, {"gap": float("nan")}),
    "infinite": ({"policy_kl": 10.0}, {"gap": float("-inf")}),
    "moved": ({"policy_kl": 1e-9}, {}),
    "steep": ({"grad_norm": 1e-6}, {}),
}


BYPASS_CASES = {"bypass": {}, "bypass, a gap": {"gap": 3.0, "first": True}, "bypass, later": {"gap": 3.0}}


def batch(rank, gap=0.0, first=False):
    """`gap` is added to l_infer of the last two trajectories of rank 1 alone, or of the first two."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(5, 90, (prompt + response,), generator=generator) for prompt, response in LENGTHS]

    def nested(values):
        return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)

    old = [torch.full((response,), -4.5) for _, response in LENGTHS]
    off = [gap if rank == 1 and (index < 2) == first else 0.0 for index in range(len(LENGTHS))]
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
    from tensordict import NonTensorData
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

    from verl_ext.workers.first_pass import FirstPass
    from verl_ext.workers.gate import Gate
    from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

    bypasses = case in BYPASS_CASES
    limits, settings = ({}, BYPASS_CASES[case]) if bypasses else CASES[case]
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
    gate = Gate(worker)
    wanted = LossSettings.from_dict({"mini_batch": limits, "first_pass": BYPASS if bypasses else None})
    gate.limits = wanted.mini_batch
    if wanted.first_pass is not None:
        gate.first_pass = FirstPass(wanted.first_pass)
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    worker.set_loss_fn(build_worker_loss(config, wanted, gate, gate.first_pass)[0])
    data = batch(rank, **settings)
    if bypasses:  # as the trainer sends it, through TransferQueue
        data["first_pass"] = NonTensorData({"narrowed": False, "limits": (("vllm_kl/k3", "above", 0.5),)})
    output = worker.train_mini_batch(data=data)
    weights = torch.cat([p.detach().full_tensor().flatten() for p in worker.engine.module.parameters()])
    return {"steps": len(steps), "weights": weights, "metrics": dict(tu.get(output, "metrics"))}


def rank_main(rank, ranks, folder, address, results):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"DIST_INIT_METHOD": address, "MASTER_ADDR": "unused", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    torch.save({case: run(case, rank, folder) for case in (*CASES, *BYPASS_CASES)}, f"{results}/{rank}.pt")
    dist.destroy_process_group()
