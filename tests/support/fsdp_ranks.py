"""verl's real training worker on its FSDP2 engine, in float32 on the CPU, and the batch that it is given."""

import os

import torch


def join_ranks(rank, ranks, address="unused"):
    """Makes this process a rank: verl's workers read it from the environment."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"DIST_INIT_METHOD": address, "MASTER_ADDR": "unused", "MASTER_PORT": "0"}
    torch.set_num_threads(1)


def training_worker(folder, worker_class=None, micro_batch=1, model=None, **engine):
    """Returns a worker of the model in `folder`; `model` and `engine` are more settings of verl's for these."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    settings = {
        "strategy": "fsdp2",
        "dtype": "float32",
        "mixed_precision": {"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"},
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro_batch,
        "infer_micro_batch_size_per_gpu": micro_batch,
    }
    plain = {"use_remove_padding": False, "override_config": {"attn_implementation": "eager"}}
    worker = (worker_class or TrainingWorker)(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=folder, **(plain | (model or {}))),
            engine_config=FSDPEngineConfig(**(settings | engine)),
            optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def nested(values):
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)


def batch_of(rows, lengths, fields, **settings):
    """Returns a batch as verl's trainer sends it.

    Args:
        rows: the tokens of each trajectory.
        lengths: prompt and response length of each.
        fields: more fields, by their rows.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    masks = [torch.ones(response, dtype=torch.long) for _, response in lengths]
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "position_ids": nested(torch.arange(len(row)) for row in rows),
            "prompts": nested(row[:prompt] for row, (prompt, _) in zip(rows, lengths, strict=True)),
            "responses": nested(row[prompt:] for row, (prompt, _) in zip(rows, lengths, strict=True)),
            "response_mask": nested(masks),
            "loss_mask": nested(mask.clone() for mask in masks),
        }
        | {name: nested(values) for name, values in fields.items()},
        batch_size=len(rows),
    )
    tu.assign_non_tensor(data, **settings)
    return data
