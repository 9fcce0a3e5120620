"""Overrides that Hydra refuses: settings of older versions of verl and of its other entry points, with the place where
verl 0.9.1 reads them, settings that verl reads although its configs do not list them, and misspelt ones.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.features.verl_config import ACTOR, MODE, REWARD_ARGUMENTS, ROLLOUT, hydra_value, verls_replay_setting
from verl_ext.launch.names import FREE, MANAGER, known_names, similar_keys
from verl_ext.launch.packages import module_file, package_folder

SAME = 0.85  # the similarity of names from which one is taken for the other, misspelt

OLD_REPLAY = f"{ACTOR}.router_replay.mode"  # its place now depends on the engine
ASYNC = "async_training."  # of the entry point verl.experimental.fully_async_policy

# Old place of a setting -> its place now, "" if there is none; the longest match counts.
MOVED = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs": REWARD_ARGUMENTS,
    "reward_model.overlong_buffer": f"{REWARD_ARGUMENTS}.overlong_buffer_cfg",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.model": "",  # only the path has a new place
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model": "reward.reward_model",
    "reward_manager": "reward.reward_manager",
    "sandbox_fusion": "reward.sandbox_fusion",
    "ray_init": "ray_kwargs.ray_init",
    "critic.model.fsdp_config": "critic.fsdp",
    "critic.model.fsdp_config.grad_offload": "",
    f"{ACTOR}.fsdp_config.grad_offload": "",
    f"{ACTOR}.megatron.grad_offload": "",
    f"{ASYNC}trigger_parameter_sync_step": "trainer.v1.separate_async.parameter_sync_step",
    "rollout.n": f"{ROLLOUT}.n",
    (OF_AGENTS := "env.rollout.n"): f"{ROLLOUT}.n",  # verl-agent's size of a group, beside which rollout.n is 1
    "rollout.nnodes": f"{ROLLOUT}.nnodes",
    "rollout.n_gpus_per_node": f"{ROLLOUT}.n_gpus_per_node",
    f"{ACTOR}.loss_mode": f"{ACTOR}.policy_loss.loss_mode",
    f"{ROLLOUT}.n_agent": f"{ROLLOUT}.n",
    f"{ROLLOUT}.n_val": f"{ROLLOUT}.val_kwargs.n",
    f"{ROLLOUT}.val_temperature": f"{ROLLOUT}.val_kwargs.temperature",
}


@dataclass(frozen=True)
class Refused:
    """An override that Hydra refuses.

    Attributes:
        how: "set", of a setting that does not exist; "add", of one that does; "delete", of one that does not, or that
            has another value.
    """

    key: str
    value: Any
    how: Literal["set", "add", "delete"]


def refusals(refused: Sequence[Refused], config: DictConfig, given: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each override that Hydra refuses; those that nothing resembles and nothing reads have one.

    Args:
        config: the config without them.
        given: the settings of the whole command line, which no fix sets again.
    """
    gone = dict[str, Any]()
    for one in refused:
        found = f"{one.key} is not a setting of this verl"
        if one.how == "delete":
            yield Problem(f"~{one.key}: nothing to delete", "there is no such setting, or it has another value")
        elif one.how == "add":
            yield Problem(f"+{one.key} is in the config already", f"write ++{one.key}, or leave out the +")
        elif place := new_place(one.key, config):
            yield Problem(found, f"leave it out, it is {place} now", replacement(one.key, one.value, config, given))
        elif is_read(one.key, config):
            why = f"write +{one.key}: verl reads it, and its configs do not list it"
            yield Problem(f"{one.key} without a +", why)  # what is added to the launch leaves the refused one there
        elif one.key not in MOVED and (near := similar_keys(one.key, config)):
            yield Problem(found, f"similar: {', '.join(near)}", replacement(one.key, one.value, config, given))
        else:
            gone[one.key] = one.value
    if gone:
        are, them = ("is not a setting", "it") if len(gone) == 1 else ("are not settings", "them")
        why = f"leave {them} out: nothing reads {them}, and with a + a worker may refuse {them}"
        mode = (f"{MODE}=separate_async",) if any(key.startswith(ASYNC) for key in gone) else ()
        verls = (key for key, value in gone.items() if value is not None and key.startswith((*MOVED, ASYNC)))
        fix = (*(f"~{key}" for key in verls), *mode)  # code of the user's own may read others; Hydra deletes no null
        yield Problem(f"{', '.join(gone)} {are} of this verl", f"{why}; {MODE} replaces {ASYNC}*" if mode else why, fix)


def is_misspelt(name: str, other: str) -> bool:
    """Returns True if a name differs from another only by a letter or two."""
    return SequenceMatcher(None, name, other).ratio() > SAME


def replacement(setting: str, value: Any, config: DictConfig, given: Collection[str]) -> tuple[str, ...]:
    """Returns the overrides that take back a setting which verl does not have, and set its new place, or the one that
    it is a misspelling of; () if there is none, if verl does not have the value, or if the launch sets that one too."""
    if not is_plain(value):
        return ()
    place, found = new_place(setting, config), dict[str, Any]()
    if place and (place != MANAGER or str(value) in known_names(MANAGER)):
        found[f"++{place}"] = value
    elif setting not in MOVED and len(near := similar_keys(setting, config)) == 1:
        known, names = known_names(near[0]), (key.rpartition(".")[2] for key in (setting, near[0]))
        if is_misspelt(*names) and (not known or str(value) in known):
            found[near[0]] = value
    if setting.startswith(ASYNC):
        found[f"++{MODE}"] = "separate_async"
    fix = tuple(f"{key}={one}" for key, one in found.items() if key.lstrip("+") not in given or setting == OF_AGENTS)
    return (f"~{setting}", *fix) if fix else ()


def new_place(setting: str, config: DictConfig | None = None) -> str:
    """Returns where verl 0.9.1 reads an old setting; "" if nowhere, or if it is not in the table.

    Args:
        config: if given, the place must be in it: below a place of the table, a fork of verl may have more.
    """
    if setting == OLD_REPLAY and config is not None:
        return verls_replay_setting(config)
    old = max((one for one in MOVED if setting == one or setting.startswith(f"{one}.")), key=len, default="")
    place, rest = MOVED.get(old, ""), setting.removeprefix(old)
    if place and not place.endswith(rest):  # a value that became a node's: `reward_manager`, or its `name`
        place += rest
    if config is None or not place or is_read(place, config):
        return place
    node, _, key = place.rpartition(".")
    parent = OmegaConf.select(config, node)
    return place if OmegaConf.is_dict(parent) and key in parent else ""


def is_read(setting: str, config: DictConfig) -> bool:
    """Returns True if verl reads a setting that its config does not list: below a node for the arguments of other code,
    or a field of the dataclass that a node's `_target_` names."""
    *above, leaf = setting.split(".")
    if free := next((part for part in above if FREE.fullmatch(part)), ""):
        parent = OmegaConf.select(config, ".".join(above[: above.index(free)])) if above[0] != free else config
        return (OmegaConf.is_dict(parent) and free in parent) or free in words_of_verl()
    node = OmegaConf.select(config, ".".join(above)) if above else None
    return isinstance(node, DictConfig) and leaf in dataclass_fields(str(node.get("_target_")))


@cache
def words_of_verl() -> frozenset[str]:
    """Returns the names in verl's sources, among them the settings that they read."""
    folder = package_folder("verl")
    files = folder.rglob("*.py") if folder else ()
    words = (re.findall(r"[A-Za-z_]\w*", file.read_text(encoding="utf-8", errors="replace")) for file in files)
    return frozenset[str]().union(*words)


@cache
def dataclass_fields(target: str) -> frozenset[str]:
    """Returns the fields of one of verl's dataclasses and its bases, from their source; none if it is no such class."""
    place, _, name = target.rpartition(".")
    if not place.startswith("verl.") or (file := module_file(place)) is None:
        return frozenset()
    files = file.parent.glob("*.py") if file.stem == "__init__" else [file]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    if not (found := re.search(rf"^class {name}\b(?:\((\w+)\))?:.*?(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)):
        return frozenset()
    own, base = frozenset(re.findall(r"^    (\w+): ", found[0], re.MULTILINE)), found[1]
    imported = re.search(rf"^from (verl\.[\w.]+) import .*\b{base}\b", text, re.MULTILINE)
    return own | dataclass_fields(f"{imported[1] if imported else place}.{base}") if base else own


def is_plain(value: object) -> bool:
    """Returns True if a value may be part of a fix: a number, a bool, a name or a path, but no other text of the
    config, which a shell or Hydra could read differently."""
    return hydra_value(value) == value if isinstance(value, str) else isinstance(value, bool | int | float)
