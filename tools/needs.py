"""Lists what each of our hooks needs from verl, and what a verl lacks. It reads the sources, and imports or runs none.

    python tools/needs.py                  the installed verl
    python tools/needs.py PATH/TO/verl     a checkout of verl's repository

A need is one line of a small language, about a dotted name in verl:

    a.b.C.method(self, batch)     it is there, with these parameters; `...` for more that may follow
    a.b.C.method: first, second   it is there, and its body names these: it calls our override, or reads what we set
    a.b.NAME                      it is there

Equal parameters do not prove that they mean the same; the tests of docs/upstream.md do.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "verl_ext"
TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
WORKER = "verl.workers.engine_workers"
ENGINE = "verl.workers.engine"
ALGORITHMS = "verl.trainer.ppo.core_algos"
ROLLOUT = "verl.workers.rollout"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None  # None: a variable, or foreign


@dataclass(frozen=True)
class Hook:
    """A place where verl calls something of ours.

    Attributes:
        name: the name of the change in `changes.py`, or a description.
        file: our file, within `verl_ext`.
        needs: lines as above.
    """

    name: str
    file: str
    needs: tuple[str, ...]


HOOKS = (
    Hook(
        "agent_loop",
        "upstream/agent_loop.py",
        (
            f"{ROLLOUT}.vllm_rollout.vllm_async_server.vLLMHttpServer.generate"
            "(self, prompt_ids, sampling_params, ...): SamplingParams, extract_prompt_logprobs, routed_experts, "
            "extra_fields",
            f"{ROLLOUT}.llm_server.LLMServerClient.generate(self, request_id, *, prompt_ids, sampling_params, ...)",
            "verl.experimental.agent_loop.agent_loop.AgentLoopWorker._run_agent_loop: rollout_trace_attr",
            "verl.experimental.agent_loop.agent_loop.AgentLoopOutput.as_dict(self): routed_experts",
            "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop._handle_generating_state: request_id, "
            "routed_experts",
        ),
    ),
    Hook(
        "sampler_head_reader",
        "workers/head.py",
        (
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.forward_backward_batch(self, data, loss_function, ...)",
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs: logits_processor_func",
        ),
    ),
    Hook(
        "the entry point",
        "start.py",
        (
            "verl.trainer.main_ppo.TaskRunnerV1.run(self, config)",
            "verl.trainer.main_ppo.run_ppo(config, task_runner_class)",
            "verl.trainer.main_ppo.main(config)",
            "verl.utils.config.validate_config(config, use_reference_policy, use_critic)",
        ),
    ),
    Hook(
        "load_schedule",
        "plugins/verl.py",
        (f"{ENGINE}.megatron.transformer_impl.MegatronEngine.load_checkpoint(self, ...)",),
    ),
    Hook(
        "stability_trainers",
        "trainer/trainers.py",
        (
            "verl.trainer.ppo.v1.trainer_base.get_trainer_cls: TRAINER_REGISTRY",
            f"{TRAINER}.__init__(self, config)",
            f"{TRAINER}.init(self)",
            f"{TRAINER}.fit(self, agent_loop_manager): on_step_begin, step, _save_checkpoint, _compute_metrics",
            f"{TRAINER}.step(self, metrics, timing_raw)",
            f"{TRAINER}._step_once: _compute_old_log_prob, _compute_ref_log_prob, _compute_values, _compute_advantage, "
            "_update_critic, _update_actor",
            f"{TRAINER}.on_step_begin(self)",
            f"{TRAINER}.on_step_end(self)",
            *(
                f"{TRAINER}.{name}(self, batch, metrics)"
                for name in (
                    "_compute_old_log_prob",
                    "_compute_ref_log_prob",
                    "_compute_values",
                    "_compute_advantage",
                    "_update_critic",
                    "_update_actor",
                )
            ),
            f"{TRAINER}._compute_metrics(self, batch, metrics, ...)",
            f"{TRAINER}._load_checkpoint(self)",
            f"{TRAINER}._save_checkpoint(self)",
            f"{TRAINER}._rollout_server_managers(self)",
        ),
    ),
    Hook(
        "stability_workers",
        "workers/actor.py",
        (
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
    Hook(
        "policy losses and the workers' loss",
        "workers/worker_loss.py",
        (
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
        "advantage estimators",
        "features/advantages.py",
        (f"{ALGORITHMS}.register_adv_est(name_or_enum)", f"{ALGORITHMS}.ADV_ESTIMATOR_REGISTRY"),
    ),
    Hook(
        "mini_batch_gate",
        "workers/gate.py",
        (
            f"{ENGINE}.base.BaseEngine.train_batch(self, data, loss_function): optimizer_step",
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.optimizer_step(self)",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.optimizer_step: optimizer",
            f"{ENGINE}.base.BaseEngine.is_mp_src_rank_with_outputs(self)",
        ),
    ),
    Hook(
        "fsdp_routing, shift_recorder",
        "routing/fsdp.py",
        (
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngineWithLMHead.forward_step"
            "(self, micro_batch, loss_function, forward_only): model_output",
            f"{WORKER}.ActorRolloutRefWorker.compute_log_prob(self, data)",
            f"{TRAINER}._compute_old_log_prob: calculate_entropy",
        ),
    ),
    Hook(
        "shift_recorder of Megatron",
        "routing/router_shift.py",
        (
            f"{ENGINE}.megatron.transformer_impl.MegatronEngineWithLMHead.forward_step"
            "(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngineWithLMHead.postprocess_micro_batch_func: model_output",
        ),
    ),
    Hook(
        "recorded routing of Megatron",
        "routing/megatron.py",
        (
            "verl.utils.megatron.router_replay_utils.iter_model_routers(model)",
            "verl.utils.megatron.router_replay_utils.get_moe_num_layers_to_build(config, vp_stage, pp_rank)",
        ),
    ),
    Hook(
        "megatron_replay",
        "routing/megatron.py",
        (
            "verl.utils.megatron.router_replay_patch.RouterReplay.get_replay_topk"
            "(self, scores, topk, num_groups, group_topk, default_compute_topk)",
            "verl.utils.megatron.router_replay_utils.merge_router_topk_indices: moe_router_topk, recorded_topk_idx",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.forward_backward_batch: record_r2_routes",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngineWithLMHead.forward_step(self, batch_iter, model, ...): "
            "record_r2_routes, merge_router_topk_indices, is_replay_forward_action, align_r3_router_replay_data",
        ),
    ),
    Hook(
        "replica_fetch",
        "workers/replica_fetch.py",
        (
            "verl.utils.transferqueue_utils._meta_to_realdata(meta)",
            "verl.utils.transferqueue_utils.tqbridge: _meta_to_realdata",
            "verl.utils.transferqueue_utils.kv_batch_meta2batch_meta(meta)",
            f"{WORKER}.TrainingWorker.__init__: get_data_parallel_rank",
            f"{WORKER}.ActorRolloutRefWorker.init_model: actor_worker_cls, get_dispatch_collect",
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine._init_device_mesh: ulysses_parallel_group",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.get_model_parallel_group(self)",
        ),
    ),
    Hook(
        "keep_metrics",
        "trainer/logs.py",
        (
            "verl.utils.tracking.FileLogger(project_name, experiment_name)",
            "verl.utils.tracking.FileLogger.log: fp",
            "verl.utils.tracking.Tracking.__init__: FileLogger",
        ),
    ),
    Hook(
        "engine_calls",
        "upstream/engine_calls.py",
        (
            f"{ROLLOUT}.vllm_rollout.vllm_async_server.vLLMHttpServer: _server_task, engine",
            f"{ROLLOUT}.llm_server.LLMServerManager: server_handles",
        ),
    ),
    Hook(
        "the watch on the rollout",
        "trainer/watch.py",
        (
            f"{ROLLOUT}.vllm_rollout.vllm_async_server.vLLMHttpServer: engine",
            "verl.experimental.agent_loop.agent_loop.AgentLoopManager: agent_loop_workers",
            "verl.experimental.reward_loop.reward_loop.RewardLoopManager: reward_loop_workers",
            f"{ROLLOUT}.llm_server.LLMServerManager: server_handles",
        ),
    ),
    Hook(
        "sglang_calls",
        "upstream/engine_calls.py",
        (f"{ROLLOUT}.sglang_rollout.async_sglang_server.SGLangHttpServer: _server_task, tokenizer_manager",),
    ),
    Hook(
        "probe_trainer",
        "probe/trainer.py",
        (
            f"{TRAINER}.fit: step, on_step_end, _compute_metrics",
            f"{TRAINER}.step(self, metrics, timing_raw)",
            f"{TRAINER}._step_once: replay_buffer, sample, on_sample_end, _balance_batch",
            f"{TRAINER}.prepare_step(self)",
        ),
    ),
    Hook(
        "undo",
        "workers/undo.py",
        (
            f"{ENGINE}.fsdp.transformer_impl.FSDPEngine.optimizer_step: optimizer, scaler, module",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.optimizer_step: optimizer",
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.lr_scheduler_step: lr_scheduler",
        ),
    ),
    Hook("settings_alone", "doctor/hooks.py", ("verl.workers.config", "verl.utils.config.validate_config")),
    Hook("the plugin", "plugins/verl.py", ("verl: verl.plugins",)),
    Hook(
        "on CPU cores",
        "cpu/patches.py",
        (
            "verl.plugin.platform.PlatformRegistry.register",
            f"{ENGINE}.base.EngineRegistry._engines",
            f"{ENGINE}.fsdp.transformer_impl: CPUOffloadPolicy",
            "verl.checkpoint_engine.CheckpointEngineRegistry.register",
            f"{ROLLOUT}.vllm_rollout.utils.vLLMColocateWorkerExtension",
        ),
    ),
    Hook(
        "Megatron on CPU cores",
        "cpu/megatron.py",
        (
            f"{ENGINE}.megatron.transformer_impl.MegatronEngine.__init__",
            "verl.workers.config.engine.McoreEngineConfig.__post_init__(self)",
        ),
    ),
)


def unmet(need: str, verl: "Source") -> str:
    """Returns what a verl lacks for a need; "" if it lacks nothing."""
    wanted, _, names = need.partition(": ")
    name, called, listed = wanted.rstrip(")").partition("(")
    try:
        found = verl.find(name)
    except LookupError as error:
        return str(error)
    if called:
        given = parameters(found)
        fits = f"{given}, ".startswith(listed.removesuffix("...")) if listed.endswith("...") else given == listed
        if not fits:
            return f"{name} takes ({given}), not ({listed})"
    if names:
        body = mentioned(found if found is not None else verl.tree(name))
        if missing := [one for one in names.split(", ") if one not in body]:
            return f"{name} no longer names {', '.join(missing)}"
    return ""


def imports(folder: Path = PACKAGE) -> Iterator[Hook]:
    """Yields what each of our files imports from verl, as needs."""
    for file in sorted(folder.rglob("*.py")):
        needs = [
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl"
            for alias in node.names
        ]
        if needs:
            name = file.relative_to(folder).as_posix()
            yield Hook(f"imports of {name}", name, tuple(needs))


def broken(verl: "Source", hooks: Iterable[Hook] | None = None) -> dict[str, list[str]]:
    """Returns hook -> what it needs and this verl lacks; {} if every hook finds what it needs."""
    every = [*HOOKS, *imports()] if hooks is None else hooks
    found = {hook.name: [what for need in hook.needs if (what := unmet(need, verl))] for hook in every}
    return {name: lacks for name, lacks in found.items() if lacks}


def source_of(path: Path) -> "Source":
    """Returns the source from the path of a checkout of verl's repository, of the package, or of its `__init__.py`."""
    package = path.resolve().parent if path.suffix == ".py" else path.resolve()
    return Source(package / "verl" if (package / "verl" / "__init__.py").is_file() else package)


def main(arguments: Sequence[str]) -> int:
    spec = None if arguments else find_spec("verl")
    verl = source_of(Path(arguments[0] if arguments else spec.origin if spec and spec.origin else "verl"))
    if verl.tree("verl") is None:
        print(f"no verl in {verl.folder}: give a checkout of its repository, or install it", file=sys.stderr)
        return 2
    version = (verl.folder / "version" / "version").read_text(encoding="utf-8").strip()
    lacking = broken(verl)
    print(f"verl {version}: {len(lacking)} hooks lack something" if lacking else f"verl {version}: every hook fits")
    for name, lacks in lacking.items():
        print(f"{name}", *(f"    {what}" for what in lacks), sep="\n")
    return 1 if lacking else 0


class Source:
    """The definitions in a package's source files, with their parameters; nothing is imported.

    Args:
        folder: the package's folder, which has the package's name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Returns a module's syntax tree; None if there is no such module."""
        if module not in self._trees:
            self._trees[module] = self._parsed(module)
        return self._trees[module]

    def _parsed(self, module: str) -> ast.Module | None:
        package, *parts = module.split(".")
        if package != self.folder.name:
            return None
        place = self.folder.joinpath(*parts)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, name: str) -> Definition:
        """Returns the definition that a dotted name stands for, through re-exports and base classes.

        Raises:
            LookupError: which part of it is missing.
        """
        asked, path = self._split(name)
        module, found = asked, None
        for index, part in enumerate(path):
            where = ".".join([asked, *path[:index]])
            if index and not isinstance(found, ast.ClassDef):
                raise LookupError(f"{where} is no class")
            try:
                module, found = self._top(module, part) if index == 0 else self._member(module, found, part)
            except LookupError:
                raise LookupError(f"{where}.{part} is missing") from None
        return found

    def _split(self, name: str) -> tuple[str, list[str]]:
        """Returns the longest module in a dotted name, and the rest of the name."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if self.tree(module := ".".join(parts[:end])) is not None:
                return module, parts[end:]
        raise LookupError(f"{parts[0]} is missing")

    def _top(self, module: str, name: str) -> tuple[str, Definition]:
        """Returns (module that defines it, definition) of a name at the top of a module."""
        tree = self.tree(module)
        if tree is None:
            raise LookupError(module)
        for node in _statements(tree.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
                return module, None
            if isinstance(node, ast.Import) and any(name == (a.asname or a.name.split(".")[0]) for a in node.names):
                return module, None
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        try:
                            return self._top(origin, name)
                        except LookupError:
                            continue
                    if name == (alias.asname or alias.name):
                        return self._imported(origin, alias.name)
        if self.tree(f"{module}.{name}") is not None:
            return f"{module}.{name}", None
        raise LookupError(name)

    def _imported(self, origin: str, name: str) -> tuple[str, Definition]:
        if origin.split(".")[0] != self.folder.name:
            return origin, None
        return self._top(origin, name)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.folder.joinpath(*module.split(".")[1:]).is_dir()
        parts = module.split(".")
        above = parts[: len(parts) - node.level + package]
        return ".".join([*above, node.module] if node.module else above)

    def _member(self, module: str, owner: Definition, name: str) -> tuple[str, Definition]:
        """Returns (module, definition) of a class's member, its own or that of a base class in this package."""
        assert isinstance(owner, ast.ClassDef)
        for node in _statements(owner.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
                return module, None
        for base in owner.bases:
            try:
                where, found = self._top(module, ast.unparse(base).split(".")[0])
                if isinstance(found, ast.ClassDef):
                    return self._member(where, found, name)
            except LookupError:
                continue
        raise LookupError(name)


def parameters(definition: Definition) -> str:
    """Returns `self, batch, metrics` of a function, or the parameters of a class's `__init__` without its self."""
    if isinstance(definition, ast.ClassDef):
        inits = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        return parameters(inits[0]).partition(", ")[2] if inits else ""
    if definition is None:
        return ""
    every = definition.args
    starred = [f"*{one.arg}" for one in (every.vararg,) if one] or ["*"] * bool(every.kwonlyargs)
    named = [one.arg for one in (*every.posonlyargs, *every.args)]
    return ", ".join(
        [*named, *starred, *(one.arg for one in every.kwonlyargs), *(f"**{o.arg}" for o in [every.kwarg] if o)]
    )


def mentioned(definition: "Definition | ast.Module") -> set[str]:
    """Returns the names, attributes and strings in the body of a function or a class."""
    nodes = ast.walk(definition) if definition is not None else ()
    found = set()
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.add(text)
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that may run when the module or class is made, the last one first: it defines a name."""
    for node in reversed(body):
        blocks = [getattr(node, part, []) for part in ("finalbody", "orelse", "body")]
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in [*blocks, *(handler.body for handler in getattr(node, "handlers", []))]:
                yield from _statements(block)
        yield node


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
