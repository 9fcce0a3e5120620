"""Composes a run's config with Hydra: the config that verl's entry point would read, plus our groups."""

import os
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_ext.base.errors import ConfigError
from verl_ext.base.names import OUR_GROUPS
from verl_ext.features.losses import LOSS, own_settings
from verl_ext.features.stability import default_node
from verl_ext.features.verl_config import FSDP_REPLAY
from verl_ext.launch.names import FREE, GROUPS, unknown_name
from verl_ext.launch.packages import module_file, package_folder

CONFIG_MODULE = "verl_ext.configs"
if (VERL := package_folder("verl")) is None:
    raise ModuleNotFoundError("No module named 'verl'", name="verl")
VERL_CONFIGS = VERL / "trainer" / "config"
PRIMARY = "ppo_trainer"
COMMON, LONGEST_NAME = "common", 100  # a folder of configs that recipes begin with; letters of a choice
MAIN = re.compile(r'hydra\.main\(config_path="(\w+)", config_name="(\w+)"')
# Names at the front of overrides, which some people write as flags.
OVERRIDDEN = (*GROUPS, "actor_rollout_ref", "algorithm", "critic", "data", "reward", "trainer")
PLACES = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")  # Hydra's flags
MAY_LACK = {FSDP_REPLAY, *(f"{LOSS}.{name}" for name in ("base", *own_settings()))}


class OurConfigs(SearchPathPlugin):
    """Lets Hydra find the groups `stability`, `recipe` and `precision` with any primary config."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl_ext", path=f"pkg://{CONFIG_MODULE}")


# Every file of the group starts from one of these nodes; the underscore keeps them out of the choices. They are no
# structured configs, because a user's own method adds settings to them; `stability_config` checks names and types.
ConfigStore.instance().store(group="stability", name="_schema", node=default_node())
ConfigStore.instance().store(group="stability", name="_preset", node=default_node() | {"reuse_log_probs": "auto"})
Plugins.instance().register(OurConfigs)


def stability_choices() -> tuple[str, ...]:
    """Returns the names of the files in `configs/stability`."""
    folder = files(CONFIG_MODULE) / "stability"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()))


def prepare(arguments: Sequence[str]) -> list[str]:
    """Returns the user's command-line arguments as Hydra needs them.

    Hydra adds a group or setting that a config lacks only with a plus sign: `+stability=icepop`. The sign is put before
    our groups if the primary config does not list them in its defaults. It is also put before settings that a node may
    lack: FSDP_REPLAY, the settings of our policy losses, and those of `stability`, where a user's own method has new
    ones; before a setting that a later override deletes, which may be one that verl does not have; and before one that
    both the user and a chosen file of our groups add. Of one of our groups, the last choice counts, so that a script's
    own can be changed: Hydra takes no second one. A relative --config-path is read from the folder of verl's entry
    point, as verl does. Flags come last, because argparse takes the overrides only from one place.

    Raises:
        ConfigError: `stability=` names no file of the group, or the primary config is not YAML.
    """
    arguments, flags = split_flags(arguments)
    groups = [argument.partition("=")[0].lstrip("+") for argument in arguments]
    last = {group: index for index, group in enumerate(groups) if group in OUR_GROUPS}
    arguments = [one for index, one in enumerate(arguments) if last.get(groups[index], index) == index]
    if dashed := next((one for one in flags if one.lstrip("-").partition("=")[0].split(".")[0] in OVERRIDDEN), None):
        raise ConfigError(f"{dashed} has dashes, and an override has none", otherwise=f"write {dashed.lstrip('-')}")
    folder = VERL_CONFIGS
    name = flag_of(flags, "--config-name", "-cn") or PRIMARY
    for at, flag in enumerate(flags):
        start, equals, path = flag.partition("=")
        if start in ("--config-path", "-cp"):  # the last one counts
            folder = Path(os.path.normpath(VERL_CONFIGS.parent / (path if equals else "".join(flags[at + 1 : at + 2]))))
            if folder.parts[-3:] == VERL_CONFIGS.parts[-3:] and not folder.is_dir():
                folder = VERL_CONFIGS  # verl's own configs, on another machine
            flags[at + (not equals) : at + 1 + (not equals)] = [f"{start}={folder}" if equals else str(folder)]
    added = {key for argument in arguments for key in _settings_of(*argument.lstrip("+").partition("=")[::2])}
    listed = _groups_in_defaults(folder / f"{name.removesuffix('.yaml')}.yaml")
    for index, argument in enumerate(arguments):
        group, _, choice = argument.partition("=")
        if group == "stability" and choice not in (known := stability_choices()):
            raise ConfigError.of([unknown_name("stability", choice, known)])
        if group in OUR_GROUPS and group not in listed:
            arguments[index] = f"+{argument}"
        taken_back = f"~{group}" in arguments[index:]  # Hydra would stop here, before it deletes
        is_added = group.lstrip("+") in MAY_LACK or (group.startswith("+") and group.lstrip("+") in added)
        if is_added or group.startswith("stability.") or taken_back:
            arguments[index] = f"++{argument.lstrip('+')}"
    if "stability" not in listed and not any(argument.startswith("+stability=") for argument in arguments):
        arguments.insert(0, "+stability=none")
    return [*arguments, *flags]


def _settings_of(group: str, choice: str) -> Iterator[str]:
    """Yields the arguments of other code, which verl's configs do not list, in a file of our groups and those that it
    begins with; none if there is no such file."""
    file = files(CONFIG_MODULE) / group / f"{choice[:LONGEST_NAME]}.yaml"
    if group not in (*OUR_GROUPS, COMMON) or not file.is_file():
        return
    nodes = list(yaml.safe_load(file.read_text(encoding="utf-8")).items())
    for entry in dict(nodes).get("defaults", ()):
        above, _, name = str(entry).partition("@")[0].strip("/").rpartition("/")
        yield from _settings_of(above or group, name)
    for name, node in nodes:  # grows
        if isinstance(node, dict):
            nodes += [(f"{name}.{key}", value) for key, value in node.items()]
        elif any(FREE.fullmatch(part) for part in name.split(".")):
            yield name


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides, and Hydra's flags with their values."""
    overrides, flags, takes_value = list[str](), list[str](), False
    for argument in arguments:
        # `--cfg job`, but not `--multirun a=1,2`; a folder's name may have a `=`.
        is_value = takes_value and (flags[-1] in PLACES or not ("=" in argument or argument.startswith("~")))
        is_flag = argument.startswith("-")
        (flags if is_flag or is_value else overrides).append(argument)
        takes_value = is_flag and "=" not in argument
    return overrides, flags


def flag_of(flags: Sequence[str], *names: str) -> str:
    """Returns the last value of a flag of Hydra that has one of these names; "" if it is not given."""
    given = [word.partition("=")[::2] if "=" in word else (word, next_) for word, next_ in pairwise([*flags, ""])]
    return next((value for name, value in reversed(given) if name in names), "")


def of_entry(arguments: Sequence[str], module: str) -> list[str]:
    """Returns the arguments of an entry point other than main_ppo, with the config that it reads if it is verl's; else
    with verl's of the same name, or the usual one."""
    overrides, flags = split_flags(arguments)
    path, name = flag_of(flags, "--config-path", "-cp"), flag_of(flags, "--config-name", "-cn").removesuffix(".yaml")
    inside = re.sub(r"^.*/(?=verl/)", "", module.removesuffix(".py"))  # a checkout's file is the package's
    file = module_file(inside) if re.match("verl[./]", inside) else None
    if file and (main := MAIN.search(file.read_text(encoding="utf-8"))):
        folder, name = file.parent / (path or main[1]), name or main[2]
        overrides.append(f"hydra.searchpath=[file://{VERL_CONFIGS}]")
    else:
        folder, name = VERL_CONFIGS, name if (VERL_CONFIGS / f"{name}.yaml").is_file() else PRIMARY
    return [*overrides, f"--config-path={folder}", f"--config-name={name}"]


def _groups_in_defaults(file: Path) -> set[str]:
    """Returns the groups that a primary config lists; none if the file is missing, which Hydra reports."""
    if not file.is_file():
        return set()
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: not UTF-8; no such date
        raise ConfigError(f"{file} cannot be read as YAML in UTF-8: {' '.join(str(error).split())}") from error
    defaults = content.get("defaults") if isinstance(content, dict) else None
    if not isinstance(defaults, list):  # Hydra reports what is wrong with it
        return set()
    return {str(key).split("@")[0].strip("/") for entry in defaults if isinstance(entry, dict) for key in entry}
