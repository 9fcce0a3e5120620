"""Arguments that describe a run, for doctor, plan and probe, and the config that they give."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import ConfigError, Problem, errors_of
from verl_ext.base.names import needs_our_module
from verl_ext.base.printable import printable
from verl_ext.features.stability import import_from_here
from verl_ext.features.verl_config import ACTOR, hydra_value, key_of, value_of
from verl_ext.launch.names import unknown_name
from verl_ext.launch.refused import Refused, refusals

COMMAND = re.compile(r"main_|^-m$|^--module$|\.py$")
FLAGS = ("config-path", "config-name")
FILE = re.compile(r"[^=\s]+\.(?:sh|bash|slurm|sbatch|ya?ml)")
OVERRIDE = re.compile(r"[+~]*[a-z][\w.@/]*=|~\w")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
VERLS, OURS = "verl.trainer.main_ppo", "verl_ext.main_ppo"
KEY = "hydra.searchpath"
MOST_SAID = 2000  # characters of an error; OmegaConf can print a key in 1,000 brackets
REFUSED = re.compile("Could not (?:override|append to config|delete from config)")  # Hydra's, on one override
MEGATRON_SIZE = f"{ACTOR}.megatron.tensor_model_parallel_size"
NO_MEGATRON = "the config has no settings of Megatron"
NO_VERL = "`pip install --no-deps verl==0.9.1` is enough to check and to plan launches"
# Hydra's errors: a config group without the file, and others with what to do about them.
NO_FILE = re.compile(r"In '\w+': Could not find '(\w+)/(\S+)' Available options in '\w+': (.+)")
REMEDIES = {
    "Cannot find primary config": "verl 0.9.1 has ppo_trainer; its trainer.v1.trainer_mode is sync, colocate_async or "
    "separate_async",
    "Multiple values for": "the group is named twice: leave out one of the two",
    "missing EQUAL": "an override is KEY=VALUE; the name of a config needs --config-name in front",
    "mismatched input|extraneous input|no viable alternative|LexerNoViableAlt": "Hydra reads = , [ ] { } < > and "
    "blanks in a value only between quotes: \"key='value'\"",
}
KNOWN_PATH = re.compile(r"file://|pkg://(verl|verl_ext)(\.|/|$)")


class Machines(NamedTuple):
    """The machines that a script asks for: its words, and the numbers of nodes and of GPUs per node, None if open."""

    said: str
    nodes: int | None
    gpus: int | None


@dataclass(frozen=True)
class Launch:
    """The command of a script that starts verl; empty if there is none.

    Attributes:
        arguments: those of the entry point. A part that is not known stands as `$CAUSE` in a longer value.
        where: its script and line.
        module: the entry point.
        entry: the same, if it is not main_ppo.
        unknown: what could not be known, as `$NAME` or `$(command)` -> its script and line, and the settings with it.
        left_out: settings of which nothing is known.
        others: where else the script starts verl.
        exports: the environment variables that the script has set for it.
        lost: overrides behind it that the shell does not give to it -> to what it gives them.
        machines: those on which Ray starts.
    """

    arguments: Sequence[str] = ()
    where: str = ""
    module: str = ""
    entry: str = ""
    unknown: Mapping[str, tuple[str, list[str]]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    machines: tuple[Machines, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        metavar="OVERRIDE",
        nargs="*",
        help="overrides of verl_ext.main_ppo, such as stability=moe; or a launch script, a YAML file of "
        "overrides, or behind -- a command that starts verl. Scripts and commands are read, not run",
    )
    parser.add_argument("--config-path", metavar="DIR", help="Hydra's option, as for verl_ext.main_ppo")
    parser.add_argument("--config-name", metavar="NAME", help="Hydra's option, as for verl_ext.main_ppo")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code that the config names: stability.plugins, a model's own code under trust_remote_code, "
        "classes in _target_; without --trust, checks that need this code are left out",
    )


def given_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the given arguments in the form that `verl_ext.main_ppo` takes.

    A file or a command among them is read once, and replaced in `arguments` by the overrides that it gives.

    Raises:
        ConfigError: a file does not exist, or has no launch.
    """
    if arguments.trust:
        import_from_here()
    arguments.overrides, said, arguments.launch = read_launch(arguments.overrides, os.environ)
    if said:
        print(f"verl-ext: {printable(said, MOST_SAID)}", file=sys.stderr)
    values = {flag: getattr(arguments, flag.replace("-", "_"), None) for flag in FLAGS}
    return [*arguments.overrides, *(f"--{flag}={value}" for flag, value in values.items() if value)]


def read_launch(
    words: Sequence[str], environ: Mapping[str, str], *, complete: bool = False
) -> tuple[list[str], str, Launch]:
    """Returns the arguments of `verl_ext.main_ppo` that these words give, a line on what was read, "" if nothing, and
    the launch in a script or a command.

    Args:
        words: overrides, and YAML files of overrides, and one script with its arguments, or one command. An override
            that stands beside a script or in front of a command is added to its own.
        environ: the environment in which the script would start.
        complete: refuse a launch of which something is not known.

    Raises:
        ConfigError: a file does not exist, cannot be read, or has no launch; or the launch is not complete.
    """
    given: list[str] = []
    for word in words:
        file = Path(word)
        is_file = "=" not in word and not word.startswith(("-", "~")) and "\n" not in word and file.is_file()
        if not is_file and FILE.fullmatch(word):
            raise ConfigError(f"{word} does not exist; give a launch script, a YAML file of overrides, or KEY=VALUE")
        given += read_overrides(file) if is_file and file.suffix in (".yaml", ".yml") else [word]
    script = next((index for index, word in enumerate(given) if "=" not in word and Path(word[:200]).is_file()), None)
    command = any(COMMAND.search(word) and "=" not in word.split()[0] for word in given if word.strip())
    if script is None and not command:
        return given, "", Launch()
    from verl_ext.launch import script as scripts

    entry = scripts.entry_of(given)
    before, rest = given[: script if entry is None else entry], given[(script or 0) + 1 :] if entry is None else []
    added = [word for word in [*before, *rest] if OVERRIDE.match(word)]
    replaced = {key_of(word) for word in added}
    variables = {**environ, **dict(word.split("=", 1) for word in before if VARIABLE.match(word))}
    if entry is None and script is not None:
        positional = [word for word in rest if not OVERRIDE.match(word)]
        launch = scripts.read_script(Path(given[script]), positional, variables, replaced)
    else:
        words = [word for word in before if word not in added] + given[len(before) :]
        launch = scripts.read_command(words, variables, replaced)
    said = _about(launch)
    if complete and launch.entry:
        why = "only a launch of main_ppo can be submitted"
        raise ConfigError(f"{launch.where} starts {launch.entry}", otherwise=why)
    if complete and launch.unknown:
        raise ConfigError(said)
    if complete and launch.exports:
        said += f"; variables that the job does not get: {', '.join(launch.exports)}; pass what it needs with --env"
    ours = [word for word in (*launch.arguments, *added) if needs_our_module(word)]
    if ours and launch.module == VERLS and not complete:
        said += f"; {ours[0]} needs python -m {OURS}: {VERLS} does not know it"
    return _with_added(launch.arguments, added), said, launch


def _with_added(arguments: Sequence[str], added: Sequence[str]) -> list[str]:
    """Returns a launch's arguments and those added to it. A value takes the place of the launch's own, but its plus
    signs stay; Hydra adds a mapping up with the launch's, but not with a value that is not known."""
    unknown = {key_of(word) for word in arguments if "$" in word}
    given = [word for word in added if not word.startswith("~")]
    values = {key_of(word): word for word in given if "={" not in word or key_of(word) in unknown}
    own = {key_of(word) for word in arguments if not word.startswith("~")}
    found = list[str]()
    for word in arguments:
        new = word if word.startswith("~") else values.get(key_of(word), word)
        found.append(word[: -len(word.lstrip("+"))] + new.lstrip("+") if word.startswith("+") else new)
    return [*found, *(word for word in added if key_of(word) not in own & values.keys() or word.startswith("~"))]


def _about(launch: Launch) -> str:
    parts = [f"read {launch.where}"]
    if launch.others:
        parts.append(f"not read, as they start verl too: {'; '.join(launch.others)}")
    if launch.module not in (OURS, VERLS):
        parts.append(f"{launch.module} is read like {VERLS}")
    if launch.unknown:
        values = (f"{one} ({where}) in {', '.join(those)}" for one, (where, those) in launch.unknown.items())
        parts.append(f"values that are not known here: {'; '.join(values)}")
        parts += [f"left out for that: {', '.join(launch.left_out)}"] if launch.left_out else []
        names = [one for one in launch.unknown if re.fullmatch(r"\$[A-Za-z_]\w*", one)]
        variable = f"a variable in front of verl-ext, as in {names[0][1:]}=VALUE, or " if names else ""
        parts.append(f"set {variable}these settings, as KEY=VALUE")
    return "; ".join(parts)


def read_overrides(file: Path) -> list[str]:
    """Returns the overrides in a YAML file: a list of `key=value`, or a mapping, whose keys are joined by dots.

    Raises:
        ConfigError: it is neither.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if isinstance(content, dict) and "defaults" in content:
        raise ConfigError(
            f"{file} is a config of Hydra, not overrides; give --config-path={file.parent} --config-name={file.stem}"
        )
    if isinstance(content, dict):
        return list(_as_overrides(content))
    if isinstance(content, list) and all(isinstance(one, str) for one in content):
        return content
    raise ConfigError(f"{file} must have a list of KEY=VALUE, or a mapping of settings")


def _as_overrides(content: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _as_overrides(value, f"{above}{key}.")
        else:
            yield f"{above}{key}={hydra_value(value)}"


@dataclass(frozen=True)
class Composed:
    """The config of a run.

    Attributes:
        config: without the overrides that Hydra refuses; None if it cannot be composed.
        problems: why it cannot, or the overrides that Hydra refuses.
    """

    config: DictConfig | None
    problems: tuple[Problem, ...] = ()


def compose(arguments: Sequence[str], *, trust: bool = False, entry: str = "") -> Composed:
    """Composes the config of a run; of an entry point other than main_ppo as far as verl's configs tell it.

    Without `trust`, a config is refused if Hydra would import packages (`pkg://` in hydra.searchpath) other than
    verl's and ours.
    """
    try:
        import hydra

        from verl_ext.launch import compose as ours
    except ImportError as error:
        why = NO_VERL if error.name == "verl" else ""
        return Composed(None, (Problem(f"the run's config cannot be composed here: {error}", why),))
    try:
        arguments = ours.of_entry(arguments, entry) if entry else arguments
        overrides, flags = ours.split_flags(ours.prepare(arguments))
        folder = Path(ours.flag_of(flags, "--config-path", "-cp") or ours.VERL_CONFIGS)
        name = ours.flag_of(flags, "--config-name", "-cn") or ours.PRIMARY
        if not trust and (packages := _packages(folder / f"{name.removesuffix('.yaml')}.yaml", overrides)):
            return Composed(None, (Problem(f"hydra.searchpath={packages} would be imported; --trust allows it"),))
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            try:
                return Composed(hydra.compose(name, overrides))
            except Exception as error:
                if not REFUSED.match(str(error)):
                    raise
                config, refused = _without_refused(name, overrides)
                given = {key_of(one) for one in arguments}  # `prepare` adds some
                megatrons = next((one.key for one in refused.values() if ".megatron." in one.key), None)
                if megatrons and OmegaConf.select(config, MEGATRON_SIZE) is None:
                    return Composed(None, (Problem(f"{megatrons}: {NO_MEGATRON}", fix=("model_engine=megatron",)),))
                own = dict[str, str]()
                if entry:
                    groups = [one for one in overrides if "." not in key_of(one) or one.startswith("hydra.")]
                    base = hydra.compose(name, groups)
                    own = {one.key: _missing_node(one.key, base) for one in refused.values()}
                rest = [one for one in refused.values() if not own.get(one.key)]
                nodes = ", ".join(filter(None, dict.fromkeys(own.values())))
                its = [Problem(f"{entry} has settings of its own: {nodes}", level="note")] if nodes else []
                return Composed(config, (*its, *refusals(rest, config, given)))
    except Exception as error:  # a broken config makes Hydra and OmegaConf raise nearly any error
        return Composed(None, _failure(error))


def _missing_node(key: str, config: DictConfig) -> str:
    """Returns the first node above a setting that a config does not have; "" if it has them all."""
    above = accumulate(key.split(".")[:-1], "{}.{}".format)
    return next((node for node in above if not OmegaConf.is_dict(value_of(config, node))), "")


def _failure(error: Exception) -> tuple[Problem, ...]:
    """Returns why a config cannot be composed, in one line each."""
    if isinstance(error, ConfigError):
        return error.problems
    said = str(error).partition("\nConfig search path:")[0].partition("\nTo append to your config")[0]
    if (override := getattr(error, "override", None)) and override not in said:  # a text that does not parse
        said = f"{override}: {said}"
    said = printable(" ".join(said.split()), MOST_SAID).partition(" See https://hydra.cc")[0] or type(error).__name__
    if choice := NO_FILE.search(said):
        return (unknown_name(choice[1], choice[2], choice[3].split()),)
    return (Problem(said, next((remedy for text, remedy in REMEDIES.items() if re.search(text, said)), "")),)


def _without_refused(name: str, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Refused]]:
    """Returns the config without the overrides that Hydra refuses, and these, as it finds only the first of them.

    It applies each to the config that the groups give, as `_apply_overrides_to_config` does in Hydra's
    hydra/_internal/config_loader_impl.py (1.3).
    """
    import hydra
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import ConfigCompositionException

    loader = GlobalHydra.instance().config_loader()
    parsed = dict(zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True))
    # Hydra's own settings are not in the config that it returns; one of them is where it looks for groups.
    hydras = [text for text, one in parsed.items() if one.is_hydra_override()]
    groups = [text for text, one in parsed.items() if loader.get_group_options(one.key_or_group.partition("@")[0])]
    config = hydra.compose(name, [*hydras, *groups])
    found = dict[str, Refused]()
    for text, one in parsed.items():
        if text in hydras or text in groups:
            continue
        try:
            ConfigLoaderImpl._apply_overrides_to_config([one], config)
        except ConfigCompositionException as error:
            if not REFUSED.match(str(error)):
                raise
            how: Any = "delete" if one.is_delete() else "add" if one.is_add() else "set"
            found[text] = Refused(one.key_or_group, one.value(), how)
    return config, found


def required_config(arguments: argparse.Namespace) -> DictConfig:
    """Returns the config that the arguments describe, fitted to the run.

    Raises:
        ConfigError: the config cannot be composed, or it would import modules without --trust.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what --trust imports may print
        given = given_arguments(arguments)
        composed = compose(given, trust=arguments.trust, entry=arguments.launch.entry)
    config = composed.config
    if config is None or errors_of(composed.problems):
        raise ConfigError.of(composed.problems)
    if not arguments.trust and (named := plugins(config)):
        raise ConfigError(f"stability.plugins={named} would be imported; --trust allows it, or leave it out here")
    from verl_ext.features.fit import fit

    with contextlib.suppress(Exception):  # a value of a type that no rule expects; a plan may still be possible
        fit(config, [one for one in given if not one.startswith("-")], read_model=False)
    return config


def plugins(config: DictConfig | None) -> list[str]:
    """Returns the modules of stability.plugins, which verl_ext imports."""
    # `stability_config` raises the error of an interpolation before it imports a module.
    given = value_of(config, "stability.plugins") if config is not None else None
    names = OmegaConf.to_container(given) if OmegaConf.is_list(given) else [given] if given else []
    return [str(name) for name in names]


def _packages(primary: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the packages of hydra.searchpath, which Hydra imports, except verl's and ours.

    Hydra reads it only from the primary config and the command line: `_process_config_searchpath` of
    hydra/_internal/config_loader_impl.py (1.3).
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = [
        one.value() for one in OverridesParser.create().parse_overrides(list(overrides)) if one.key_or_group == KEY
    ]
    if primary.is_file() and OmegaConf.is_dict(content := OmegaConf.load(primary)):
        given.append(OmegaConf.select(content, KEY))
    entries = [str(entry) for path in given for entry in (path if isinstance(path, Sequence) else [path])]
    return [entry for entry in entries if "://" in entry and not KNOWN_PATH.match(entry)]
