"""The names of a quantity in verl and in other frameworks, as `names.toml` lists them.

A report asks for a quantity by its canonical name, and finds it under whatever name the run logged:

    for alias in aliases_of("vllm_kl/k1"):
        for name in filter(alias.matches, logged):
            values = alias.convert(logged[name])
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
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


@dataclass(frozen=True)
class Alias:
    """A name under which frameworks log a quantity, or a family of such names.

    Attributes:
        name: in the name of a family, `*` matches one part, `**` any number of parts, `{a,b}` a or b.
        frameworks: the frameworks that log it; () if unknown.
        scale, offset: the quantity is `scale * logged + offset`.
        exceptions: names and families within this family that measure something else.
    """

    name: str
    frameworks: tuple[str, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    exceptions: tuple[str, ...] = ()

    @property
    def is_family(self) -> bool:
        return "*" in self.name or "{" in self.name

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return Metric(self.name, "").pattern  # families are written as those of our own metrics

    @cached_property
    def _exceptions(self) -> tuple[re.Pattern[str], ...]:
        return tuple(Metric(each, "").pattern for each in self.exceptions)

    def matches(self, logged_name: str) -> bool:
        """Returns True if a run that logged this name logged the quantity."""
        if self._pattern.fullmatch(logged_name) is None:
            return False
        return not any(pattern.fullmatch(logged_name) for pattern in self._exceptions)

    def convert(self, values: Any) -> Any:
        """Returns logged values as values of the quantity, in its unit and with its sign."""
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


@lru_cache(maxsize=4096)
def quantity_of(logged_name: str) -> Quantity | None:
    """Returns the quantity that a metric measures: by its exact name, else by the first family that it belongs to."""
    if (exact := _exact_names().get(logged_name)) is not None:
        return exact
    return next((quantity for alias, quantity in _families() if alias.matches(logged_name)), None)


def by_quantity(logged_names: Iterable[str]) -> dict[str, dict[str, Alias]]:
    """Returns canonical name -> logged name -> its alias, in order of preference.

    A metric of no known quantity, or of a quantity with many series such as a validation, keeps its own name.
    """
    found: dict[str, dict[str, Alias]] = {}
    for name in logged_names:
        canonical, alias, _ = _alias_of(name)
        found.setdefault(canonical, {})[name] = alias
    return {
        canonical: dict(sorted(names.items(), key=lambda item: _alias_of(item[0])[2]) if len(names) > 1 else names)
        for canonical, names in found.items()
    }


@lru_cache(maxsize=1 << 16)
def _alias_of(logged_name: str) -> tuple[str, Alias, int]:
    """Returns the canonical name of a metric, its alias, and the alias's place in the order of preference."""
    quantity = quantity_of(logged_name)
    if quantity is None or quantity.aliases[0].is_family:
        return logged_name, Alias(logged_name), 0
    exact = (place for place, alias in enumerate(quantity.aliases) if alias.name == logged_name)
    family = (place for place, alias in enumerate(quantity.aliases) if alias.matches(logged_name))
    place = next(exact, None)
    place = next(family) if place is None else place
    return quantity.name, quantity.aliases[place], place


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
def _exact_names() -> Mapping[str, Quantity]:
    """Returns the quantities by each of their names that is not a family."""
    return {alias.name: quantity for quantity in quantities() for alias in quantity.aliases if not alias.is_family}


@cache
def _families() -> tuple[tuple[Alias, Quantity], ...]:
    return tuple((alias, quantity) for quantity in quantities() for alias in quantity.aliases if alias.is_family)


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
    scale, offset, exceptions = float(entry.get("scale", 1)), float(entry.get("offset", 0)), tuple(entry.get("but", ()))
    for prefix in dict.fromkeys(prefix for each in frameworks for prefix in prefixes.get(each, [""])):
        yield Alias(prefix + name, frameworks, scale, offset, exceptions)
