"""verl's Megatron engine against transformers, in float32 and from one checkpoint, in each layout of two ranks."""

import pytest
import torch

from recipes.make_assets import build_model, build_tokenizer
from tests.stack.megatron_engine import DENSE, ONE_RANK, TWO_RANKS, VALUES, expect_of_transformers, run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def write_model(folder, recipe):
    """`model/` with an even vocabulary, which tensor parallelism halves, and what transformers makes of it."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<spare>"])
    model = build_model(recipe, tokenizer).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)  # the usual 0.02 leaves every probability near that of any other token
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    expect_of_transformers(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mixture of experts; in `dense/` a model without."""
    folder = tmp_path_factory.mktemp("megatron")
    write_model(folder, "cpu_tool")
    write_model(folder / "dense", "dense_smoke")
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
