"""verl's real MegatronEngineWithLMHead on CPU cores, a GPTModel of megatron-core in it.

Its forward_backward_batch with recording, gathering and replay is verl's own. Replaced are the bridge to Hugging Face
weights, the attention for packed sequences (by the package's own stand-in), and what megatron-core calls on torch.cuda.
"""

import contextlib
from types import SimpleNamespace

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.support.recorded_routes import (
    EXPERTS,
    LAYERS,
    TOP_K,
    batch,
    sequences,
    worker_config,
)
from verl_ext.cpu.platform import stand_ins
from verl_ext.routing.megatron import RecordedRouting


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def put_on_cpu(patch):
    """Patches what megatron-core 0.16.1 calls on torch.cuda, and what it uses of Transformer Engine without a check."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils
    from verl.workers.engine.megatron import transformer_impl

    for name, stand_in in stand_ins().items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    patch.setattr(CudaRNGStatesTracker, "fork", lambda self, *args: contextlib.nullcontext())
    patch.setattr(transformer_impl, "set_random_seed", torch.manual_seed)


def verls_patch(patch):
    """verl's patch of megatron-core, undone with `patch`."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.utils.megatron.router_replay_patch import apply_router_replay_patch

    for owner, names, mark in (
        (TopKRouter, ("__init__", "routing"), "_router_replay_patched"),
        (TransformerConfig, ("__init__",), "_verl_router_patched"),
        (MoEAlltoAllTokenDispatcher, ("preprocess",), "_preprocess_patched"),
    ):
        for name in names:
            patch.setattr(owner, name, getattr(owner, name))
        patch.setattr(owner, mark, True, raising=False)
        delattr(owner, mark)
    apply_router_replay_patch()


SOFTMAX = {"moe_router_score_function": "softmax"}
PRE_SOFTMAX = SOFTMAX | {"moe_router_pre_softmax": True}
SIGMOID_GROUPS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
}
KINDS = {"softmax": SOFTMAX, "softmax before top-k": PRE_SOFTMAX, "DeepSeek-V3": SIGMOID_GROUPS}


def top_k_router(settings, experts=16, top_k=4):
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_load_balancing_type="none",
        moe_enable_routing_replay=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **settings,
    )
    router = TopKRouter(config, SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None))
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.3, 0.3, experts)[torch.randperm(experts)])
    return router


def build_engine(mode, parallel=None, moe_layer_freq=(0, 1, 1, 1)):
    """verl's MegatronEngineWithLMHead around a GPTModel with equal weights on equal ranks."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from verl_ext.cpu.transformer_engine import TEDotProductAttention

    parallel = parallel or {}
    tensor, virtual = (parallel.get(f"{name}_model_parallel_size") for name in ("tensor", "virtual_pipeline"))

    class Norm(nn.RMSNorm):
        def __init__(self, config, hidden_size, eps=1e-5, **kwargs):
            super().__init__(hidden_size, eps)

    class Engine(MegatronEngineWithLMHead):
        def _build_tf_config(self):
            self.is_value_model, self.param_dtype = False, torch.float32
            self.provider = self.bridge = self.peft_cls = None
            self.tf_config = TransformerConfig(
                num_layers=LAYERS,
                hidden_size=32,
                num_attention_heads=2,
                ffn_hidden_size=32,
                moe_ffn_hidden_size=16,
                num_moe_experts=EXPERTS,
                moe_router_topk=TOP_K,
                moe_layer_freq=list(moe_layer_freq),
                moe_token_dispatcher_type="alltoall",
                moe_router_load_balancing_type="none",
                moe_enable_routing_replay=self.enable_routing_replay,
                normalization="RMSNorm",
                add_bias_linear=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
                gradient_accumulation_fusion=False,
                pipeline_dtype=torch.float32,
                variable_seq_lengths=True,
                batch_p2p_comm=False,
                overlap_p2p_comm=virtual is not None,
                sequence_parallel=tensor is not None,
                **parallel,
            )

        def _build_megatron_module(self):
            return [self.chunk(stage) for stage in (range(virtual) if virtual else [None])]

        def chunk(self, stage):
            spec = get_gpt_decoder_block_spec(self.tf_config, False, normalization="RMSNorm", vp_stage=stage)
            spec.layer_norm = Norm
            for layer in spec.layer_specs:
                layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
                layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
            where = {"ignore_virtual": False, "vp_stage": stage}
            model = GPTModel(
                self.tf_config,
                spec,
                vocab_size=32,
                max_sequence_length=64,
                position_embedding_type="rope",
                pre_process=mpu.is_pipeline_first_stage(**where),
                post_process=mpu.is_pipeline_last_stage(**where),
                vp_stage=stage,
            )
            generator = torch.Generator().manual_seed(5)
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(0, 0.3, generator=generator)
            return model

    config = RecordedRouting(worker_config(mode, forward_only=True, **parallel)).config.engine_config
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe"),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        model_type="language_model",
        tokenizer=SimpleNamespace(pad_token_id=0),
        get=lambda name, default=None: default,
    )
    engine = Engine(model_config, config, None, None)
    engine.initialize()
    return engine


def worker_of(engine):
    """The parts of verl's TrainingWorker that its infer_batch touches; the method is verl's."""
    from verl.workers.engine_workers import TrainingWorker

    worker = object.__new__(TrainingWorker)
    vars(worker).update(
        engine=engine,
        engine_config=engine.engine_config,
        model_config={"use_remove_padding": True},
        loss_fn=None,
        device_name="cpu",
        flops_counter=None,
    )
    return worker


def sequence_routes(engine, index):
    """[n, L, K] expert ids of one sequence by itself, from the routers' own outputs: the oracle."""
    from megatron.core.transformer.moe.router import TopKRouter

    seen, handles = {}, []
    for chunk in engine.module:
        for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):

            def keep(module, args, output):
                seen[module.layer_number] = output[1].nonzero()[:, 1].view(-1, TOP_K)

            handles.append(router.register_forward_hook(keep))
    with OnCPU(), engine.eval_mode():
        engine.infer_batch(batch([index]))
    for handle in handles:
        handle.remove()
    return torch.stack([seen[layer] for layer in sorted(seen)], dim=1)


def sequence_logits(engine):
    """A sequence's ids -> [n, V] logits of it by itself, from the model's LM head."""

    def logits(ids):
        index = next(i for i, row in enumerate(sequences()) if torch.equal(row, ids))
        seen = []
        keep = engine.module[0].output_layer.register_forward_hook(
            lambda module, args, output: seen.append(output[0].detach().transpose(0, 1).flatten(0, 1).clone())
        )
        with OnCPU(), engine.eval_mode():
            engine.infer_batch(batch([index]))
        keep.remove()
        return seen[0][: len(ids)]

    return logits


def prepared(mode, engine):
    routing = RecordedRouting(worker_config(mode, forward_only=True))
    routing.prepare(engine)
    return routing


def infer(engine):
    worker = worker_of(engine)

    def infer_batch(data):
        with OnCPU():
            return worker.infer_batch(data)

    return infer_batch
