"""Any bytes instead of a config, and any value instead of a node of settings, lead to a config or to one line."""

import copy
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.support.examples import at_most
from verl_ext.base.errors import ConfigError
from verl_ext.doctor import diagnose  # noqa: F401 (registers the checks)
from verl_ext.doctor.checks import CHECKS, Context
from verl_ext.doctor.hooks import fit_presets
from verl_ext.features.stability import default_node
from verl_ext.launch import command_line
from verl_ext.launch.compose import prepare

words = st.sampled_from(["defaults", "stability", "_self_", "ppo_trainer", "trainer", "recipe"]) | st.text(max_size=5)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | words
documents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)
primaries = st.dictionaries(words, documents, max_size=3) | st.fixed_dictionaries({"defaults": documents})
configs = st.binary(max_size=30) | primaries.map(lambda config: yaml.safe_dump(config, allow_unicode=True).encode())
BROKEN = {
    "no UTF-8": b"a: \xff",
    "no YAML": b"a: [",
    "no date": b"a: 2020-13-45",
    "no list": b"defaults: 5",
    "deep": b"[" * 100_000,
    "a NUL": b"a: \0",
    "a key that is none": b"[1]: {[2]: 3}",
    "an alias of itself": b"a: &a [*a]",
}


def said_of(content: bytes) -> tuple[str, str]:
    """Returns the error of a launch with this primary config, and that of doctor and plan; "" where they accept it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.yaml").write_bytes(content)
        arguments = [f"--config-path={folder}", "--config-name=mine"]
        try:
            prepare(arguments)
        except ConfigError as error:
            return str(error), str(*command_line.compose(arguments).problems)
        return "", str(*command_line.compose(arguments).problems)


@at_most(10)  # Hydra takes most of a second to compose one
@given(configs)
def test_a_primary_config_of_any_content(content):
    assert not any("\n" in said for said in said_of(content))


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_primary_config_that_is_broken(content):
    launch, look = said_of(content)
    assert "\n" not in launch + look and (look or b"*a" in content)


def nodes_of_settings():
    """Yields the nodes of `stability`, from its dataclasses, and the places where users write names or rules."""
    for name, value in default_node().items():
        if value is None or isinstance(value, dict | list):
            yield f"stability.{name}"
        if isinstance(value, dict):
            yield from (f"stability.{name}.{inner}" for inner, below in value.items() if isinstance(below, dict))
    yield "stability.guard.rules"
    yield "stability.guard.rules.mine"


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
@pytest.mark.parametrize("setting", nodes_of_settings())
def test_a_node_of_another_type_is_an_error_that_names_it_and_ends_no_check(setting, mode, compose):
    for value in (5, "text", [1]):
        config = copy.deepcopy(compose("recipe=cpu_smoke", f"trainer.v1.trainer_mode={mode}"))
        OmegaConf.update(config, setting, value, merge=False, force_add=True)
        context = Context({}, config=config, trust=True)
        fit_presets(context)
        errors = [finding for check in CHECKS.values() for finding in check(context) if finding.level == "error"]
        assert any(setting in error.found for error in errors)
        assert not any("\n" in error.found or "the check itself" in error.found for error in errors)
