"""Checks that verl_ext's hooks attach and that verl accepts the config; lists code of the config that was not run.

The run itself makes the same checks before Ray starts. The doctor must not execute code that a config names
unless --trust allows it. A config names code in

    stability.plugins             imported by `StabilityConfig`
    model.trust_remote_code       lets transformers import Python files in the model's folder
    _target_                      called by `hydra.utils.instantiate` in verl's `validate_config`: any callable
    hydra.searchpath=[pkg://...]  imported by Hydra as it composes (`launch/command_line.py` refuses it before)

Other code, such as reward functions, data set classes, `external_lib`, agent loops and chat templates, is used only by
a run, never by these checks.

`passes_quickly` validates a config without `import verl`, which takes seconds. It is written for verl 0.9.1.
"""

import ast
import contextlib
import copy
import functools
import importlib
import io
import math
import os
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import Problem, errors_of, reason_of
from verl_ext.base.patching import Undo, apply_all, patch
from verl_ext.doctor.checks import ABSENT, Context, check, error, note, ok, unread, unset, warning
from verl_ext.doctor.reads import is_read_below, owners_of
from verl_ext.features import losses
from verl_ext.features.fit import fit
from verl_ext.features.table import apply_engine_settings, left_out, table_lines
from verl_ext.features.verl_config import (
    ACTOR,
    MODEL,
    ROLLOUT,
    is_folder_path,
    key_of,
    model_json,
    needs_critic,
    needs_reference,
    refers_to_actor,
)
from verl_ext.launch.command_line import MEGATRON_SIZE, NO_VERL
from verl_ext.launch.files import CODE
from verl_ext.launch.names import GROUPS, similar
from verl_ext.launch.packages import module_file, package_folder, source
from verl_ext.launch.refused import dataclass_fields, is_misspelt, is_read, replacement, words_of_verl
from verl_ext.upstream.agent_loop import MANAGER, PLACE, Extras, parse_extras, without_workers

NAME = f"{ROLLOUT}.name"
TRUST = f"{MODEL}.trust_remote_code"
BUILT = (ACTOR, "critic")  # what validate_config instantiates
FOLDERS = ("actor", "critic", "engine", "optim", "profiler")  # folders of verl's configs that compose BUILT
WORKERS = ("model", "optim", "profiler", "engine", "actor", "ref", "rollout")  # and what its workers build
OTHERS = 0.1  # the share of a node's names from which on verl hands the node to other code
INDIVISIBLE = re.compile(r"real_train_batch_size \((\d+)\) must be divisible by minimal possible batch size \((\d+)\)")
TOO_LARGE = re.compile(r"train_batch_size \((\d+)\) must be >= (actor|critic)\.ppo_mini_batch_size")
TARGET_LINE = re.compile(r"^\s*_target_:\s*([\w.]+)", re.MULTILINE)

BARE = ("verl", "verl.utils", "verl.utils.profiler", "verl.utils.qat")  # packages without their __init__
# Imports at the top of the settings' modules that they use only to load models or tensors.
HOLLOW = {
    "torch": (),
    "torch.nn": ("Module",),
    "transformers": ("AutoConfig",),
    "verl.utils": ("hf_processor", "hf_tokenizer"),
    "verl.utils.model": ("get_generation_config", "update_model_config"),
    "vllm": (),
    (RANKS := "verl.workers.rollout.vllm_rollout.utils"): (),
}
UNDECIDED = ImportError("only the whole of verl can decide")
CHECKS_RANK = "get_vllm_max_lora_rank"  # the one function of RANKS that `validate_config` calls
ON_TOP = "verl_ext.workers.loss_config"  # our dataclass, which inherits from one of these
KEPT = {"verl.utils.profiler": ("config", "ProfilerConfig"), "verl.utils.qat": ("core", "QATConfig")}


@check("config")
def config_composes(context: Context) -> Iterable[Problem]:
    """Overrides that do not compose, among them all settings that verl 0.9.1 does not have; no `rollout.name`; a
    setting that a plus sign adds, if nothing in verl reads it. A note: a setting that is given twice, with two values.

    Source: verl/trainer/config (0.9.1); in rollout/rollout.yaml, rollout.name is `???`, which is mandatory in Hydra.
    """
    stops = "the launch stops at it" if context.config is not None else "nothing else of the run was checked"
    if context.entry:
        why = "it is judged by verl's trainer and configs; what its own code does is not known here"
        yield note(f"{context.entry} is not verl's main_ppo", why)
        if context.entry.startswith("verl.") and context.config is not None and module_file(context.entry) is None:
            yield error(f"verl has no module {context.entry}", "the launch stops at it")
    for problem in context.refused:
        if problem.why == NO_VERL:  # `packages` says it
            continue
        said = (stops,) if problem.level == "error" else ()
        yield replace(problem, why="; ".join(filter(None, (*said, problem.why))))
    of_overrides = (problem for text in context.overrides for problem in _override_problems(text, context))
    yield from dict.fromkeys(of_overrides)
    yield from _given_twice(context.overrides) if context.config is not None else ()
    if context.config is not None and not context.get(NAME):
        yield error(f"{NAME} is missing", "verl has no default for it", f"{NAME}=vllm")


def _given_twice(overrides: Iterable[str]) -> Iterator[Problem]:
    """Yields each setting that has several values: Hydra applies one after the other, and adds up mappings
    (`_apply_overrides_to_config` of hydra/_internal/config_loader_impl.py, 1.3)."""
    given = dict[str, list[str]]()
    for text in overrides:
        value = text.partition("=")[2]
        if value and not value.startswith("{") and not text.startswith(("~", "-")):
            given.setdefault(key_of(text), []).append(value)
    for key, values in given.items():
        if len({value.lower() for value in values}) > 1:
            yield note(f"{key} is given {len(values)} times: {', then '.join(values)}", "Hydra takes the last")


def _override_problems(text: str, context: Context) -> Iterator[Problem]:
    yield from _replaces_a_node(key_of(text), context)
    if text.endswith("=") and not text.startswith(("~", "--")):
        yield warning(f"{text} is empty", "a variable of the launch's shell may not be set")
    elif text.startswith("+") and context.config is not None:
        yield from _added(key_of(text), context)


def _replaces_a_node(key: str, context: Context) -> Iterator[Problem]:
    """Yields a single value where verl's config has a node of settings: Hydra lets it replace them all."""
    value = context.get(key) if "." in key else None
    if value is None or OmegaConf.is_config(value):
        return
    *_, (_, node) = _in_verls_config(key)
    if isinstance(node, dict):
        names = ", ".join(f"{key}.{name}" for name in [each for each in node if not each.startswith("_")][:3])
        yield error(f"{key}={value} replaces all settings below it", f"verl reads {names}, ...")


def _in_verls_config(key: str) -> Iterator[tuple[str, Any]]:
    """Yields the config of verl, and each node on the way to a setting with its value there; ABSENT where it ends."""
    value = _verls_config()
    yield "", value
    for node in accumulate(key.split("."), "{}.{}".format):
        value = value.get(node.rpartition(".")[2], ABSENT) if isinstance(value, dict) else ABSENT
        yield node, value


@functools.cache
def _verls_config() -> Any:
    text = source(package_folder("verl"), "trainer/config/_generated_ppo_trainer.yaml")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _added(key: str, context: Context) -> Iterator[Problem]:
    """Yields a setting that only its plus sign adds, if it is next to one with almost the same name, or if verl's
    sources do not have its name. A node whose name they have may be handed to other code as a whole."""
    above, _, leaf = key.rpartition(".")
    if not OmegaConf.is_dict(node := OmegaConf.select(context.config, above) if above else context.config):
        return  # another override deletes it
    if leaf not in node or leaf in GROUPS or key.startswith("hydra.") or is_read(key, context.config):
        return
    if near := [one for one in similar(leaf, {*map(str, node)} - {leaf}) if is_misspelt(leaf, one)]:
        fix = replacement(key, context.get(key), context.config, context.given)
        why = "verl reads only the names that its configs have"
        yield warning(f"+{key} is added next to {', '.join(near)}", why, *fix)
        return
    steps = pairwise(_in_verls_config(key))
    new, around = next(((one, above) for (_, above), (one, value) in steps if value is ABSENT), ("", None))
    if not around or "_target_" in around:
        return  # `verl's settings` judges the fields of a class
    above, _, name = new.rpartition(".")
    owners = {node: names - {name} for node, names in owners_of(context.config).items()}
    if is_read_below(above, name, owners, by_text=key == new):
        return
    if len({*around} - words_of_verl()) > OTHERS * len(around):  # a node for other code, such as Megatron's LoRA
        return
    own = [*filter(context.get, CODE), *filter(None, [context.entry])]
    found = f"+{new} is a name that verl's sources do not read there"
    yield note(found, f"only {' or '.join(own)} may read it") if own else warning(found, "nothing reads it")


@check("hooks", needs="can_be_fitted")
def hooks(context: Context) -> Iterable[Problem]:
    """Errors with which `verl_ext` would stop at its start, including those of the model's routers, and what it would
    only say; otherwise the features that are switched on.

    Source: `fit` of verl_ext, as `verl_ext.start.run` calls it. It also probes the model's routers, unless that would
    run the model's own code.
    """
    for problem in context.problems:
        said, fix = " ".join(str(problem).split()), unset(context.config, problem.fix)
        stops = "the run would stop with this line before Ray starts" if problem.level == "error" else ""
        yield replace(problem, found=said, why=stops, fix=fix)
    if errors_of(context.problems) or context.features is None:
        return
    if not context.features.demands:
        why = (
            f"verl runs unchanged; the preset for it is python -m verl_ext.main_ppo {context.preset} (docs/methods.md)"
        )
        yield note("no feature of stability.* is switched on", why)
    for line in table_lines(context.features):
        yield ok(f"{line.name}: {line.setting} ({line.where})")
    for row in left_out(context.features):
        yield note(f"{row.name}: {row.setting}", row.where)


@check("verl's settings", needs="can_be_fitted")
def verls_settings(context: Context) -> Iterable[Problem]:
    """Settings that the classes of verl's workers do not take; a `precision=` of FSDP on Megatron;
    `actor.strategy=megatron` without Megatron's settings.

    Source: `omega_conf_to_dataclass` of verl/workers/engine_workers.py (0.9.1), which builds the classes when the
    workers start. For Megatron without its settings: `FSDPActorConfig` of verl/workers/config/actor.py gives its engine
    the strategy's name, and MegatronEngine then looks for sizes that FSDP's settings do not have.
    """
    if context.on_megatron and context.get(MEGATRON_SIZE) is None:
        why = "verl would use FSDP's settings; model_engine=megatron composes Megatron's"
        yield error(f"{MEGATRON_SIZE} is missing", why, "model_engine=megatron")
        return
    if context.on_megatron and (engine := context.get(f"{ACTOR}.fsdp_config")):
        yield error("actor.fsdp_config is set, and verl's Megatron engine has none", _instead(engine))
        return
    if unknown := [*_unknown_settings(context)]:
        each = (
            replacement(name, context.get(name), context.config, context.given) or (f"~{name}",) for name in unknown
        )
        why = "verl's classes do not take them, and the workers would stop"
        yield error(f"not settings of this verl: {', '.join(unknown)}", why, *chain(*each))


@check("verl's validation", needs="can_be_fitted", after=("hooks", "names", "sizes", "verl's settings"))
def verl_validation(context: Context) -> Iterable[Problem]:
    """Settings that verl's `validate_config` would refuse. A note: verl's check imports a package that is not installed
    here, and says nothing without it.

    Source: `validate_config` of verl/utils/config.py (0.9.1), called as `verl_ext.start.run` calls it. For a LoRA's
    rank it calls `get_vllm_max_lora_rank`, whose package does not import without vLLM.
    """
    config = _as_launched(context)
    roles = {"use_reference_policy": needs_reference(config), "use_critic": needs_critic(config)}
    quick: Exception | None = UNDECIDED
    try:
        if not context.trust:
            built = built_settings(config)
            if unknown_targets(built):  # reported by `code`
                return
            for path, values in built.items():  # the checked values, which must not resolve to something else now
                OmegaConf.update(config, path, values, merge=False)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints that it passes
            warnings.simplefilter("ignore")  # its advice
            if not context.trust:
                quick = refused_quickly(config, **roles)
            if quick is not None:  # with trust, the run's own classes need all of verl
                if isinstance(quick.__cause__ or quick, (ValueError, AssertionError)):
                    raise quick
                importlib.import_module("verl_ext.plugins.verl")  # before verl, as `verl_ext.main_ppo` does
                importlib.import_module("verl.utils.config").validate_config(config, **roles)
    except Exception as failure:  # assertions, ValueErrors and Hydra's wrapping of both
        if isinstance(failure, PackageNotFoundError) or (isinstance(failure, ImportError) and context.elsewhere):
            what = getattr(failure, "name", "") or reason_of(failure)
            why = f"validate_config imports a package that is not on this machine: {what}"
            yield note("verl's validate_config was not finished", why)
            return
        said, why = reason_of(failure), "verl's own validation would stop the run with this error"
        yield error(said, why, *_fitting_batch(said, context))
        return
    yield ok("verl's validate_config passes")


def _fitting_batch(said: str, context: Context) -> Iterator[str]:
    """Yields the size that fixes an error of verl's validation, if its message has the numbers."""
    if found := INDIVISIBLE.search(said):
        batch, least = map(int, found.groups())
        yield f"data.train_batch_size={math.lcm(batch, least) // context.get(f'{ROLLOUT}.n', 1)}"
    elif found := TOO_LARGE.search(said):
        yield f"{ACTOR if found[2] == 'actor' else 'critic'}.ppo_mini_batch_size={found[1]}"


def _unknown_settings(context: Context) -> Iterator[str]:
    """Yields the settings of the run's roles that verl's classes have no field for."""
    known = settings_classes(WORKERS)
    roles = [ACTOR, ROLLOUT, MODEL, *(["critic"] if needs_critic(context.config) else [])]
    if needs_reference(context.config) and not refers_to_actor(context.config):
        roles.append("actor_rollout_ref.ref")
    for role in roles:
        with contextlib.suppress(OmegaConfBaseException):  # the validation reports it
            plain = OmegaConf.to_container(OmegaConf.select(context.config, role), resolve=True)
            for place, node in _nodes(plain, role):
                target = node.get("_target_")
                fields = dataclass_fields(target) if target in known else ()
                ours = ("base", *losses.own_settings()) if place == losses.LOSS else ()  # `hooks` judges them
                unknown = (f"{place}.{key}" for key in node if fields and key not in (*fields, *ours, "_target_"))
                # verl renames the reference policy's `log_prob_*` before
                yield from (name for name in unknown if ".ref.log_prob_" not in name)


@check("code", needs="config")
def code(context: Context) -> Iterable[Problem]:
    """Code that the config names: `stability.plugins`, a model's own code, a `_target_` that is not a settings class.
    Lists the checks that were left out.

    Source: `stability_config` of verl_ext/features/stability.py; `get_class_from_dynamic_module` of
    transformers/dynamic_module_utils.py (5.10); `omega_conf_to_dataclass` of verl/utils/config.py (0.9.1).
    """
    if context.trust:
        return
    if plugins := context.plugin_modules:
        why = "hooks and verl's validation were not checked; --trust imports the plugins, as the run does"
        yield note(f"stability.plugins={plugins} was not imported", why)
    if context.model_code:
        why = (
            "lengths, vocabulary, tokenizer and the model's routers were not checked; --trust runs it, as the run does"
        )
        yield note(f"{TRUST}=True, and the model has its own code, which was not run", why)
    try:
        targets = unknown_targets(built_settings(context.config))
    except OmegaConfBaseException:  # the validation reports it
        return
    for path, target in targets:
        why = "the run would call it; verl's validation was not checked; --trust calls it"
        yield warning(f"{path}._target_={target} is not a settings class of verl or verl_ext, and was not called", why)


@check("agent loop manager", needs="can_be_fitted", after=("hooks",))
def agent_loop_manager(context: Context) -> Iterable[Problem]:
    """An agent loop manager of the user's own (`agent_loop_manager_class`): what the run lacks if its workers are not
    verl's AgentLoopWorker. The class is not imported.

    Source: `TaskRunnerV1.init_agent_loop_manager` of verl/trainer/main_ppo.py (0.9.1), which asks of a manager only
    that it fills TransferQueue; `check_manager` of verl_ext/upstream/agent_loop.py.
    """
    if not (manager := context.get(MANAGER)):
        return
    asked = OmegaConf.select(_as_launched(context), PLACE)
    needed, left_out = without_workers(Extras(**parse_extras(str(asked or ""))))
    found, unless = f"{MANAGER}={manager} was not imported", "unless its workers derive from verl's AgentLoopWorker"
    if needed:
        stops = "; ".join(f"{what} needs them: {remedy}" for what, remedy in needed)
        yield warning(found, f"{unless}, the run stops before its first rollout: {stops}")
        return
    without = f"; {unless}, the run is without {' and '.join(left_out)}" if left_out else ""
    yield note(found, f"the run sees that one of its workers dies only if it has agent_loop_workers{without}")


def fit_presets(context: Context) -> None:
    """Fits the context's config as a launch would, unless that would run code that the config names."""
    if not context.can_be_fitted:
        return
    config = copy.deepcopy(context.config)
    trusts = OmegaConf.select(config, TRUST)
    if trusts and not context.trust:
        OmegaConf.update(config, TRUST, False)
    try:
        context.features, context.problems = fit(config, context.overrides, read_model=_has_model(context))
    except OmegaConfBaseException as failure:
        context.problems = [Problem(f"{failure.full_key}: {str(failure).splitlines()[0]}")]
    except Exception as failure:  # a value of a type that no rule expects
        context.problems = [unread(failure)]
    if trusts:
        OmegaConf.update(config, TRUST, trusts)
    context.config = config


def unknown_targets(built: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns path and name of each `_target_` in `built_settings` that is not a settings class."""
    known = settings_classes()
    nodes = (pair for path, values in built.items() for pair in _nodes(values, path))
    found = ((place, node["_target_"]) for place, node in nodes if "_target_" in node)
    return [(place, str(target)) for place, target in found if not isinstance(target, str) or target not in known]


def built_settings(config: Any) -> dict[str, Any]:
    """Returns the parts of a config that verl's validation builds, as plain values; the critic without its model.

    Building the model's settings (`HFModelConfig`) would import its external_lib, load its tokenizer and perhaps copy
    its files by a shell command; the validation reads none of these.

    Raises:
        OmegaConfBaseException: an interpolation does not resolve.
    """
    built = {path: OmegaConf.select(config, path) for path in BUILT}
    built = {path: OmegaConf.to_container(node, resolve=True) for path, node in built.items() if node is not None}
    if "critic" in built:
        built["critic"]["model"] = None
    return built


def settings_classes(folders: Iterable[str] = FOLDERS) -> set[str]:
    """Returns the classes in verl's own files for actor and critic, and the function for our losses' settings."""
    from verl_ext.launch.compose import VERL_CONFIGS

    files = (file for folder in folders for file in (VERL_CONFIGS / folder).glob("*.yaml"))
    verls = {target for file in files for target in TARGET_LINE.findall(file.read_text(encoding="utf-8"))}
    return {*verls, losses.TARGET}


def refused_quickly(config: Any, **roles: bool) -> Exception | None:
    """Returns None if verl's `validate_config` accepts a config, else its error, without the cost of `import verl`.

    verl's settings classes are plain dataclasses, which `validate_config` builds and checks. Their packages import
    torch, tensordict, transformers and Ray, which no check of a setting needs. The modules of the settings are
    therefore imported without these, and removed from `sys.modules` afterwards.

    None is final, and so are a ValueError and an AssertionError. Another error can mean that only the whole of verl can
    decide; UNDECIDED that verl is imported.
    """
    if "verl" in sys.modules:
        return UNDECIDED
    try:
        with _settings_alone():
            importlib.import_module("verl.workers.config")
            importlib.import_module("verl.utils.config").validate_config(config, **roles)
    except Exception as failure:  # verl refuses the config, or needs something that was left out
        return failure
    return None


def _as_launched(context: Context) -> DictConfig:
    """Returns the config with the settings that our entry point adds before verl gets it; it must have no errors."""
    config = copy.deepcopy(context.config)
    if context.features is not None and context.features.demands:
        apply_engine_settings(replace(context.features, config=config))
    return config


def _has_model(context: Context) -> bool:
    """Returns True unless the model's files may not be read, or are not here."""
    if context.model_code:
        return False
    model = context.config.actor_rollout_ref.model
    folders = [str(path) for path in (model.path, model.get("tokenizer_path")) if path and is_folder_path(str(path))]
    if not all(map(os.path.isdir, folders)):
        return False
    return bool(folders or model_json(context.config))  # else there is nothing to read, and transformers takes seconds


def _instead(engine: DictConfig) -> str:
    if engine.get("dtype") == "float16":
        return "use precision=fp16_megatron; precision=fp16 is for FSDP"
    return "leave out actor.fsdp_config and precision=bf16 or fp32, which set it; Megatron's default is bfloat16"


def _nodes(values: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields path and content of each mapping in plain values."""
    if isinstance(values, dict):
        yield path, values
        for key, value in values.items():
            yield from _nodes(value, f"{path}.{key}")
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _nodes(value, f"{path}.{index}")


@contextlib.contextmanager
def _settings_alone() -> Iterator[None]:
    """Replaces the packages of verl's settings classes, and their imports, by hollow modules."""
    folder = package_folder("verl")
    assert folder is not None
    ours = {name: types.ModuleType(name) for name in {*BARE, *HOLLOW} - {*sys.modules}}
    for name, module in ours.items():
        vars(module).update(dict.fromkeys(HOLLOW.get(name, ()), _LeftOut))
    for name in BARE:
        ours[name].__path__ = [str(folder.joinpath(*name.split(".")[1:]))]

    def stand_in(name: str) -> Undo:
        return patch("settings_alone", sys.modules, name, ours[name], new=True)

    undo = apply_all(*(partial(stand_in, name) for name in ours))
    try:
        for name, (module_name, member) in KEPT.items():
            vars(ours[name])[member] = getattr(importlib.import_module(f"{name}.{module_name}"), member)
        if RANKS in ours:
            vars(ours[RANKS])[CHECKS_RANK] = _function_of(folder, RANKS, CHECKS_RANK)
        yield
    finally:
        undo()
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl" or name == ON_TOP]:
            del sys.modules[name]


def _function_of(folder: Path, module: str, name: str) -> Any:
    """Returns a function of one of verl's modules, whose other content is not run."""
    text = source(folder, f"{module.partition('.')[2].replace('.', '/')}.py")
    nodes: list[ast.stmt] = [
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    names: dict[str, Any] = {"Literal": Literal, "get_args": get_args}
    exec(compile(ast.Module(nodes, []), module, "exec"), names)
    return names.get(name, _LeftOut)


class _LeftOut:
    """Replaces a function or a class that no check of a setting needs."""

    def __init__(self, *args: object, **kwargs: object):
        raise RuntimeError("left out of a quick validation")
