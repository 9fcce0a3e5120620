"""The recipes for Megatron on GPUs, at a tiny size and with their own overrides, in verl's engine on two gloo ranks."""

from dataclasses import fields
from typing import Optional, get_type_hints

import pytest
from omegaconf import OmegaConf

from tests.stack.megatron_engine import run_ranks
from tests.stack.megatron_recipes import MODELS, RECIPES, REFUSED, cases, make_model, refused

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def launch(compose):
    """launch(overrides...) -> the config that the actor's workers get."""
    from verl_ext.features.stability import stability_config
    from verl_ext.features.table import apply_engine_settings, read_features

    def launch(*overrides):
        config = compose(*overrides)
        apply_engine_settings(read_features(config, stability_config(config.stability)))
        return OmegaConf.create(OmegaConf.to_container(config, resolve=True)).actor_rollout_ref

    return launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory, launch):
    folder = tmp_path_factory.mktemp("recipes")
    for model in MODELS:
        make_model(folder / model, model)
    for name, overrides in (cases(folder) | refused(folder)).items():
        OmegaConf.save(launch(*overrides), folder / f"{name}.yaml")
    return folder


@pytest.fixture(scope="module")
def checked(stack, folder):
    """The checks that ran; both ranks must report the same."""
    first, second = run_ranks(stack, "tests.stack.megatron_recipes", "run", 2, folder)
    assert first == second
    return first


def test_each_recipe_computes_what_transformers_does_and_trains(checked, folder):
    assert checked[: -len(REFUSED)] == [*cases(folder)]


def test_what_verl_and_megatron_core_do_not_know_is_refused(checked):
    lines = checked[-len(REFUSED) :]
    for line, (override, words) in zip(lines, REFUSED.items(), strict=True):
        assert words in line, f"{override}: {line}"


@pytest.mark.parametrize("name", RECIPES)
def test_every_override_is_a_setting_of_megatron_core_and_of_its_type(launch, name):
    """Includes the overrides that CPU cores cannot use."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from pydantic import TypeAdapter

    actor = launch(f"recipe={name}", "stability=icepop").actor
    layers = dict(actor.megatron.override_transformer_config)
    layers["attention_backend"] = AttnBackend[layers["attention_backend"]]  # as verl does
    for owner, given in ((MLATransformerConfig, layers), (OptimizerConfig, actor.optim.override_optimizer_config)):
        types = get_type_hints(owner)
        assert {*given} <= {field.name for field in fields(owner)}
        for key, value in OmegaConf.to_container(OmegaConf.create({**given})).items():
            TypeAdapter(Optional[types[key]]).validate_python(value, strict=True)  # noqa: UP045
