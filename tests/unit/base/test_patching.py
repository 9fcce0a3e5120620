"""The two ways to change foreign code, and their checks, on code of the test's own."""

import asyncio
import inspect
import re
from types import ModuleType, SimpleNamespace

import pytest

from verl_ext.base.changes import CHANGES
from verl_ext.base.patching import PatchError, apply_all, expect, expect_lookup, moved, patch, wrap

CHANGE = "keep_metrics"


class Base:
    def step(self, rate=1):
        return rate

    @staticmethod
    def name():
        return "base"


class Engine(Base):
    pass


def doubled(verls, *args, **kwargs):
    return 2 * verls(*args, **kwargs)


@pytest.mark.parametrize(("owner", "name"), [(Base, "step"), (Engine, "step"), (Base, "name"), (Engine(), "step")])
def test_a_patch_is_undone_to_what_was_there(owner, name):
    before = dict(vars(owner))
    undo = patch(CHANGE, owner, name, "ours")
    assert getattr(owner, name) == "ours"
    undo()
    assert dict(vars(owner)) == before


def test_an_entry_of_a_registry_is_patched_and_undone():
    registry = {"sync": Base}
    undo = apply_all(
        lambda: patch(CHANGE, registry, "sync", Engine), lambda: patch(CHANGE, registry, "cpu", Base, new=True)
    )
    assert registry == {"sync": Engine, "cpu": Base}
    undo()
    assert registry == {"sync": Base}


@pytest.mark.parametrize(("owner", "name"), [(Engine, "no_step"), ({"sync": Base}, "no_sync"), (ModuleType("m"), "f")])
def test_what_is_not_there_is_patched_only_as_new(owner, name):
    with pytest.raises(PatchError, match=f"has no {name}"):
        patch(CHANGE, owner, name, "ours")
    patch(CHANGE, owner, name, "ours", new=True)()
    assert name not in (owner if isinstance(owner, dict) else vars(owner))


def test_a_method_of_one_instance_is_wrapped_and_undone():
    engine, other = Engine(), Engine()
    undo = wrap(CHANGE, engine, "step", doubled, "rate")
    assert (engine.step(3), engine.step(rate=4), other.step(3)) == (6, 8, 3)
    undo()
    assert vars(engine) == {} and engine.step(3) == 3


@pytest.mark.parametrize("owner", [Engine, SimpleNamespace(step=lambda self, rate: rate)])
def test_a_function_of_a_class_or_module_is_wrapped_with_its_signature(owner):
    undo = wrap(CHANGE, owner, "step", doubled, "self, rate")
    assert owner.step(Engine(), 3) == 6
    expect(CHANGE, owner, "step", "self, rate")
    undo()
    assert owner.step(Engine(), 3) == 3


def test_a_wrapped_coroutine_function_stays_one():
    async def step(self, rate):
        return rate

    async def doubled_later(verls, *args):
        return 2 * await verls(*args)

    owner = SimpleNamespace(step=step)
    undo = wrap(CHANGE, owner, "step", doubled_later, "self, rate")
    assert inspect.iscoroutinefunction(owner.step) and asyncio.run(owner.step(Engine(), 3)) == 6
    undo()
    assert owner.step is step


def test_wrapped_twice_by_the_same_is_wrapped_once_and_by_two_is_wrapped_twice():
    engine = Engine()
    undo = wrap(CHANGE, engine, "step", doubled)
    wrap(CHANGE, engine, "step", doubled)()  # undoes nothing
    assert engine.step(3) == 6
    undo_other = wrap(CHANGE, engine, "step", lambda verls, rate: verls(rate) + 1)
    assert engine.step(3) == 7
    undo_other()
    undo()
    assert engine.step(3) == 3


def test_what_raises_undoes_what_was_applied_before_it():
    engine = Engine()
    with pytest.raises(PatchError, match="no_step"):
        apply_all(lambda: wrap(CHANGE, engine, "step", doubled), lambda: wrap(CHANGE, engine, "no_step", doubled))
    assert vars(engine) == {}


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "said"),
    [
        (Engine, "step", "self, rate", None),
        (Engine(), "step", "rate", None),
        (Engine, "step", "self, ...", None),
        (Engine, "step", "self, rate, ...", None),
        ("json.decoder", "JSONDecoder.decode", "self, ...", None),
        (Engine, "step", "self", "Engine.step takes (self, rate), not (self)"),
        (Engine, "step", "self, r, ...", "Engine.step takes (self, rate), not (self, r, ...)"),
        (Engine, "__doc__", "self", "Engine.__doc__ takes (nothing), not (self)"),
        (Engine, "no.step", None, "Engine.no.step is missing"),
        ("json.no_such", "decode", None, "json.no_such.decode is missing"),
    ],
)
def test_what_is_expected_is_there_with_its_parameters(owner, name, parameters, said):
    if said is None:
        assert expect(CHANGE, owner, name, parameters)
        return
    with pytest.raises(PatchError, match=re.escape(said)):
        expect(CHANGE, owner, name, parameters)


def test_a_function_that_binds_a_name_early_is_refused():
    expect_lookup(CHANGE, lambda: Engine.step, "Engine", "step")
    with pytest.raises(PatchError, match="no longer looks up Engine"):
        expect_lookup(CHANGE, lambda engine=Engine: engine.step, "Engine")


def test_the_error_says_for_which_versions_and_what_to_do_without():
    assert str(moved("keep_metrics", "it moved")) == (
        "patch keep_metrics was written for verl 0.9.1, but verl 0.9.1 is installed: it moved"
    )
    assert str(moved("agent_loop", "it moved")).endswith(f"it moved; {CHANGES['agent_loop'].without}")
