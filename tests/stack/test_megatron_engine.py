"""verl's Megatron engine against transformers, in float32 and from one checkpoint, in each layout of two ranks."""

import pytest

from tests.stack.megatron_engine import DENSE, ONE_RANK, TWO_RANKS, VALUES, expect_of_transformers, run_ranks
from tests.stack.small_models import FAR_APART, save_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mixture of experts and what transformers computes with it; in `dense/` a model without experts."""
    folder = tmp_path_factory.mktemp("megatron")
    for part, recipe in ((folder, "cpu_tool"), (folder / "dense", "dense_smoke")):
        save_model(part / "model", recipe, even=True, scale=FAR_APART)
        expect_of_transformers(part)
    return folder


@pytest.fixture(scope="module")
def ranks(stack, folder):
    """ranks(task, world) -> what each of its processes checked, after all ended well."""
    return lambda task, world: run_ranks(stack, "tests.stack.megatron_engine", task, world, folder)


def test_one_rank(ranks):
    assert ranks("one", 1) == [[*ONE_RANK]]


@pytest.mark.shows("verl-ext probe", "a sequence over two ranks", engine="megatron")
def test_two_ranks(ranks):
    assert ranks("two", 2) == [[*TWO_RANKS]] * 2


def test_a_dense_model_on_two_ranks(ranks):
    assert ranks("dense", 2) == [[*DENSE]] * 2


def test_a_critics_values_on_two_ranks(ranks):
    assert ranks("value", 2) == [[*VALUES]] * 2


def test_a_resumed_engine_takes_the_next_step_bit_for_bit(ranks):
    ranks("save", 1)
    assert ranks("resume", 1) == [["resume"]]
