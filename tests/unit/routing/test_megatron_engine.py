"""Disagreements with verl's real Megatron engine are found, and R2 replays what was recorded."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.closeness import close
from tests.support.megatron_cpu import (
    SOFTMAX,
    OnCPU,
    build_engine,
    infer,
    prepared,
    put_on_cpu,
    sequence_routes,
    top_k_router,
    verls_patch,
)
from tests.support.recorded_routes import (
    EXPERTS,
    LAYERS,
    LENGTHS,
    MOE,
    TOP_K,
    as_rollout,
    batch,
    check_planted,
    check_replayed,
    plant,
    some_routes,
)
from tests.support.routing_families import noise
from verl_ext.base.errors import HookError
from verl_ext.routing.megatron import Recorders
from verl_ext.workers.actor import without_entropy_gradient


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """torch.distributed and megatron-core's parallel state, of only this process."""
    from megatron.core import parallel_state as mpu

    with pytest.MonkeyPatch.context() as patch:
        put_on_cpu(patch)
        verls_patch(patch)
        store = tmp_path_factory.mktemp("gloo") / "store"
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        mpu.initialize_model_parallel()
        yield
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def engine(one_rank):
    return build_engine("disabled")


@pytest.mark.parametrize("seed", range(3))
def test_the_routers_here_choose_by_a_margin_that_rounding_does_not_reach(engine, seed):
    """Then a sequence has the same experts by itself and in a packed batch, on any CPU."""
    expected = [sequence_routes(engine, index) for index in range(len(LENGTHS))]
    with noise(engine.module[0], seed=seed):
        found = [sequence_routes(engine, index) for index in range(len(LENGTHS))]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("trajectory", "token", "layer"), [(0, 0, 1), (1, 4, 3), (3, 2, 2)])
def test_a_disagreement_with_verls_megatron_engine_is_found_at_its_token_and_layer(engine, trajectory, token, layer):
    routing = prepared("disabled", engine)
    assert routing.hooks() == ("TopKRouter", 3)
    rollout = as_rollout([sequence_routes(engine, index) for index in range(len(LENGTHS))])
    output = routing.compute(infer(engine), batch(routed=plant(rollout, trajectory, token, layer)))
    check_planted(output, trajectory, token, MOE.index(layer))
    assert set(output.keys()) == {"log_probs", "entropy", "metrics", "router_agreement", "router_sums"}


def gradients(engine, data):
    """Returns the routers' gradients after one pass of verl's engine for an update, and the experts that they used."""
    from megatron.core.transformer.moe.router import TopKRouter
    from verl.utils.megatron.router_replay_utils import iter_model_routers

    routers = [module for module in engine.module[0].modules() if isinstance(module, TopKRouter)]
    used = []
    handles = [r.register_forward_hook(lambda m, args, output: used.append(output[1].detach())) for r in routers]
    engine.module[0].zero_grad()

    def loss(model_output, data, dp_group):
        return model_output["log_probs"].values().sum(), {}

    with OnCPU(), engine.eval_mode(), torch.enable_grad():
        engine.forward_backward_batch(data, loss, forward_only=False)
    for handle in handles:
        handle.remove()
    actions = [router.router_replay_action for _, router in iter_model_routers(engine.module)]
    assert actions == [None] * len(routers)
    return torch.stack([router.weight.grad.clone() for router in routers]), used


def test_without_replay_the_update_routes_for_itself_whatever_the_batch_brings(engine):
    """mode=disabled: verl's worker sends no flag, and an engine built with R2 does not touch the routers."""
    native, used = gradients(engine, batch(use_dynamic_bsz=False, micro_batch_size_per_gpu=4))
    elsewhere = [rows.flip(-1) * 0 + torch.tensor([6, 7]) for rows in as_rollout(some_routes())]
    again, used_again = gradients(engine, batch(routed=elsewhere, use_dynamic_bsz=False, micro_batch_size_per_gpu=4))
    assert torch.equal(again, native)
    assert all(map(torch.equal, used, used_again)) and native.abs().sum() > 0


def test_with_r2_the_update_replays_what_compute_log_prob_returned(engine):
    """The output is written to the batch; then one token gets other experts, to see that verl reads the field."""
    rollout = plant(as_rollout([sequence_routes(engine, index) for index in range(len(LENGTHS))]), 0, 1, 2)
    routing = prepared("R2", engine)
    output = routing.compute(infer(engine), batch(routed=rollout, enable_routing_replay=True))
    check_planted(output, 0, 1, MOE.index(2))
    routes = [rows.clone() for rows in output["routed_experts"].unbind()]
    assert [rows.shape for rows in routes] == [(sum(pair), 3, TOP_K) for pair in LENGTHS]
    settings = {"enable_routing_replay": True, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}
    native, used = gradients(engine, batch(**settings | {"enable_routing_replay": False}))
    replayed, used_again = gradients(engine, batch(routed=routes, **settings))
    close(replayed, native)
    assert all(map(torch.equal, used, used_again))
    outside = next(e for e in range(EXPERTS) if e not in routes[0][2, 1].tolist())
    routes[0][2, 1, 0] = outside
    moved, used = gradients(engine, batch(routed=routes, **settings))
    assert set(used[1][2].nonzero().flatten().tolist()) == set(routes[0][2, 1].tolist())
    assert (moved - native)[1, outside].abs().sum() > 0


@pytest.mark.slow
def test_the_reference_of_a_lora_in_verls_engine(engine):
    engine.disable_adapter = contextlib.nullcontext
    data = batch(no_lora_adapter=True, enable_routing_replay=True, calculate_entropy=False)
    output = prepared("R2", engine).compute(infer(engine), data)
    assert set(output.keys()) == {"log_probs", "metrics"}


@pytest.mark.parametrize("rows", [3, 2048])
def test_the_entropy_of_an_update_is_verls_without_a_graph_or_a_copy_of_the_logits(one_rank, rows):
    """In float32: verl rounds to the dtype of the logits."""
    engine = build_engine("disabled")

    def outputs(cloned):
        generator = torch.Generator().manual_seed(3)
        leaf = (4 * torch.randn(1, 8, 32, generator=generator)).requires_grad_()
        logits, clones = 1 * leaf, []
        logits.clone = lambda: clones.append(torch.Tensor.clone(logits)) or clones[-1]
        heat = torch.tensor([[0.7, 1.0, 1.3, 0.0, 1.0, 2.0, 1.0, -1.0]])  # padding has 0, or less
        others = dict.fromkeys(("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"), False)
        others |= {"logits_processor_func": None, "batch": None, "data_format": "thd"}
        label = torch.arange(8).unsqueeze(0)
        with OnCPU():
            found = engine._lm_head_logits_processor(logits, label, heat, calculate_entropy=True, **others)
        found["log_probs"].sum().backward()
        assert len(clones) == cloned
        return found["log_probs"].detach(), found["entropy"].detach(), leaf.grad, found["entropy"].requires_grad

    *expected, has_graph = outputs(cloned=1)
    engine.engine_config = SimpleNamespace(**vars(engine.engine_config) | {"entropy_from_logits_chunk_size": rows})
    without_entropy_gradient(engine)
    *found, still = outputs(cloned=0)
    assert has_graph and not still
    assert all(map(torch.equal, found, expected))


def chunk_of(numbers, mtp=()):
    """A model with real routers of these layer numbers, from 1 as Megatron counts them."""
    chunk = nn.Module()
    for name, layers in (("decoder", numbers), ("mtp", mtp)):
        chunk.add_module(name, nn.ModuleList([top_k_router(SOFTMAX) for _ in layers]))
        for router, number in zip(getattr(chunk, name), layers, strict=True):
            router.set_layer_number(number)
    return chunk


def fake_engine(*chunks, layers=LAYERS):
    config = SimpleNamespace(num_layers=layers, num_moe_experts=EXPERTS, virtual_pipeline_model_parallel_size=None)
    return SimpleNamespace(
        engine_config=SimpleNamespace(strategy="megatron"),
        tf_config=config,
        module=list(chunks),
        forward_step=lambda batch_iter, model, logits_processor_func, postprocess_micro_batch_func: None,
    )


def test_layers_for_multi_token_prediction_are_not_counted(one_rank):
    routing = prepared("disabled", fake_engine(chunk_of([4, 2, 3], mtp=[1])))
    assert routing.recorders == Recorders("TopKRouter", MOE, LAYERS, EXPERTS)


def test_an_engine_in_which_verl_installed_no_recorder_is_refused(one_rank):
    chunk = chunk_of([1, 2])
    for router in chunk.decoder:
        router.router_replay = None
    with pytest.raises(HookError, match=r"installed no recorder of routing in Megatron.*router_agreement=false"):
        prepared("disabled", fake_engine(chunk))


def test_stages_that_verl_would_put_in_another_order_are_refused(one_rank):
    with pytest.raises(HookError, match=r"in the wrong order.*\[\[2, 3\], \[0, 1\]\]"):
        prepared("disabled", fake_engine(chunk_of([3, 4]), chunk_of([1, 2])))


@pytest.mark.parametrize("token", [0, 4])
def test_with_r3_what_is_used_and_what_the_router_would_choose_are_both_compared(one_rank, token):
    """The rollout has another expert in the last layer: all experts in use agree, and one of the routers' own does not.
    The log-probabilities are those of verl's own replay."""
    engine = build_engine("R3")  # verl's registry is of the newest engine: no test after this one can use the other
    rollout = plant(as_rollout([sequence_routes(engine, index) for index in range(len(LENGTHS))]), 1, token, MOE[-1])
    data = batch(routed=rollout, enable_routing_replay=True)
    verls = infer(engine)(data.clone())
    native = infer(engine)(batch())
    output = prepared("R3", engine).compute(infer(engine), data)
    assert set(output.keys()) == {"log_probs", "entropy", "metrics", "router_agreement", "router_sums"}
    assert torch.equal(output["log_probs"].values(), verls["log_probs"].values())
    assert not torch.equal(output["log_probs"].values(), native["log_probs"].values())
    check_replayed(output, 1, MOE.index(MOE[-1]))
    assert torch.equal(infer(engine)(data.clone())["log_probs"].values(), verls["log_probs"].values())
