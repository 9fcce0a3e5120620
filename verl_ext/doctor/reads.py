"""Which settings verl's sources read: an index of its attributes and keys by their names and by what they belong to.

The sources are searched as text, once for each process. An owner decides only if it is a node of verl's config: in
`trainer.v1.sampler`, a sampler is read of v1, and none of data; `config.sampler` may be any node's.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
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
INTERPOLATED = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")
TEXT = "a text"
STORED, FIELD = re.compile(r"\bself\.(\w+)(?:: [^=\n]+)? = "), re.compile(r"^    (\w+): ", re.MULTILINE)


def without_reader(config: DictConfig, settings: Collection[str]) -> list[str]:
    """Returns those of the settings of verl's own that no code of trainer V1 reads, by an attribute, a key or an
    interpolation.

    A node none of whose settings is read is handed on whole, to code that reads them.
    """
    nodes = node_names(config)
    places = ((name, *name.rpartition(".")[::2]) for name in sorted(settings) if _is_leaf(config, name))
    return [
        name
        for name, above, leaf in places
        if value_of(config, name) is not None
        and not is_read_below(above, leaf, nodes)
        and any(is_read_below(above, str(other), nodes) for other in value_of(config, above))
    ]


def is_read_below(above: str, leaf: str, nodes: Collection[str], by_text: bool = True) -> bool:
    """Returns True if verl reads a name of the node `above`, or of what need not be another one of the nodes.

    Args:
        by_text: whether a text of that name counts, which a loop over names may read.
    """
    other = {*nodes, *(() if by_text else [TEXT])} - {above.rpartition(".")[2]}
    return not _reads().get(leaf, set()) <= other


def _is_leaf(config: DictConfig, name: str) -> bool:
    """Returns True if a setting is one of verl's, with a value that is known, and not an argument of other code."""
    above, _, leaf = name.rpartition(".")
    node = value_of(config, above) if above else None
    free = any(FREE.fullmatch(part) or part in HANDED_ON for part in name.split("."))
    if not isinstance(node, DictConfig) or leaf not in node or free or is_unknown(config, name):
        return False
    return not OmegaConf.is_config(value_of(config, name))


def node_names(config: DictConfig) -> set[str]:
    """Returns the names of all nodes of a config."""
    nodes, names = [OmegaConf.to_container(config)], set[str]()
    for node in nodes:  # grows
        below = {str(name): value for name, value in node.items() if isinstance(value, dict)}
        names |= below.keys()
        nodes += below.values()
    return names


@cache
def _reads() -> Mapping[str, set[str]]:
    """Returns name -> what verl's sources and configs read it of: "" for anything, TEXT if it is only a text.

    What a class stores as an attribute itself, such as an argument, it does not read from a config; a field of a
    dataclass it may.
    """
    reads, folder = defaultdict[str, set[str]](set), package_folder("verl")
    if folder is None:
        return reads
    for file in folder.rglob("*.py"):
        if ELSEWHERE.search(file.relative_to(folder).as_posix()):
            continue
        text = file.read_text(encoding="utf-8")
        text = IMPORT.sub("", OLD_TRAINER.sub("", text) if "class RayPPOTrainer" in text else text)
        own = {*STORED.findall(text)} - {*FIELD.findall(text)}
        for chain in {*CHAIN.findall(text)}:
            first, *rest = NAME.findall(chain) if chain[0].isidentifier() else ["", *NAME.findall(chain)]
            if rest and not (first == "self" and rest[0] in own):
                reads[rest[0]].add(TEXT if chain[0] in "\"'" else "")
            for owner, name in pairwise(rest):
                reads[name].add(owner)
    for file in folder.glob("trainer/config/**/*.yaml"):
        for place in INTERPOLATED.findall(file.read_text(encoding="utf-8")):
            for owner, name in pairwise(["", *place.split(".")]):
                reads[name].add(owner)
    return reads
