"""The names of a quantity in verl and in other frameworks, as `names.toml` lists them.

A report asks for a quantity by its canonical name, and finds it under whatever name the run logged:

    for alias in aliases_of("vllm_kl/k1"):
        for name in filter(alias.matches, logged):
            values = alias.convert(logged[name])

A logged name and a name of the table are the same if their normal forms are: `Mismatch KL`, `mismatch_kl` and
`Mismatch-KL (nats)` are one name in every form of file.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from verl_ext.base.metrics import SECTIONS, find
from verl_ext.base.metrics.metric import Metric

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("names.toml")
# Canonical names of quantities that several findings, the guard or the report read.
REWARD, REWARD_MAX, REWARD_MIN = "critic/score/mean", "critic/score/max", "critic/score/min"
VALIDATION = "val-core/**/mean@*"  # all scores of validation sets
LENGTH, ENTROPY, GRADIENT = "response_length/mean", "actor/entropy", "actor/grad_norm"
K3, K1 = "vllm_kl/k3", "vllm_kl/k1"
LOG_RATIO, PROB_DIFF = "vllm_kl/log_ratio_abs_mean", "vllm_kl/prob_diff_mean"
SEPARATORS = str.maketrans(" .-", "___")
UNIT = re.compile(r"(?<=\w)\s*[(\[][^()\[\]]*[)\]]$")  # "seq_len (tok/sample)"
EVERYTHING = (-math.inf, math.inf)
TELLING = re.compile(
    r"log_?p|eos(?:_|$)|kl(?:_|/|$)|mismatch|ratio(?!n)|prob|reward|score|entropy|grad|nan|advantage|correct|success|solve|accura"
    r"|stale|truncat|respon|completion|answer"
)
# Beginnings of names that verl and this package give, and the other trainers of names.toml do not.
VERLS = ("actor/", "critic/", "response_length/", "timing_s/", "val-core/", "vllm_kl/", "router/", "guard/")
# What is no mean of a batch: settings, times, one of several rewards, and other parts of a distribution.
PART = re.compile(
    r"(?:^|/)rewards/|(?:format|accuracy)_reward"
    r"|(?:^|[/_])(?:std|min|max|median|p\d+|n|coe?f\w*|threshold|target|cap|eps\w*|clip|low|high|time|timing)(?:[/_]|$)"
)
# A name of both kinds of words and no others is a reward's: `train_avg_reward`, `Percentage of correct examples`.
REWARD_WORDS = {*("reward", "rewards", "score", "scores", "return", "correct", "accuracy", "acc", "success", "solved")}
OTHER_WORDS = {
    *("train", "training", "rollout", "rollouts", "mean", "avg", "average", "all", "overall", "total", "batch", "of"),
    *("share", "fraction", "rate", "percentage", "percent", "pct", "answers", "examples", "episode", "episodic"),
}
BESIDE = re.compile(r"^(?:mean|avg|average)_|_(?:mean|avg|average)$")
MOSTLY = 0.5  # a name that is logged at fewer of the steps than this is not the run's series


@lru_cache(maxsize=1 << 16)
def normal(name: str) -> str:
    """Returns a name without differences of case, separators, blanks around a slash, and a unit at its end."""
    parts = UNIT.sub("", name.strip().lower()).split("/")
    return "/".join(re.sub("_+", "_", part.strip().translate(SEPARATORS)) for part in parts)


@dataclass(frozen=True)
class Alias:
    """A name under which frameworks log a quantity, or a family of such names.

    Attributes:
        name: in the name of a family, `*` matches one part, `**` any number of parts, `{a,b}` a or b.
        frameworks: the frameworks that log it; () if unknown.
        scale, offset: the quantity is `scale * logged + offset`.
        log: the quantity is the logarithm of what is logged.
        range: what the quantity can be; a name whose median is outside measures something else.
        exceptions: names and families within this family that measure something else.
        not_with: a quantity that a run does not log if this name is an alias.
        by_words: the name is not in the table, and its words say what it is.
    """

    name: str
    frameworks: tuple[str, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    log: bool = False
    range: tuple[float, float] = EVERYTHING
    exceptions: tuple[str, ...] = ()
    not_with: str = ""
    by_words: bool = False

    @property
    def is_family(self) -> bool:
        return "*" in self.name or "{" in self.name

    @cached_property
    def _names(self) -> tuple[Metric, ...]:
        """The name, and its exceptions; families are written as those of our own metrics."""
        return tuple(Metric(normal(each), "") for each in (self.name, *self.exceptions))

    def matches(self, logged_name: str) -> bool:
        """Returns True if a run that logged this name logged the quantity."""
        ours, *exceptions = self._names
        return ours.has(name := normal(logged_name)) and not any(each.has(name) for each in exceptions)

    def can_be(self, values: Any) -> bool:
        """Returns True if logged values can be values of the quantity: their median is within its range."""
        import numpy as np  # a launch reads names, and computes nothing

        low, high = self.range
        finite = np.asarray(values)[np.isfinite(values)]
        return not finite.size or bool(low <= np.median(finite) <= high)

    def convert(self, values: Any) -> Any:
        """Returns logged values as values of the quantity, in its unit and with its sign."""
        import numpy as np

        if self.log:
            with np.errstate(all="ignore"):
                values = np.log(values)
        return self.scale * values + self.offset


@dataclass(frozen=True)
class Quantity:
    """A quantity that several frameworks log, under different names.

    Attributes:
        name: the canonical name: ours, else verl's, else that of a framework which logs it.
        aliases: in order of preference; the first is the canonical name.
        setting: the override that makes a run log it, unless its section of `base.metrics` has one.
    """

    name: str
    aliases: tuple[Alias, ...]
    setting: str = ""


@cache
def quantities() -> tuple[Quantity, ...]:
    return read_table(TABLE.read_text(encoding="utf-8"))


def aliases_of(canonical: str) -> tuple[Alias, ...]:
    """Returns the names of a quantity in order of preference, the canonical one first. A metric that is not in the
    table has only its own name."""
    found = _canonical_names().get(canonical)
    return (Alias(canonical),) if found is None else found.aliases


@lru_cache(maxsize=1 << 16)
def _readings_of(logged_name: str) -> tuple[tuple[Quantity, Alias], ...]:
    """Returns what a metric may measure, under which alias: by its exact name, else by the first family it is in, else
    by its words."""
    if exact := _exact_names().get(normal(logged_name)):
        return exact
    by_words = [(_canonical_names()[REWARD], Alias(logged_name, by_words=True))] if _is_a_reward(logged_name) else []
    return tuple(islice((each for each in (*_families(), *by_words) if each[1].matches(logged_name)), 1))


def _is_a_reward(logged_name: str) -> bool:
    """Returns True for a name that is a reward's by its words."""
    words = set(re.split("[/_]", name := normal(logged_name)))
    both = not words.isdisjoint(REWARD_WORDS) and not words.isdisjoint(OTHER_WORDS)
    return both and words <= REWARD_WORDS | OTHER_WORDS and not PART.search(name)


def quantity_of(logged_name: str) -> Quantity | None:
    """Returns the quantity that a metric measures; the likelier one, if its values decide between two."""
    return next((quantity for quantity, _ in _readings_of(logged_name)), None)


def is_by_words(logged_name: str) -> bool:
    """Returns True for a name that only its words make a reward's; a printed sample may have such a name too."""
    return any(alias.by_words for _, alias in _readings_of(logged_name))


def by_quantity(logged: Mapping[str, Any]) -> dict[str, dict[str, Alias]]:
    """Returns canonical name -> logged name -> its alias: which of several metrics is the run's comes first.

    That is the one that the table prefers, of those that are logged at MOSTLY of the steps at which any of them is: a
    printed sample's reward has the run's name, and is printed now and then. A metric of no known quantity, or of a
    quantity with many series such as a validation, keeps its own name. So does a reward by its words, unless the run
    has no other one.

    Args:
        logged: the readings of each metric, a number or a series.
    """
    found: dict[str, dict[str, Alias]] = {}
    everything = {quantity.name for name in logged for quantity, _ in _readings_of(name)}
    for name, series in logged.items():
        values = getattr(series, "values", series)
        readings = [each for each in _readings_of(name) if each[1].not_with not in everything]
        fitting = (each for each in readings if each[1].range == EVERYTHING or each[1].can_be(values))
        quantity, alias = next(fitting, (None, None))
        if quantity is None or alias is None or alias.by_words or quantity.aliases[0].is_family:
            found.setdefault(name, {})[name] = Alias(name)
        else:
            found.setdefault(quantity.name, {})[name] = alias
    alone = found.keys().isdisjoint(_canonical_names())
    for name in () if alone else [name for name in found if name in logged and not _readings_of(name)]:
        quantity, alias = _by_end(name) or (None, None)
        if quantity is not None and alias is not None and quantity.name not in found:
            del found[name]
            found[quantity.name] = {name: alias}
    if REWARD not in found and (reward := _reward_by_words(logged)) is not None:
        del found[reward]
        found[REWARD] = {reward: Alias(reward, by_words=True)}
    return {canonical: _preferred(canonical, names, logged) for canonical, names in found.items()}


@lru_cache(maxsize=1 << 16)
def _by_end(logged_name: str) -> tuple[Quantity, Alias] | None:
    """Returns what a name measures that is in the table but for what stands before it or `mean` beside it, such as
    `clipped_ratio` and `mean KL`; None if several quantities have such names, or if it is no mean."""
    name = normal(logged_name)
    found = _ends().get(name) or _exact_names().get(BESIDE.sub("", name), ())
    return found[0] if len({quantity.name for quantity, _ in found}) == 1 and not PART.search(name) else None


def _can_be_cut(alias: Alias) -> bool:
    """Returns True for another trainer's name of the quantity itself: a count may have the name of a share of ours."""
    is_it = (alias.scale, alias.offset, alias.log) == (1.0, 0.0, False)
    return bool(alias.frameworks) and not alias.is_family and " " not in alias.name and is_it


@cache
def _ends() -> Mapping[str, list[tuple[Quantity, Alias]]]:
    """Returns the last parts of each name of the table that have several words."""
    found: dict[str, list[tuple[Quantity, Alias]]] = {}
    for quantity in quantities():
        for alias in filter(_can_be_cut, quantity.aliases):
            parts = normal(alias.name).split("/")
            for end in ("/".join(parts[begin:]) for begin in range(1, len(parts))):
                if re.search("[/_]", end):
                    found.setdefault(end, []).append((quantity, alias))
    return found


def _reward_by_words(logged: Mapping[str, Any]) -> str | None:
    """Returns the only metric that is a reward by its words, if most steps have it."""
    likely = [*filter(is_by_words, logged)]
    likely = [name for name in likely if "reward" in name.lower()] or likely
    often = MOSTLY * max(map(_readings_in, logged.values()), default=0)
    return likely[0] if len(likely) == 1 and _readings_in(logged[likely[0]]) >= often else None


def _readings_in(series: Any) -> int:
    values = getattr(series, "values", series)
    return len(values) if hasattr(values, "__len__") else 1


def _preferred(canonical: str, names: dict[str, Alias], logged: Mapping[str, Any]) -> dict[str, Alias]:
    if len(names) < 2:
        return names
    sizes = {name: _readings_in(logged[name]) for name in names}
    enough = MOSTLY * max(sizes.values())
    places = {alias: place for place, alias in enumerate(_canonical_names()[canonical].aliases)}
    return dict(sorted(names.items(), key=lambda item: (sizes[item[0]] < enough, places[item[1]])))


def combined() -> Iterator[tuple[str, str, str, str]]:
    """Yields the names `A - B` and `A / B` of the table, with A, the sign and B: the difference or the ratio of two
    metrics is the quantity."""
    for name in (alias.name for quantity in quantities() for alias in quantity.aliases):
        if len(words := name.split(" ")) == 3 and words[1] in "-/":
            yield name, words[0], words[1], words[2]


def known_metrics(logged_names: Iterable[str]) -> set[str]:
    """Returns the names of verl's metrics and ours, in a run of verl."""
    logged = set(logged_names)
    of_verl = any(name.startswith(VERLS) for name in logged)  # `rollout/**` is not verl's in another trainer's run
    return {name for name in logged if find(name) is not None} if of_verl else set()


def unread_names(logged_names: Iterable[str]) -> list[str]:
    """Returns the names that no quantity of the table has, and no metric of verl in a run of verl, but that look as if
    they mattered."""
    logged = list(logged_names)
    known = known_metrics(logged)
    telling = (name for name in logged if TELLING.search(normal(name)) and not PART.search(normal(name)))
    return [name for name in telling if name not in known and (not _readings_of(name) or is_by_words(name))]


def setting_for(canonical: str) -> str:
    """Returns the override that makes verl or verl_ext log a quantity or one of our metrics; "" if none is known."""
    if (found := _canonical_names().get(canonical)) is not None and found.setting:
        return found.setting
    metric = find(canonical)
    return next((section.override for section in SECTIONS if metric in section.metrics), "")


def engines_names(signal: str) -> tuple[str, ...]:
    """Returns the names under which the engines' part of a metric is logged: at lag 0, and of rescored trajectories."""
    start = "vllm_kl/"
    return (f"{signal}/lag/0", signal.replace(start, f"{start}engine/", 1)) if signal.startswith(start) else ()


@cache
def _canonical_names() -> Mapping[str, Quantity]:
    return {quantity.name: quantity for quantity in quantities()}


@cache
def _exact_names() -> Mapping[str, tuple[tuple[Quantity, Alias], ...]]:
    """Returns what each name that is not a family may measure, by its normal form."""
    found: dict[str, tuple[tuple[Quantity, Alias], ...]] = {}
    for quantity in quantities():
        for alias in (each for each in quantity.aliases if not each.is_family):
            known = found.get(normal(alias.name), ())
            if all(each is not quantity for each, _ in known):
                found[normal(alias.name)] = (*known, (quantity, alias))
    return found


@cache
def _families() -> tuple[tuple[Quantity, Alias], ...]:
    return tuple((quantity, alias) for quantity in quantities() for alias in quantity.aliases if alias.is_family)


def read_table(text: str) -> tuple[Quantity, ...]:
    """Reads a table in the form of `names.toml`; `test_names.py` checks the shipped table."""
    table = tomllib.loads(text)
    prefixes = table.pop("prefixes", {})
    return tuple(_quantity(name, entry, prefixes) for name, entry in table.items())


def _quantity(name: str, entry: dict[str, Any], prefixes: Mapping[str, list[str]]) -> Quantity:
    setting = entry.pop("setting", "")
    found = (alias for written, value in entry.items() for alias in _aliases(written, value, prefixes))
    aliases = {name: Alias(name)}
    for alias in found:
        aliases.setdefault(alias.name, alias)
    return Quantity(name, tuple(aliases.values()), setting)


def _aliases(name: str, value: str | Mapping[str, Any], prefixes: Mapping[str, list[str]]) -> Iterator[Alias]:
    """Yields an alias under every prefix of the frameworks that log it."""
    entry = {"in": value} if isinstance(value, str) else value
    frameworks = tuple(entry["in"].split(", "))
    alias = Alias(
        name,
        frameworks,
        scale=float(entry.get("scale", 1)),
        offset=float(entry.get("offset", 0)),
        log=bool(entry.get("log")),
        range=tuple(entry.get("range", EVERYTHING)),
        exceptions=tuple(entry.get("but", ())),
        not_with=entry.get("not_with", ""),
    )
    for prefix in dict.fromkeys(prefix for each in frameworks for prefix in prefixes.get(each, [""])):
        yield replace(alias, name=prefix + name)
