"""Runs as a spawned rank of test_megatron_ranks.py: verl's Megatron engine under each kind of parallelism."""

import sys

import pytest
import torch

from tests.support.closeness import close
from tests.support.megatron_cpu import (
    OnCPU,
    build_engine,
    infer,
    put_on_cpu,
    sequence_logits,
    sequence_routes,
    verls_patch,
)
from tests.support.recorded_routes import (
    EXPERTS,
    LAYERS,
    LENGTHS,
    MOE,
    as_rollout,
    batch,
    check_planted,
    check_replayed,
    nested,
    plant,
    sequences,
    worker_config,
)
from tests.support.top_token_ranks import give, reference_reading, response_values, sampler_top_tokens
from verl_ext.base.names import COMPARES, TOP_TOKEN_SUMS
from verl_ext.core.top_tokens import log_probs_at
from verl_ext.routing.megatron import RecordedRouting, Recorders
from verl_ext.workers.replica_fetch import replica_group
from verl_ext.workers.top_tokens import TopTokenReader, TopTokenUse

PARALLEL = {
    "tensor and sequence": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "interleaved pipeline": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


def rank_main(rank, store):
    """Checks, for each kind of parallelism, the order of routes, a planted disagreement, and the top tokens."""
    from megatron.core import parallel_state as mpu

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        put_on_cpu(patch)
        verls_patch(patch)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        mpu.initialize_model_parallel()
        alone = build_engine("disabled")
        rollout = as_rollout([sequence_routes(alone, index) for index in range(len(LENGTHS))])
        weights = alone.module[0].state_dict()
        logits_of = sequence_logits(alone)
        top_tokens = list(sampler_top_tokens(logits_of, sequences(), LENGTHS))
        read = {cut: reference_reading(logits_of, top_tokens, cut, sequences(), LENGTHS) for cut in (True, False)}
        weights = {name: value.clone() for name, value in weights.items() if torch.is_tensor(value)}
        mpu.destroy_model_parallel()
        for name, parallel in PARALLEL.items():
            engine = build_engine("disabled", parallel)
            load(engine, weights, rank)
            group = replica_group(engine)
            assert torch.distributed.get_process_group_ranks(group) == [0, 1], "they fetch together"
            assert name == "context" or group is mpu.get_model_parallel_group(), "no group more than needed"
            routing = RecordedRouting(worker_config("disabled", forward_only=True, **parallel))
            routing.prepare(engine)
            assert routing.recorders == Recorders("TopKRouter", MOE, LAYERS, EXPERTS), routing.recorders
            output = routing.compute(infer(engine), batch(routed=plant(rollout, 1, 2, 3)))
            assert (output is not None) == engine.is_mp_src_rank_with_outputs()
            if output is not None:
                check_planted(output, 1, 2, MOE.index(3))
            reader = TopTokenReader(engine)
            for truncated, (l_own, _, sums) in read.items():
                reader.use = TopTokenUse(truncated=truncated, centers=True)
                output = infer(engine)(give(batch(calculate_entropy=True), top_tokens))
                if output is not None:
                    close(response_values(output["log_probs"], LENGTHS), l_own)
                    close(torch.stack(list(output[TOP_TOKEN_SUMS].unbind())), sums)
            if "pipeline_model_parallel_size" not in parallel:  # refused
                check_update(engine, "disabled", rollout)
            check_r3(parallel, weights, rank, rollout)
            if engine.is_mp_src_rank_with_outputs():
                print(f"checked: {name}", flush=True)
            torch.distributed.barrier()
            mpu.destroy_model_parallel()
        check_vocabulary_in_parts(rank)


def check_update(engine, mode, rollout):
    """Checks that the loss of each micro-batch gets the comparison, on every rank."""
    rows = {}

    def loss(model_output, data, dp_group):
        found = zip(model_output["router_agreement"].unbind(), model_output["router_sums"].unbind(), strict=True)
        rows.update({len(agreement): (agreement, sums) for agreement, sums in found})
        return model_output["log_probs"].values().sum(), {}

    replays = {"enable_routing_replay": True} if mode == "R3" else {}
    data = batch(routed=plant(rollout, 1, 2, MOE[-1]), **{COMPARES: True}, **replays)
    with OnCPU(), engine.eval_mode():
        engine.forward_backward_batch(data, loss, forward_only=True)
    agreement, sums = zip(*(rows[response] for _, response in LENGTHS), strict=True)
    found = {"router_agreement": nested(list(agreement)), "router_sums": torch.stack(sums)}
    if mode == "R3":
        check_replayed(found, 1, MOE.index(MOE[-1]))
    else:
        check_planted(found, 1, 2, MOE.index(MOE[-1]))


def check_r3(parallel, weights, rank, rollout):
    """Checks that with R3 the rollout's experts are used, and that the router's own choice is compared too."""
    engine = build_engine("R3", parallel)
    load(engine, weights, rank)
    routing = RecordedRouting(worker_config("R3", forward_only=True, **parallel))
    routing.prepare(engine)
    data = batch(routed=plant(rollout, 1, 2, MOE[-1]), enable_routing_replay=True)
    output = routing.compute(infer(engine), data)
    assert (output is not None) == engine.is_mp_src_rank_with_outputs()
    if output is not None:
        check_replayed(output, 1, MOE.index(MOE[-1]))
    if "pipeline_model_parallel_size" not in parallel:
        check_update(engine, "R3", rollout)


def check_vocabulary_in_parts(rank):
    """Checks that log_probs_at on a half of the vocabulary per rank gives the values and gradient of the whole."""
    generator = torch.Generator().manual_seed(1)
    whole = (5 * torch.randn(6, 10, generator=generator)).requires_grad_()
    ids = torch.randint(0, 10, (6, 4), generator=generator)
    factors = torch.randn(6, 4, generator=generator)
    part = whole.detach()[:, 5 * rank : 5 * rank + 5].clone().requires_grad_()
    found = log_probs_at(part, ids, torch.distributed.group.WORLD)
    (found * factors).sum().backward()
    expected = whole.double().log_softmax(1).gather(1, ids)
    (expected * factors).sum().backward()
    close(found, expected, scale=20.0)
    close(part.grad, whole.grad[:, 5 * rank : 5 * rank + 5], scale=float(whole.grad.abs().max()))


def load(engine, weights, rank):
    """Loads the weights of the whole model into this rank's part of it."""
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
