"""verl's Megatron engine against transformers, in float32 and from one checkpoint, in each layout of two ranks."""

import os
import subprocess
from contextlib import ExitStack

import pytest
import torch

from recipes.cpu_smoke.make_assets import build_tokenizer
from recipes.cpu_tool.make_assets import build_model
from tests.stack.megatron_engine import ONE_RANK, TWO_RANKS, expect_of_transformers
from tests.stack.running import CPU

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`model/` with an even vocabulary, which tensor parallelism halves, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("megatron")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<spare>"])
    model = build_model(tokenizer).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)  # the usual 0.02 leaves every probability near that of any other token
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    expect_of_transformers(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(stack, folder):
    """ranks(task, world) -> what its processes printed, after each ended well."""

    def run(task, world):
        program = ["-m", "tests.stack.megatron_engine", task]
        environment = os.environ | CPU | stack.environment | {"HF_HUB_OFFLINE": "1"}
        with ExitStack() as stopped:
            started = [
                subprocess.Popen(
                    [stack.python, *program, str(rank), str(world), str(folder)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(world)
            ]
            for one in started:
                stopped.callback(one.kill)
            outputs = [one.communicate()[0] for one in started]
        assert [one.returncode for one in started] == [0] * world, "\n".join(outputs)[-4000:]
        return outputs

    return run


def checked(outputs):
    return [[line[9:] for line in output.splitlines() if line.startswith("checked: ")] for output in outputs]


def test_one_rank(ranks):
    assert checked(ranks("one", 1)) == [[*ONE_RANK]]


def test_two_ranks(ranks):
    assert checked(ranks("two", 2)) == [[*TWO_RANKS]] * 2


def test_a_resumed_engine_takes_the_next_step_bit_for_bit(ranks):
    ranks("save", 1)
    assert checked(ranks("resume", 1)) == [["resume"]]
