"""What a spawned rank of test_megatron_ranks.py runs: verl's Megatron engine under each kind of parallelism."""

import sys

import pytest
import torch

from tests.support.megatron_cpu import build_engine, infer, put_on_cpu, route_alone, verls_patch
from tests.support.recorded_routes import (
    EXPERTS,
    LAYERS,
    LENGTHS,
    MOE,
    as_rollout,
    batch,
    check_planted,
    plant,
    worker_config,
)
from verl_ext.routing.recorded import RecordedRouting, Recorders

PARALLEL = {
    "tensor and sequence": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "interleaved pipeline": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


def rank_main(rank, store):
    """Under each kind of parallelism, the routes are in order, and a planted disagreement is found."""
    from megatron.core import parallel_state as mpu

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        put_on_cpu(patch)
        verls_patch(patch)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        mpu.initialize_model_parallel()
        alone = build_engine("disabled")
        rollout = as_rollout([route_alone(alone, index) for index in range(len(LENGTHS))])
        weights = alone.module[0].state_dict()
        mpu.destroy_model_parallel()
        for name, parallel in PARALLEL.items():
            engine = build_engine("disabled", parallel)
            load(engine, weights, rank)
            routing = RecordedRouting(worker_config("disabled", forward_only=True, **parallel))
            routing.prepare(engine)
            assert routing.recorders == Recorders("TopKRouter", MOE, LAYERS, EXPERTS), routing.recorders
            output = routing.compute(infer(engine), batch(routed=plant(rollout, 1, 2, 3)))
            assert (output is not None) == engine.is_mp_src_rank_with_outputs()
            if output is not None:
                check_planted(output, 1, 2, MOE.index(3))
                print(f"checked: {name}", flush=True)
            torch.distributed.barrier()
            mpu.destroy_model_parallel()


def load(engine, weights, rank):
    """The weights of the whole model into this rank's part of it."""
    from verl.utils.megatron.router_replay_utils import get_current_rank_layer_info

    for stage, chunk in enumerate(engine.module):
        first = get_current_rank_layer_info(engine.tf_config, stage)["start"]
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + first)
            whole = weights[".".join(parts)]
            for dim in range(whole.dim()):
                if whole.shape[dim] != parameter.shape[dim]:
                    whole = whole.chunk(2, dim)[rank]
            parameter.data.copy_(whole)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2])
