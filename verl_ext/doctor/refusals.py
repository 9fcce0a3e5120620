"""What verl and megatron-core would refuse when their parts are built, read from their sources (`reached.py`).

Each version of them answers for itself, with its own words. A rule with a reason and a fix is better: what another
check has said of the same settings is not repeated.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, error, warning
from verl_ext.doctor.reached import Refusal, as_verl_has_it, refused_by
from verl_ext.features.verl_config import ACTOR, MODE, MODEL, ROLLOUT
from verl_ext.launch.names import similar
from verl_ext.launch.packages import LAYERS, MEGATRON, package_folder, source
from verl_ext.launch.refused import is_plain

ARP, OPTIM, NAME = "actor_rollout_ref", f"{ACTOR}.optim", f"{ROLLOUT}.name"
V1 = "trainer.use_v1"
CHECK = "refusals"
CONFIGS = "transformer/transformer_config.py"
BY_VERL = {"moe_token_dispatcher_type": "alltoall", "variable_seq_lengths": True}  # and by mbridge
# An argument, an attribute, a field or a key.
ASSIGNED = re.compile(r"""(\w+)(?:["']\])?(?:: [^=\n]+)? ?=(?!=)|["'](\w+)["']:|^    (\w+): """, re.MULTILINE)
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)


@dataclass(frozen=True)
class Part:
    """A class of verl that a run builds from its settings.

    Attributes:
        path: its file.
        methods: those that run at the start or in the first step, in their order.
        settings: attributes of `self` and arguments of the methods -> the settings that they are.
        known: attributes and arguments whose values are always these.
        used: returns whether the run has the part.
    """

    path: str
    name: str
    methods: tuple[str, ...]
    settings: Mapping[str, str]
    used: Callable[[Context], Any] = bool
    known: Mapping[str, Any] = field(default_factory=dict)


def _with(setting: str, value: Any) -> Callable[[Context], bool]:
    return lambda context: context.get(setting) == value


def _splits(engine: str, context: Context) -> bool:
    return context.get(NAME) == engine and bool(context.get(f"{ROLLOUT}.disaggregation.enabled"))


WHOLE = {"config": ""}
OF_ROLLOUT = {"config": ROLLOUT, "rollout_config": ROLLOUT}
TRAINER = "trainer/ppo/v1/trainer_base.py"
AT_ITS_START = ("_init_dataloader", "_build_replay_buffer", "_init_resource_pool_mgr", "_next_train_batch")
PARTS = (
    Part(TRAINER, "PPOTrainer", AT_ITS_START, WHOLE | {"trainer_mode": MODE}, _with(V1, True), {"num_prompts": None}),
    Part(
        "trainer/ppo/v1/trainer_separate_async.py",
        "PPOTrainerSeparateAsync",
        ("__init__",),
        WHOLE,
        _with(MODE, "separate_async"),
    ),
    Part(
        "experimental/fully_async_policy/fully_async_rollouter.py",
        "FullyAsyncRollouter",
        ("__init__", "_validate_config"),
        WHOLE,
        lambda context: "fully_async_main" in context.entry,
    ),
    Part(
        "workers/engine_workers.py",
        "ActorRolloutRefWorker",
        ("init_model",),
        {"config": ARP},
        known={"role": "actor_rollout"},
    ),
    Part(
        "workers/engine/fsdp/transformer_impl.py",
        "FSDPEngine",
        ("__init__",),
        {"model_config": MODEL, "engine_config": f"{ACTOR}.fsdp_config", "optimizer_config": OPTIM},
        lambda context: context.on_fsdp,
    ),
    Part(
        "workers/engine/megatron/transformer_impl.py",
        "MegatronEngine",
        ("__init__", "initialize"),
        {"model_config": MODEL, "engine_config": MEGATRON, "optimizer_config": OPTIM},
        lambda context: context.on_megatron,
    ),
    Part(
        "workers/engine/megatron/transformer_impl.py",
        "MegatronEngineWithLMHead",
        ("postprocess_micro_batch_func",),
        {"model_config": MODEL, "engine_config": MEGATRON, "tf_config": LAYERS},
        lambda context: context.on_megatron,
        {"loss_function": "a loss"},
    ),
    Part("checkpoint_engine/base.py", "CheckpointEngineWorker", ("__init__",), OF_ROLLOUT),
    Part(
        "workers/rollout/vllm_rollout/vllm_async_server.py",
        "vLLMHttpServer",
        ("launch_server", "_preprocess_engine_kwargs"),
        OF_ROLLOUT | {"model_config": MODEL, "engine_kwargs": f"{ROLLOUT}.engine_kwargs.vllm"},
        lambda context: context.with_vllm,
    ),
    Part(
        "workers/rollout/sglang_rollout/async_sglang_server.py",
        "SGLangHttpServer",
        ("launch_server",),
        OF_ROLLOUT | {"model_config": MODEL},
        lambda context: context.with_sglang,
    ),
    *(
        Part(
            f"workers/rollout/{engine.lower()}_rollout/{engine.lower()}_pd_replica.py",
            f"{engine}PDReplica",
            ("__init__",),
            OF_ROLLOUT,
            partial(_splits, engine.lower()),
        )
        for engine in ("vLLM", "SGLang")
    ),
)


@check("refusals", needs="engine", after=("names", "sizes", "verl's settings"))
def refused_parts(context: Context) -> Iterable[Problem]:
    """What the classes of verl that the run builds refuse or warn of: trainer, workers, engines, servers, transfer of
    the weights. What another check has said of the same settings is not repeated.

    Source: the classes of PARTS, as installed.
    """
    for part in PARTS:
        if not part.used(context):
            continue
        values = {name: context.get(setting) if setting else context.config for name, setting in part.settings.items()}
        known = {name: value for name, value in values.items() if value is not None} | dict(part.known)
        classes = _classes_in("verl", part.path, part.name)
        found = refused_by(classes, part.methods, known, part.settings, partial(_imported_in, part.path))
        yield from _problems(context, "verl", part.name, found)


def _problems(context: Context, package: str, name: str, found: Sequence[Refusal]) -> Iterator[Problem]:
    """Yields what no other check has said: of a refusal, the errors; of a warning, everything."""
    if not found:
        return
    said = [one for rule, those in context.found.items() if rule != CHECK for one in those if one.level != "ok"]
    of_errors, of_all = _words_of(one for one in said if one.level == "error"), _words_of(said)
    for each in found:
        if not (of_errors if each.stops else of_all).isdisjoint(name.rpartition(".")[2] for name in each.settings):
            continue
        values = ", ".join(f"{name}={context.get(name)}" for name in each.settings if _is_in_config(context, name))
        where = f"{package}'s {name}.{each.method}"
        if each.stops:
            why = f"{where} stops: {each.said}" if values else f"{where} stops"
            yield error(values or each.said, why, *_fix(context, each.mends))
        elif set(each.settings) & context.given:
            yield warning(values, f"{where} warns: {each.said}")


def _words_of(said: Iterable[Problem]) -> set[str]:
    """Returns the words of findings and of their fixes."""
    return {word for one in said for text in (one.found, *one.fix) for word in re.findall(r"\w+", text)}


def _fix(context: Context, mends: tuple[str, Any] | None) -> Iterator[str]:
    """Yields the override that sets a setting to a value, unless the launch sets it, or it would change the layout."""
    changes_more = mends is not None and (mends[0] in context.given or mends[0].endswith("_parallel_size"))
    if mends is not None and not changes_more and is_plain(mends[1]):
        plus = "" if _is_in_config(context, mends[0]) else "++"
        yield f"{plus}{mends[0]}={str(mends[1]).lower() if isinstance(mends[1], bool) else mends[1]}"


def _is_in_config(context: Context, name: str) -> bool:
    above, _, leaf = name.rpartition(".")
    return leaf in context.get(above, ())


@cache
def _classes_in(package: str, path: str, *names: str) -> tuple[ast.ClassDef, ...]:
    """Returns classes of a file in their order; none if the package is not installed."""
    text = source(package_folder(package), path)
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    return tuple(classes[name] for name in names if name in classes)


@cache
def _imported_in(path: str, name: str) -> ast.FunctionDef | None:
    """Returns a function that a file of verl imports from another one; None if there is none."""
    folder = package_folder("verl")
    for node in ast.walk(ast.parse(source(folder, path))):
        if isinstance(node, ast.ImportFrom) and name in [one.name for one in node.names if node.module]:
            place = f"{str(node.module).removeprefix('verl.').replace('.', '/')}.py"
            functions = (one for one in ast.parse(source(folder, place)).body if isinstance(one, ast.FunctionDef))
            return next((one for one in functions if one.name == name), None)
    return None


@check("Megatron's layers", needs="on_megatron", after=("sizes",))
def refused_layers(context: Context) -> Iterable[Problem]:
    """What megatron-core's `TransformerConfig` refuses of the model, the parallel sizes and
    `override_transformer_config`, and settings there that it does not have. What another check has said of the same
    settings is not repeated.

    Source: `__post_init__` of TransformerConfig and ModelParallelConfig, as installed; workers/engine/megatron/
    transformer_impl.py of verl 0.9.1. A field that a bridge sets for some models is not known.
    """
    configs: Sequence[ast.ClassDef] = (
        *_classes_in("megatron.core", CONFIGS, "MLATransformerConfig", "TransformerConfig"),
        *_classes_in("megatron.core", "model_parallel_config.py", "ModelParallelConfig"),
    )
    set_by_bridges = _set_by_bridges()
    if len(configs) < 3 or not set_by_bridges:
        return
    latent, *configs = configs
    layers = {str(name): as_verl_has_it(context.get(f"{LAYERS}.{name}")) for name in context.get(LAYERS, {})}
    defaults = _field_defaults(configs)
    nodes = (node for one in (latent, *configs) for node in one.body)
    fields = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    patched = context.get("trainer.device") == "npu"  # MindSpeed adds settings
    if strange := () if patched else sorted(layers.keys() - fields - set_by_bridges):
        near = [one for name in strange for one in similar(name, fields)]
        why = "neither megatron-core nor a bridge has such a setting"
        why += f"; similar: {', '.join(near)}" if near else ""
        names = [f"{LAYERS}.{name}" for name in strange]
        yield warning(", ".join(names), why, *(f"~{name}" for name in names))
    given = {name: context.get(f"{MEGATRON}.{name}") for name in SIZES} | layers
    places = {name: f"{MEGATRON if name in SIZES else LAYERS}.{name}" for name in (*given, *BY_VERL)}
    facts = {name: value for name, value in defaults.items() if name not in set_by_bridges}
    facts |= _of_model(context) | BY_VERL | given
    if facts["tensor_model_parallel_size"] == 1:
        facts["sequence_parallel"] = False  # McoreEngineConfig
    facts = {name: value for name, value in facts.items() if value is not None or name in defaults}
    found = refused_by(configs, ("__post_init__",), facts, places)
    yield from _problems(context, "megatron-core", "TransformerConfig", [each for each in found if each.stops])


def _of_model(context: Context) -> dict[str, int]:
    """Returns the fields of a TransformerConfig that the model decides, if its shape is known."""
    if (shape := context.shape) is None:
        return {}
    experts = {"num_moe_experts": shape.routed_experts, "moe_router_topk": shape.top_k} if shape.routed_experts else {}
    return {"num_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads, **experts}


def _field_defaults(classes: Iterable[ast.ClassDef]) -> dict[str, Any]:
    """Returns field -> its default, of dataclasses; without those that are no plain value."""
    fields = [node for one in classes for node in one.body if isinstance(node, ast.AnnAssign)]
    return {
        ast.unparse(node.target): node.value.value for node in reversed(fields) if isinstance(node.value, ast.Constant)
    }


@cache
def _set_by_bridges() -> frozenset[str]:
    """Returns what mbridge or Megatron-Bridge assign where they make the settings of a model's layers; nothing without
    them."""
    roots = (("megatron.bridge", "models"), ("mbridge", "."))
    folders = [folder / path for package, path in roots if (folder := package_folder(package))]
    texts = (file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py"))
    return frozenset(name for text in texts for found in ASSIGNED.findall(text) for name in found)
