"""VeOmni: verl's real controller on a transformers model; the engine around it is imitated."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.recorded_routes import (
    EXPERTS,
    LAYERS,
    LENGTHS,
    MOE,
    TOP_K,
    as_rollout,
    batch,
    check_planted,
    plant,
    sequences,
    worker_config,
)
from verl_ext.base.errors import HookError
from verl_ext.routing.megatron import RecordedRouting, Recorders


def veomni_engine(monkeypatch):
    """A transformers model whose routers call verl's controller after their top-k, as VeOmni's generated code does."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from verl.utils.veomni.router_replay import VeOmniRouterReplay

    hook = ModuleType("veomni.utils.moe_router_replay")
    active = []
    hook.set_active_replay = active.append
    hook.validate_model_for_replay = lambda model: None
    monkeypatch.setitem(sys.modules, "veomni.utils.moe_router_replay", hook)
    torch.manual_seed(0)
    hf_config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[0],
    )
    model = Qwen3MoeForCausalLM(hf_config).eval()
    controller = VeOmniRouterReplay()
    controller.install(model)
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(
                lambda gate, args, output: (*output[:2], active[-1].on_router_forward(gate, output[0], output[2]))
            )
    return SimpleNamespace(
        engine_config=SimpleNamespace(strategy="veomni"),
        model_config=SimpleNamespace(hf_config=hf_config),
        module=model,
        _router_replay=controller,
    )


def veomni_infer(engine):
    """Does what VeOmniEngine does with the controller in forward_backward_batch (verl 0.9.1,
    transformer_impl.py:432-467), and in prepare_model_outputs (:933-940), with verl's own micro-batches and their
    reordering."""
    from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

    controller = engine._router_replay

    def infer_batch(data):
        assert tu.get_non_tensor_data(data, "enable_routing_replay", default=False)
        micro_batches, indices = prepare_micro_batches(data)
        controller.begin_record()
        outputs = []
        for micro_batch in micro_batches:
            controller.begin_microbatch()
            with torch.no_grad():
                engine.module(**packed(micro_batch))
            routes = torch.nested.nested_tensor_from_jagged(
                controller.take_recorded(), micro_batch["input_ids"].offsets()
            )
            outputs.append({"model_output": {"routed_experts": routes}})
        controller.clear()
        merged = postprocess_batch_func(outputs, indices, data)["model_output"]
        return TensorDict(merged, batch_size=len(data))

    return infer_batch


def packed(micro_batch):
    """Arguments for one row of packed sequences that do not see each other."""
    ids = micro_batch["input_ids"]
    lengths = ids.offsets().diff()
    which = torch.repeat_interleave(lengths)
    seen = (which.unsqueeze(0) == which.unsqueeze(1)).tril()
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    return {
        "input_ids": ids.values().unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "attention_mask": torch.where(seen, 0.0, -torch.inf)[None, None],
    }


@torch.no_grad()
def transformers_routes(engine, index):
    """[n, L, K] of one sequence by itself, from the routers' outputs."""
    seen = []
    gates = [module for name, module in engine.module.named_modules() if name.endswith("mlp.gate")]
    handles = [gate.register_forward_hook(lambda gate, args, output: seen.append(output[2])) for gate in gates]
    engine.module(sequences()[index].unsqueeze(0))
    for handle in handles:
        handle.remove()
    return torch.stack(seen, dim=1)


@pytest.mark.shows("router agreement", engine="veomni")
def test_a_disagreement_with_veomnis_controller_is_found_at_its_token_and_layer(monkeypatch):
    engine = veomni_engine(monkeypatch)
    routing = RecordedRouting(worker_config("disabled", "veomni"))
    routing.prepare(engine)
    assert routing.recorders == Recorders("Qwen3MoeTopKRouter", MOE, LAYERS, EXPERTS)
    rollout = as_rollout([transformers_routes(engine, index) for index in range(len(LENGTHS))])
    output = routing.compute(veomni_infer(engine), batch(routed=plant(rollout, 3, 3, 1)))
    check_planted(output, 3, 3, 0)


def test_veomni_without_verls_controller_is_refused(monkeypatch):
    engine = veomni_engine(monkeypatch)
    engine._router_replay.uninstall()
    with pytest.raises(HookError, match=r"installed no recorder of routing in VeOmni"):
        RecordedRouting(worker_config("disabled", "veomni")).prepare(engine)
