"""Which settings verl's sources read: an index of its attributes and keys by their names and by what they belong to.

The sources are searched as text, once for each process. An owner decides if it is a node of verl's config or always has
such a node's class as its type: in `trainer.v1.sampler`, a sampler is read of v1, and none of data, and in
`engine_config.dtype` a dtype is read of engines alone; `config.sampler` may be any node's.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from omegaconf import DictConfig, OmegaConf

from verl_ext.features.verl_config import is_unknown, value_of
from verl_ext.launch.names import FREE
from verl_ext.launch.packages import package_folder

# Nodes that verl gives to other code as they are, or whose settings it reads by a pattern of their names.
HANDED_ON = ("lora", "turbo_config", "transfer_queue", "worker_nsight_options", "controller_nsight_options", "veomni")
# Files that trainer V1 does not use, and the class of the old trainer in a file that it does use. Of the old reward
# managers, the reward loop imports only `register`.
ELSEWHERE = re.compile(
    r"experimental/(fully_async_policy|one_step_off_policy|separation)/|/(main_(ppo_v0|eval|generation)|\w*sft\w*)"
    r"|model_merger/|rollout/(hf_rollout|naive)|tinker|workers/reward_manager/"
)
OLD_TRAINER = re.compile(r"^class RayPPOTrainer\b.*?(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
# A chain such as `self.config.trainer["v1"].get("sampler"`, from the name or the bracket that it begins with; a text.
LINK = r"""\.get\(\s*["']\w+["']|\.[A-Za-z_]\w*|\[["']\w+["']\]"""
CHAIN = re.compile(rf"""(?:[A-Za-z_)\]}}]\w*+|\n *)(?:{LINK})++|["'][A-Za-z_]\w*+(?:\.[A-Za-z_]\w*+)*""")
NAME = re.compile(r"(?<!\.)\b[A-Za-z_]\w*|(?<=\.)(?!get\()[A-Za-z_]\w*")
IMPORT = re.compile(r"^ *(?:from|import) .*", re.MULTILINE)
INTERPOLATED = re.compile(r"\$\{(?:oc\.select:)?(\.*)([\w.]+)")
TEXT, ENGINE = "a text", "EngineConfig"
# A class of a node and its base; a name with its type, which is no prose.
CLASS = re.compile(r"^class (\w+Config)\b(?:\(([\w., ]*)\))?", re.MULTILINE)
BEFORE_A_CLASS = re.compile(r"^(?=class )", re.MULTILINE)
TYPED = re.compile(r"\b(\w+): [\"']?(?:Optional\[)?(\w+)(?!\w| \w)")
STORED, FIELD = re.compile(r"\bself\.(\w+)(?:: [^=\n]+)? = "), re.compile(r"^    (\w+): ", re.MULTILINE)


def without_reader(config: DictConfig, settings: Collection[str]) -> list[str]:
    """Returns those of the settings of verl's own that no code of trainer V1 reads, by an attribute or a key: neither
    of themselves nor of a setting that takes their value.

    A node none of whose settings is read is handed on whole, to code that reads them.
    """
    owners, takers = owners_of(config), _takers(config)

    def is_read(name: str, seen: Collection[str] = ()) -> bool:
        above, _, leaf = name.rpartition(".")
        found = is_read_below(above, leaf, owners)
        return found or any(is_read(taker, {*seen, name}) for taker in takers[name] - {*seen})

    def is_handed_on(above: str) -> bool:
        return not any(is_read_below(above, str(other), owners) for other in value_of(config, above))

    return [
        name
        for name in sorted(settings)
        if _is_leaf(config, name)
        and value_of(config, name) is not None
        and not is_read(name)
        and not is_handed_on(name.rpartition(".")[0])
    ]


def read_of_its_engine(config: DictConfig, setting: str) -> str | None:
    """Returns the setting of the same name that verl reads of the same worker's engine, or None."""
    owners, (*_, leaf) = owners_of(config), setting.split(".")
    worker = re.match(r"actor_rollout_ref\.\w+|critic", setting)
    engines = (place for place, names in owners.items() if ENGINE in names and worker and place.startswith(worker[0]))
    found = [place for place in engines if leaf in value_of(config, place) and is_read_below(place, leaf, owners)]
    return f"{found[0]}.{leaf}" if len(found) == 1 else None


def is_read_below(above: str, leaf: str, owners: Mapping[str, set[str]], by_text: bool = True) -> bool:
    """Returns True if verl reads a name of the node `above`, or of what need not be another one of the nodes.

    Args:
        owners: node -> the names by which code knows it, from `owners_of`.
        by_text: whether a text of that name counts, which a loop over names may read.
    """
    reads, nodes = _reads(), set[str]().union(*owners.values())
    own, classes = owners.get(above, {above.rpartition(".")[2]}), {*reads.classes.values()}
    others = nodes | ({TEXT} if not by_text else set())
    if own & classes:  # what is read of a node without a class may be read of a class that no node has
        others |= classes
    found = ({one} if one in nodes else reads.types.get(one, {one}) for one in reads.owners.get(leaf, ()))
    return not set().union(*found) <= others - own


def _is_leaf(config: DictConfig, name: str) -> bool:
    """Returns True if a setting is one of verl's, with a value that is known, and not an argument of other code."""
    above, _, leaf = name.rpartition(".")
    node = value_of(config, above) if above else None
    free = any(FREE.fullmatch(part) or part in HANDED_ON for part in name.split("."))
    if not isinstance(node, DictConfig) or leaf not in node or free or is_unknown(config, name):
        return False
    return not OmegaConf.is_config(value_of(config, name))


def owners_of(config: DictConfig) -> dict[str, set[str]]:
    """Returns each node of a config -> the names by which code knows it: its own, and its class."""
    nodes, owners = [("", OmegaConf.to_container(config))], dict[str, set[str]]()
    for place, node in nodes:  # grows
        kind = _reads().classes.get(str(node.get("_target_", "")).rpartition(".")[2], "")
        owners[place] = {place.rpartition(".")[2], kind} - {""}
        nodes += [(f"{place}.{name}".lstrip("."), value) for name, value in node.items() if isinstance(value, dict)]
    return owners


def _takers(config: DictConfig) -> Mapping[str, set[str]]:
    """Returns setting -> the settings that an interpolation gives its value."""
    takers = defaultdict[str, set[str]](set)
    nodes: list[tuple[str, object]] = [("", OmegaConf.to_container(config))]
    for place, value in nodes:  # grows
        if isinstance(value, dict):
            nodes += [(f"{place}.{name}".lstrip("."), below) for name, below in value.items()]
        for dots, name in INTERPOLATED.findall(value) if isinstance(value, str) else ():
            above = place.split(".")[: -len(dots)] if dots else []
            takers[".".join([*above, name])].add(place)
    return takers


@dataclass(frozen=True)
class _Reads:
    """What verl's sources read.

    Attributes:
        owners: name -> what they read it of: "" for anything, TEXT if it is only a text, else a name or a class.
        classes: class of a node -> the first of its bases, because engines have methods of each other's.
        types: name -> the classes that it always has.
    """

    owners: Mapping[str, set[str]]
    classes: Mapping[str, str]
    types: Mapping[str, set[str]]


@cache
def _reads() -> _Reads:
    """What a class stores as an attribute itself, such as an argument, it does not read from a config; a field of a
    dataclass it may."""
    texts = []
    for file in folder.rglob("*.py") if (folder := package_folder("verl")) else ():
        if folder and not ELSEWHERE.search(file.relative_to(folder).as_posix()):
            text = file.read_text(encoding="utf-8")
            texts.append(IMPORT.sub("", OLD_TRAINER.sub("", text) if "class RayPPOTrainer" in text else text))
    bases = {name: base for text in texts for name, base in CLASS.findall(text) if name != "BaseConfig"}
    classes = {name: _first_base(name, bases) for name in bases}
    types, owners = _types("\n".join(texts), classes), defaultdict[str, set[str]](set)
    for part in (part for text in texts for part in BEFORE_A_CLASS.split(text)):
        own = {*STORED.findall(part)} - {*FIELD.findall(part)}
        kind = classes.get(found[1], "") if (found := CLASS.match(part)) else ""
        for chain in {*CHAIN.findall(part)}:
            first, *rest = NAME.findall(chain) if chain[0].isidentifier() else ["", *NAME.findall(chain)]
            if rest and not (first == "self" and rest[0] in own):
                of = first if first in types else kind if first == "self" else TEXT if chain[0] in "\"'" else ""
                owners[rest[0]].add(of)
            for owner, name in pairwise(rest):
                owners[name].add(owner)
    return _Reads(owners, classes, types)


def _first_base(name: str, bases: Mapping[str, str]) -> str:
    return _first_base(bases[name], bases) if bases[name] in bases else name


def _types(text: str, classes: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns the names that have classes of nodes as types wherever they have one."""
    types = defaultdict[str, set[str]](set)
    for name, kind in TYPED.findall(text):
        types[name].add(kind)
    return {name: {classes[one] for one in kinds} for name, kinds in types.items() if kinds <= classes.keys()}
