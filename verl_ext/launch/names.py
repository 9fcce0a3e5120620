"""The names that verl enumerates, such as estimators, losses and engines: one table of settings, and where the sources
list the values of each.

The sources are read as text, without an import, so that each version of verl and of the engines answers for itself. The
patterns were written for verl 0.9.1, vLLM 0.27, SGLang 0.5.12 and megatron-core 0.16.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.base.methods import OF_YOUR_OWN
from verl_ext.base.names import OUR_GROUPS
from verl_ext.features.advantages import ESTIMATORS
from verl_ext.features.losses import EXTERNAL_LIB, LOSS, LOSSES, UNBIASED
from verl_ext.features.verl_config import (
    ACTOR,
    CORRECTION,
    MODE,
    ROLLOUT,
    judged,
    needs_critic,
    needs_reference,
    repeats_another,
    value_of,
)
from verl_ext.launch.packages import FSDP, STRATEGY, package_folder

GROUPS = (*OUR_GROUPS, "model_engine")  # config groups, which are no settings
REF = "actor_rollout_ref.ref"
AGENT = f"{ROLLOUT}.agent"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
PLUGINS = ("stability.plugins", EXTERNAL_LIB)
LOOPS = (*PLUGINS, f"{AGENT}.agent_loop_config_path", f"{AGENT}.agent_loop_manager_class")
MODULES = "VERL_USE_EXTERNAL_MODULES"  # environment variable: modules that `import verl` imports
MANAGER, SOURCE = "reward.reward_manager.name", "reward.reward_manager.source"
RESUME, RESUMED = "trainer.resume_mode", "trainer.resume_from_path"
DTYPES = ("fsdp_config.model_dtype", *(f"fsdp_config.mixed_precision.{one}_dtype" for one in ("param", "reduce")))
# Quoted names of a tuple, a list, a set or a Literal.
LISTED = r"(?:\[|\(|\{|Literal\[).*?[\])}]"
QUOTED = re.compile(r"""["']([\w.+-]+)["']""")
# The least similarity; how much less than the best; what the similarity of a part of a name counts.
CLOSE, BESIDE, OF_A_PART = 0.7, 0.06, 0.9
CLOSE_KEYS = 0.78  # settings have longer names, whose ends are often the same

FREE = re.compile(r"(?!val_kwargs$)\w*kwargs|override_\w+|custom|stability")  # nodes with the settings of other code
FIELD = re.compile(r"^ *(\w+): *([^#\n]*)", re.MULTILINE)  # a line of YAML, or a field of a dataclass
NUMBER = re.compile(r"-?[\d._]+(?:e-?\d+)?|(?:Optional\[)?(?:int|float)\]?(?: \| None)?(?: =.*)?")
SWITCH = re.compile(r"[Tt]rue|[Ff]alse|(?:Optional\[)?bool\]?(?: \| None)?(?: =.*)?")
UNSAID = re.compile(r"null|None|\?\?\?|\$\{.*|\"?\"?|\w+ \w+.*")  # no type is seen: a variable, or a docstring's line
YES, NO = ("true", "yes", "on", "y"), ("no", "off", "n", "none", "null")


@dataclass(frozen=True)
class Names:
    """One row of the table.

    Attributes:
        files: a pattern of files in the package's folder.
        pattern: an expression whose matches in these files, or whose group there, have the names in quotes.
        when: a setting and its values with which the row applies; () for always.
        used: returns whether verl reads the setting in this run.
        ours: the names that verl_ext adds.
        opened_by: settings with which other code may register more names; () if none can.
        suffix: what may follow each name.
    """

    setting: str
    files: str
    pattern: str
    package: str = "verl"
    when: tuple[str, Collection[Any]] = ("", ())
    used: Callable[[DictConfig], Any] = bool
    ours: Collection[str] = ()
    opened_by: tuple[str, ...] = ()
    suffix: str = ""


# Setting -> old name -> its name in verl 0.9.1, with bounds on the inverse ratio (`compute_rollout_rejection_mask`).
RENAMED = {f"{CORRECTION}.rollout_rs": {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}}
ALGORITHMS = "trainer/ppo/core_algos.py"
ENGINES = partial(
    Names,
    files="workers/engine/*/*.py",
    pattern=rf'EngineRegistry\.register\([^)]*?backend=({LISTED}|"\w+")',
)
# Kinds that only raise NotImplementedError, such as `full`, are left out.
KL = partial(
    Names,
    files=ALGORITHMS,
    pattern=r"if kl_penalty (?:==|in) [^\n]*:\n(?:\s+#[^\n]*\n)*(?!\s*(?:#|raise))",
    suffix="+",
)
TABLE = (
    Names("trainer.v1.trainer_mode", "trainer/ppo/v1/*.py", r'@register_trainer\("\w+"\)', opened_by=PLUGINS),
    Names(f"{ROLLOUT}.name", "workers/rollout/replica.py", r'RolloutReplicaRegistry\.register\("\w+"'),
    Names(f"{ROLLOUT}.mode", "workers/rollout/base.py", r'(?<=", )"\w+"(?=\): "verl\.)'),
    ENGINES(STRATEGY),
    ENGINES("critic.strategy", used=needs_critic),
    ENGINES(f"{REF}.strategy", used=needs_reference),
    Names("algorithm.adv_estimator", ALGORITHMS, r'^    [A-Z_]+ = "\w+"$', ours=ESTIMATORS, opened_by=PLUGINS),
    Names(f"{LOSS}.loss_mode", ALGORITHMS, r'@register_policy_loss\("\w+"\)', ours=LOSSES, opened_by=PLUGINS),
    Names(f"{ACTOR}.loss_agg_mode", "workers/config/actor.py", f"valid_loss_agg_modes = {LISTED}"),
    KL(f"{ACTOR}.kl_loss_type", used=lambda config: value_of(config, f"{ACTOR}.use_kl_loss"), ours=(UNBIASED,)),
    KL("algorithm.kl_penalty", used=lambda config: value_of(config, "algorithm.use_kl_in_reward")),
    Names(
        "algorithm.kl_ctrl.type",
        ALGORITHMS,
        r'kl_ctrl\.type == "\w+"',
        used=lambda config: value_of(config, "algorithm.use_kl_in_reward"),
    ),
    Names(f"{CORRECTION}.rollout_is", "trainer/ppo/rollout_corr_helper.py", f"valid_is_levels = {LISTED}"),
    Names(
        f"{CORRECTION}.rollout_rs",
        "trainer/ppo/rollout_corr_helper.py",
        rf"^SUPPORTED_ROLLOUT_RS_OPTIONS[^=]*= {LISTED}",
    ),
    Names(
        MANAGER,
        "experimental/reward_loop/reward_manager/*.py",
        r'@register\w*\("\w+"\)',
        when=(SOURCE, ("register",)),
        opened_by=PLUGINS,
    ),
    Names(
        f"{AGENT}.default_agent_loop",
        "experimental/agent_loop/*.py",
        r'@register\w*\("\w+"\)',
        opened_by=LOOPS,
    ),
    Names(
        f"{ROLLOUT}.multi_turn.format",
        "experimental/agent_loop/tool_parser.py",
        r'ToolParser\.register\("[\w-]+"\)',
        used=lambda config: value_of(config, f"{AGENT}.default_agent_loop") == "tool_agent",
        opened_by=(*LOOPS, f"{ROLLOUT}.multi_turn.function_tool_path"),
    ),
    Names(
        f"{ENGINE}.backend",
        "checkpoint_engine/*.py",
        r'CheckpointEngineRegistry\.register\("\w+"\)',
        opened_by=(*PLUGINS, f"{ENGINE}.custom_backend_module"),
    ),
    Names("trainer.logger", "utils/tracking.py", rf'supported_backend = {LISTED}|if backend == "tracking"'),
    Names(RESUME, "trainer/ppo/v1/trainer_base.py", r'trainer\.resume_mode == "\w+"'),
    Names(
        "trainer.v1.sampler.max_off_policy_strategy",
        "trainer/ppo/v1/replay_buffer.py",
        f"max_off_policy_strategy in {LISTED}",
        when=(MODE, ("colocate_async", "separate_async")),
    ),
    Names(
        f"{ACTOR}.optim.lr_scheduler_type",
        "workers/config/optimizer.py",
        rf"class FSDPOptimizerConfig.*?lr_scheduler_type in ({LISTED})",
        when=(STRATEGY, FSDP),
    ),
    Names(
        f"{ACTOR}.optim.lr_decay_style",
        "optimizer_param_scheduler.py",
        r"self\.lr_decay_style == ['\"][\w-]+['\"]",
        package="megatron.core",
        when=(STRATEGY, ("megatron",)),
    ),
    *(
        Names(f"{role}.{part}", "utils/torch_dtypes.py", rf"^\w+_LIST = {LISTED}")
        for role in (ACTOR, REF)
        for part in (*DTYPES, "megatron.dtype")
    ),
    *(
        Names(f"{ROLLOUT}.{name}", files, pattern, package=engine, when=(f"{ROLLOUT}.name", (engine,)))
        for engine, name, files, pattern in (
            ("vllm", "dtype", "config/model.py", f"^ModelDType = {LISTED}"),
            ("vllm", "logprobs_mode", "config/model.py", f"^LogprobsMode = {LISTED}"),
            ("vllm", "load_format", "model_executor/model_loader/__init__.py", f"^LoadFormats = {LISTED}"),
            (
                "sglang",
                "dtype",
                "srt/configs/model_config.py",
                rf'^_STR_DTYPE_TO_TORCH_DTYPE = {LISTED}|dtype == "auto"',
            ),
            ("sglang", "load_format", "srt/configs/load_config.py", r'^    [A-Z_]+ = "\w+"'),
        )
    ),
)


def unknown_names(config: DictConfig) -> Iterator[Problem]:
    """Yields a problem for each value in a config that verl, or the engine that gets it, does not know.

    That is: names that the table TABLE has, texts in the place of a number or a switch, and a `resume_mode` without its
    path. A name that a plugin may register is a note, and one that verl does not read in this run a warning.
    """
    for row in TABLE:
        yield from judged(_row_problems(row, config))
    yield from _mistyped(config)
    path = value_of(config, RESUMED)
    if value_of(config, RESUME) == "resume_path" and "global_step_" not in str(path):
        # asserted in `_load_checkpoint` of verl/trainer/ppo/v1/trainer_base.py
        yield Problem(f"{RESUME}=resume_path with {RESUMED}={path}", "verl needs the path of a folder global_step_N")


def known_names(setting: str) -> frozenset[str]:
    """Returns the values that verl and verl_ext have for a setting of the table; none if the sources are not here."""
    rows = (row for row in TABLE if row.setting == setting)
    return frozenset().union(*({*_names_in(row.package, row.files, row.pattern), *row.ours} for row in rows))


def unknown_name(setting: str, name: str, known: Sequence[str]) -> Problem:
    """Returns the problem of a name that is not one of the known, with similar ones, or all."""
    near = similar(name, known)
    why = f"similar: {', '.join(near)}" if near else f"choose one of: {', '.join(known)}"
    return Problem(f"{setting}={name} is not known", why, (f"{setting}={near[0]}",) if len(near) == 1 else ())


def similar(name: str, known: Collection[str], close: float = CLOSE) -> list[str]:
    """Returns the most similar of the known names, best first, at most three; [] if none is similar."""
    scores = {one: _likeness(name, one) for one in known}
    least = max(close, max(scores.values(), default=0) - BESIDE)
    return sorted((one for one in scores if scores[one] >= least), key=lambda one: (-scores[one], one))[:3]


def similar_keys(key: str, config: DictConfig) -> list[str]:
    """Returns at most three settings of a config, or config groups, that are similar to one that it does not have."""
    above, parts = "", key.split(".")
    while len(parts) > 1 and OmegaConf.is_dict(value_of(config, ".".join([*filter(None, [above]), parts[0]]))):
        above = ".".join([*filter(None, [above]), parts.pop(0)])
    node = value_of(config, above) if above else config
    wrong, *rest = parts
    siblings = [one for one in (*map(str, node), *(() if above else GROUPS)) if rest or one != wrong]  # a + added it
    near = [".".join(filter(None, [above, one, *rest])) for one in similar(wrong, siblings, CLOSE_KEYS)]
    if found := [one for one in near if not rest or rest[-1] in (value_of(config, one.rpartition(".")[0]) or ())]:
        return found
    if rest:
        return []
    elsewhere = {one for one, _ in _values_below(OmegaConf.to_container(config), "") if one.rpartition(".")[2] == wrong}
    return sorted(elsewhere - {key}, key=lambda one: (-_ratio(key, one), one))[:3]


def _likeness(one: str, other: str) -> float:
    """Returns the similarity of two names as wholes, or of the words of one to their like in the other."""
    one, other = (re.sub(r"[-. ]", "_", name.lower()) for name in (one, other))
    words = (one.split("_"), other.split("_"))
    in_part = (
        min(max(_ratio(word, like) for like in more) if len(word) > 2 else 0 for word in few)
        for few, more in (words, words[::-1])
    )
    return max(_ratio(one, other), OF_A_PART * max(in_part))


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _row_problems(row: Names, config: DictConfig) -> Iterator[Problem]:
    given, (setting, values) = value_of(config, row.setting), row.when
    if given is None or OmegaConf.is_dict(given) or (setting and value_of(config, setting) not in values):
        return
    if repeats_another(config, row.setting):  # which has the problem
        return
    found = _names_in(row.package, row.files, row.pattern)
    known = sorted({*found, *row.ours})
    one_by_one = given if OmegaConf.is_list(given) else re.split(r" *, *", str(given))
    for name in map(str, one_by_one if found else ()):
        if name in known or name.removesuffix(row.suffix) in known:
            continue
        if now := RENAMED.get(row.setting, {}).get(name):
            problem = Problem(f"{row.setting}={name} is {now} now", "verl renamed it", (f"{row.setting}={now}",))
        else:
            problem = unknown_name(row.setting, name, known)
        if name != str(given):  # one of a list
            problem = replace(problem, fix=())
        opened = [one for one in row.opened_by if value_of(config, one)]
        if row.opened_by or "regist" in row.pattern.lower():
            opened += _imported_by_verl()
        if opened:
            why = f"unless {' or '.join(opened)} registers it, the run stops at it; {problem.why}"
            yield replace(problem, why=why, fix=(), level="note")
        elif not row.used(config):
            yield replace(problem, why=f"this run does not read it; {problem.why}", level="warning")
        else:
            yield replace(problem, otherwise=OF_YOUR_OWN if row.opened_by and not problem.fix else "")


def _imported_by_verl() -> list[str]:
    """Returns what else `import verl` imports, which may register names: verl/__init__.py (0.9.1)."""
    others = {point.name for point in entry_points(group="verl.plugins")} - {"verl_ext"}
    return [*([MODULES] if os.environ.get(MODULES) else []), *(f"the plugin {name}" for name in sorted(others))]


def _mistyped(config: DictConfig) -> Iterator[Problem]:
    """Yields texts in the place of a number or a switch, which Hydra accepts, such as `no` and `None`."""
    for place, value in _values_below(OmegaConf.to_container(config), ""):
        kind = _kinds().get(place.rpartition(".")[2])
        if not isinstance(value, str) or value.startswith("${") or not kind:
            continue
        said = value.strip().lower()
        if kind == "number" and not _is_number(said):
            fix = (f"{place}=null",) if said == "none" else ()
            yield Problem(f"{place}={value} is not a number", "verl expects one", fix)
        elif kind == "switch" and said not in YES:
            near = ["false"] if said in NO else similar(said, ("true", "false"))
            fix = (f"{place}={near[0]}",) if len(near) == 1 else ()
            yield Problem(f"{place}={value} is neither true nor false", "it is a text, which counts as true", fix)


def _values_below(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield place, node
        return
    for key, value in node.items():
        if not FREE.fullmatch(str(key)):
            yield from _values_below(value, f"{place}.{key}" if place else str(key))


def _is_number(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False


@cache
def _names_in(package: str, files: str, pattern: str) -> frozenset[str]:
    """Returns the quoted names in what matches a pattern in the files of a package; none if it is not installed."""
    if (folder := package_folder(package)) is None:
        return frozenset()
    texts: Sequence[str] = [file.read_text(encoding="utf-8") for file in sorted(folder.glob(files))]
    matches = (found for text in texts for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE))
    return frozenset(name for found in matches for name in QUOTED.findall(found.group(found.lastindex or 0)))


@cache
def _kinds() -> dict[str, str]:
    """Returns the last part of a setting -> "number" or "switch", for those that have only this kind of value in all of
    verl's configs and dataclasses."""
    if (folder := package_folder("verl")) is None:
        return {}
    kinds: dict[str, set[str]] = {}
    files = (*folder.glob("trainer/config/**/*.yaml"), *folder.glob("trainer/config/*.py"))
    for file in (*files, *folder.glob("workers/config/*.py")):
        for name, value in FIELD.findall(file.read_text(encoding="utf-8")):
            value = value.strip()
            if not UNSAID.fullmatch(value):
                kind = "number" if NUMBER.fullmatch(value) else "switch" if SWITCH.fullmatch(value) else "other"
                kinds.setdefault(name, set()).add(kind)
    return {name: found.pop() for name, found in kinds.items() if found in ({"number"}, {"switch"})}
