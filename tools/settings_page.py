"""The tables of docs/settings.md, which `python tools/pages.py` writes.

The names and defaults are those of the dataclasses' fields, the meanings their `Attributes:`. A method that has no
dataclass documents its settings under `Args:` of its function. `docs/NAME.md` in a docstring becomes a link.
`python tools/settings_page.py my_module` imports my_module first, and prints them with the methods that it registers.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple, get_args, get_type_hints

from pages import table

from verl_ext.base.methods import Method
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.filters import BATCH_FILTERS
from verl_ext.features.losses import BASES, LOSS, LOSSES, UNBIASED
from verl_ext.features.settings import GuardSettings, StabilityConfig, Switches
from verl_ext.features.stability import RULE_NEEDS, RULE_SETTINGS, default_node
from verl_ext.features.verl_config import FSDP_REPLAY
from verl_ext.guard.rules import SIDES, Rule

COLUMNS = ("setting", "default", "meaning")
NO_DEFAULT = "-"
# The parts of the `stability` node that have a section of their own, which begins with the dataclass's docstring.
SECTIONS = {
    "rescoring": "Rescoring",
    "trajectories": "Trajectories",
    "fake_quantization": "A gap on purpose",
}


class Row(NamedTuple):
    setting: str
    default: str
    meaning: str


# Settings outside of the `stability` node that no dataclass of ours has.
BASE = Row(
    f"{LOSS}.base",
    "vanilla",
    f"verl's loss that it changes: {', '.join(BASES)}, or your own loss under verl's decorator.",
)
VERLS = (
    Row(
        "actor_rollout_ref.actor.kl_loss_type",
        "verl's",
        f"`{UNBIASED}`, in addition to verl's values: an unbiased KL to the reference. It needs `use_kl_loss=true`.",
    ),
    Row(
        "algorithm.rollout_correction.bypass_mode",
        "verl's",
        "verl's bypass mode. With `true`, the gap is measured and tokens are weighed in the update "
        "(docs/methods.md#bypass-mode).",
    ),
    Row(
        FSDP_REPLAY,
        "disabled",
        "the engine's own setting, which `stability.replay` sets. Under `actor_rollout_ref.actor.veomni` it is "
        "verl's, and replayed by the same hooks; under `actor_rollout_ref.actor.megatron` verl replays.",
    ),
    Row(
        "VERL_EXT_AGENT_LOOP",
        "set by the launch",
        "an environment variable: what a rollout sends. `narrow:0` sends routing in verl's int16 instead of vLLM's "
        "dtype, `turns:0` sends earlier turns again, without a checksum (docs/routing.md#less-of-it), `answers:0` "
        "leaves out the server and the loop of each answer. `narrow:0,turns:0` does both.",
    ),
)


def sections() -> str:
    """Returns a section with a table for each part of the settings."""
    described, node, parts = meanings(StabilityConfig), default_node(), get_type_hints(Switches)
    chosen = [Row(f"stability.{name}", _shown(node[name]), described[name]) for name in ("correction", "filters")]
    rules = Row("stability.guard.rules", _shown(node["guard"]["rules"]), described["rules"])
    bare = ", ".join(f"`{name}`" for name, method in BATCH_FILTERS.items() if not fields(method.settings))
    found = (
        section(
            "What is measured, and the batch",
            "",
            [*chosen, *rows("stability", Switches, without=("guard", *SECTIONS))],
        ),
        section(
            "Corrections",
            "A correction is on when `stability.correction` names it.",
            method_rows("stability", CORRECTIONS),
        ),
        section(
            "Filters",
            f"A filter is on when `stability.filters` names it. Filters without settings: {bare}.",
            method_rows("stability.filters", BATCH_FILTERS),
        ),
        section("Guard", introduction(GuardSettings), [rules, *rows("stability.guard", GuardSettings)]),
        "Each rule, `stability.guard.rules.NAME`, has a signal, one bound and an action:",
        rows_table(rule_rows()),
        *(
            section(title, introduction(parts[name]), rows(f"stability.{name}", parts[name]))
            for name, title in SECTIONS.items()
        ),
        section(
            "Policy losses",
            f"`{LOSS}.loss_mode=NAME` chooses one, as `stability=NAME_loss` does. Its settings are in the same node as "
            "verl's.",
            [BASE, *loss_rows()],
        ),
        section(
            "Advantage estimators",
            "`algorithm.adv_estimator=NAME` chooses one.",
            method_rows("algorithm", ESTIMATORS),
        ),
        section("Settings of verl", "The plugin extends these settings of verl.", VERLS),
    )
    return "\n\n".join(found)


def section(title: str, text: str, found: Iterable[Row]) -> str:
    return "\n\n".join(filter(None, (f"## {title}", linked(text), rows_table(found))))


def rows_table(found: Iterable[Row]) -> str:
    return table([COLUMNS, *((f"`{row.setting}`", row.default, linked(row.meaning)) for row in found)])


def method_rows(prefix: str, methods: Mapping[str, Method]) -> Iterator[Row]:
    for name, method in methods.items():
        yield from rows(f"{prefix}.{name}", method.settings, method.function)


def loss_rows() -> Iterator[Row]:
    """Yields the settings of all policy losses, which share one node."""
    for name, method in LOSSES.items():
        for row in rows(LOSS, method.settings, method.function):
            yield row._replace(meaning=f"`{name}`: {row.meaning}".rstrip())


def rule_rows() -> Iterator[Row]:
    """Yields the settings of a rule; its bound is named after its side."""
    described, usual = meanings(Rule), {one.name: _default(one) for one in fields(Rule)}
    for name in RULE_SETTINGS:
        yield Row(name, NO_DEFAULT if name in RULE_NEEDS else usual[name], described[name])
        if name == "signal":
            yield Row("` or `".join(SIDES), NO_DEFAULT, described["bound"])


def rows(
    prefix: str, kind: type, function: Callable[..., Any] | None = None, *, without: Collection[str] = ()
) -> Iterator[Row]:
    """Yields the settings of a dataclass and of those nested in it, which may be null.

    Args:
        function: the method that takes them; its docstring describes what the dataclass does not.
        without: fields to leave out.
    """
    described, hints = meanings(kind, function), get_type_hints(kind)
    for one in fields(kind):
        name = f"{prefix}.{one.name}"
        if one.name in without:
            continue
        hint = hints[one.name]
        if not is_dataclass(hint):
            yield Row(name, _default(one), described.get(one.name, ""))
        for nested in filter(is_dataclass, (hint, *get_args(hint))):
            yield from rows(name, nested)  # type: ignore[arg-type]


def meanings(kind: type, function: Callable[..., Any] | None = None) -> dict[str, str]:
    """Returns field -> meaning, from the docstrings of a dataclass, of its base classes, and of a function."""
    found: dict[str, str] = {}
    for one in (function, *reversed(kind.__mro__[:-1])):
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", inspect.cleandoc(one.__doc__ or ""), flags=re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def introduction(kind: type) -> str:
    """Returns a docstring's text before `Attributes:`, one line per paragraph."""
    text, _, _ = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def linked(text: str) -> str:
    """Returns the text with pages and modules as links, for a page in docs/."""
    text = re.sub(r"\bdocs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", text)
    return re.sub(r"\b(verl_ext/[\w/]+\.py)", r"[\1](../\1)", text)


def _default(one: Field) -> str:
    if one.default_factory is not MISSING:
        return _shown(one.default_factory())
    return NO_DEFAULT if one.default is MISSING else _shown(one.default)


def _shown(value: Any) -> str:
    """Returns the value as YAML has it."""
    if value is None or isinstance(value, bool) or value == "":
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        import_module(module)
    print(sections())
