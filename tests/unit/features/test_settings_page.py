"""Every setting is described once, at its dataclass, and the page is made from there."""

import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from typing import get_type_hints
from unittest import mock

import pytest

from tests import ROOT
from tools.settings_page import meanings, rows, sections
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.core.corrections import CORRECTIONS, register_correction
from verl_ext.core.filters import BATCH_FILTERS
from verl_ext.core.losses import LOSSES, register_loss
from verl_ext.features.settings import StabilityConfig
from verl_ext.guard.rules import Rule
from verl_ext.upstream.agent_loop import BY_HAND, VARIABLE

REGISTRIES = (CORRECTIONS, BATCH_FILTERS, LOSSES, ESTIMATORS)


def nested(kind: type) -> Iterator[type]:
    yield kind
    for hint in get_type_hints(kind).values():
        if is_dataclass(hint):
            yield from nested(hint)


def undescribed(kind: type, function=None) -> set[str]:
    described = meanings(kind, function)
    return {f"{kind.__name__}.{one.name}" for one in fields(kind) if not described.get(one.name)}


@pytest.fixture
def registries() -> Iterator[None]:
    """Removes what a test registers after the test."""
    with mock.patch.dict(CORRECTIONS), mock.patch.dict(BATCH_FILTERS), mock.patch.dict(LOSSES):
        yield


@pytest.mark.parametrize("kind", [*nested(StabilityConfig), Rule], ids=lambda kind: kind.__name__)
def test_every_setting_is_described(kind):
    assert undescribed(kind) == set(), "an entry under Attributes: of the dataclass's docstring"


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_setting_of_a_method_is_described(registry):
    missing = {name for method in registry.values() for name in undescribed(method.settings, method.function)}
    assert missing == set(), "an entry under Attributes: of the dataclass's docstring"


@pytest.mark.parametrize("kind", [*nested(StabilityConfig), Rule], ids=lambda kind: kind.__name__)
def test_every_description_is_of_a_setting(kind):
    assert set(meanings(kind)) == {one.name for one in fields(kind)}


def test_a_setting_without_a_description_is_named():
    assert undescribed(make_dataclass("Plain", [("bound", float)])) == {"Plain.bound"}


def test_a_description_may_have_several_lines():
    @dataclass
    class Wide:
        """A sentence, with a colon: it describes nothing.

        Attributes:
            low: the smallest,
                and |more|: of docs/guard.md.
            high: the largest.
        """

        low: float
        high: float | None = None

    assert meanings(Wide) == {"low": "the smallest, and |more|: of docs/guard.md.", "high": "the largest."}
    assert list(rows("here", Wide)) == [
        ("here.low", "-", "the smallest, and |more|: of docs/guard.md."),
        ("here.high", "null", "the largest."),
    ]


@pytest.mark.usefixtures("registries")
def test_methods_of_ones_own_are_listed():
    @dataclass(frozen=True)
    class Bounds:
        """The bound.

        Attributes:
            low: the smallest |k|, see docs/extend.md.
        """

        low: float = 0.25

    register_correction("own", Bounds, reads=("k",))(lambda k, low: None)

    @register_loss("own")
    def own(batch, *, least: float, often: bool = True):
        """A loss without a dataclass.

        Args:
            least: the smallest probability.
        """

    assert "| `stability.own.low` | 0.25 | the smallest \\|k\\|, see [extend.md](extend.md). |" in sections()
    assert "| `actor_rollout_ref.actor.policy_loss.least` | - | `own`: the smallest probability. |" in sections()
    assert "| `actor_rollout_ref.actor.policy_loss.often` | true | `own`: |" in sections()


@pytest.mark.usefixtures("registries")
def test_modules_that_are_named_are_imported_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "a_filter_of_my_own.py").write_text(
        "from verl_ext.core.filters import register_batch_filter\n"
        "@register_batch_filter('at_least')\n"
        "def at_least(batch, *, length: int = 8):\n"
        "    '''Drop short responses.\n\n    Args:\n        length: the fewest tokens.\n    '''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["settings", "a_filter_of_my_own"])
    with mock.patch.dict(sys.modules):
        runpy.run_path(str(ROOT / "tools" / "settings_page.py"), run_name="__main__")
    assert "| `stability.filters.at_least.length` | 8 | the fewest tokens. |" in capsys.readouterr().out


def test_the_environment_variable_has_its_name_and_its_parts():
    (row,) = [line for line in sections().splitlines() if line.startswith(f"| `{VARIABLE}`")]
    assert all(f"`{part}:0`" in row for part in BY_HAND)
