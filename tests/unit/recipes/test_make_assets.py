"""What the small recipes train on: their models, the tokenizer and the rows; and the quick start's reward."""

import string
from functools import partial
from pathlib import Path

import pytest

from recipes import make_assets as module
from recipes.cpu_smoke.reward import compute_score
from recipes.make_assets import (
    ASSETS,
    DIGITS,
    TRAIN_ROWS,
    VAL_ROWS,
    build_model,
    build_tokenizer,
    make_assets,
    prefix_sums,
    warm_up,
    worked_examples,
)

# After only a few steps of the warm-up, which is quick.
hardly_warm = partial(make_assets, warm=0.002)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """assets(recipe) -> the folder, which is written once."""
    folders = {recipe: tmp_path_factory.mktemp(recipe) for recipe in ASSETS}

    def written(recipe):
        hardly_warm(recipe, folders[recipe])
        return folders[recipe]

    return written


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("text", ["1+2=", "two  spaces , kept .", "a\nb\n", string.printable[:95], ""])
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("recipe", "kind", "dtype", "parameters", "sizes"),
    [
        ("cpu_smoke", "qwen3_moe", "float32", 2.6e5, {"num_experts": 8, "num_experts_per_tok": 2}),
        ("cpu_tool", "qwen3_moe", "bfloat16", 3.4e6, {"num_experts": 16, "num_experts_per_tok": 4}),
        ("dense_smoke", "qwen3", "float32", 1.12e5, {}),
    ],
)
def test_a_model_is_the_one_that_its_page_describes(assets, recipe, kind, dtype, parameters, sizes):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = assets(recipe) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    config = model.config
    assert config.model_type == kind and {name: getattr(config, name) for name in sizes} == sizes
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.05)
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert not getattr(config, "output_router_logits", False), "the load-balancing loss is the warm-up's alone"
    assert sorted(tokenizer.get_vocab().values()) == list(range(config.vocab_size)), "no spare row"
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    with torch.no_grad():
        assert model(torch.tensor([[3, 20, 15]])).logits.isfinite().all()
    random = build_model(recipe, tokenizer).lm_head.weight
    assert torch.equal(model.lm_head.weight, random) == (recipe == "cpu_tool"), "warmed up, or not"


def right_answer(recipe, prompt):
    if recipe == "cpu_tool":
        a, b = prompt.removesuffix("=").split("+")
        return str(int(a) + int(b))
    digits = [int(digit) for digit in prompt]
    assert len(digits) == DIGITS
    return "".join(str(sum(digits[: place + 1]) % 10) for place in range(len(digits)))


@pytest.mark.parametrize("recipe", ["cpu_smoke", "cpu_tool"])
def test_rows_are_in_the_format_of_verls_dataset_and_fit_the_recipe(assets, tokenizer, compose, recipe):
    from pyarrow.parquet import read_table

    config, prompts = compose(f"recipe={recipe}").data, {}
    for split, count in (("train", TRAIN_ROWS), ("val", VAL_ROWS)):
        rows = read_table(assets(recipe) / f"{split}.parquet").to_pylist()
        assert [row["extra_info"]["index"] for row in rows] == list(range(count))
        for row in rows:
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            (message,) = row["prompt"]
            answer = right_answer(recipe, message["content"])
            assert message["role"] == "user" and row["reward_model"] == {"style": "rule", "ground_truth": answer}
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            assert len(ids) <= config.max_prompt_length and len(answer) < config.max_response_length
        prompts[split] = {row["prompt"][0]["content"] for row in rows}
    assert len(prompts["train"]) == {"cpu_smoke": TRAIN_ROWS, "cpu_tool": 21}[recipe]
    assert recipe == "cpu_tool" or not prompts["train"] & prompts["val"]


def test_worked_examples_are_in_the_chat_template_and_the_first_may_copy_their_prompt(tokenizer):
    import torch

    examples = worked_examples(tokenizer, 8, torch.Generator().manual_seed(0), copied=5)
    for number, ids in enumerate(examples.tolist()):
        digits, answer = tokenizer.decode(ids).removeprefix("<user>").removesuffix("<end>").split("<assistant>")
        assert answer == (digits if number < 5 else prefix_sums(digits))
        row = [{"role": "user", "content": digits}, {"role": "assistant", "content": answer}]
        assert tokenizer.apply_chat_template(row, return_dict=False) == ids
        assert tokenizer.apply_chat_template(row, tokenize=False) == f"<user>{digits}<assistant>{answer}<end>"


class Guessing:
    """Replaces the model: it gives every right token of an answer the probability `right`."""

    def __init__(self, right):
        import torch

        self.right, self.weight = right, torch.nn.Parameter(torch.zeros(()))

    def parameters(self):
        return [self.weight]

    def __call__(self, ids, labels, output_router_logits):
        import math
        from types import SimpleNamespace

        import torch

        logits = torch.zeros(*ids.shape, 110)
        odds = math.log(self.right / (1 - self.right) * (logits.shape[-1] - 1))
        logits[:, :-1].scatter_(-1, ids[:, 1:, None], odds)
        return SimpleNamespace(loss=self.weight * 1.0, logits=logits)


def test_the_warm_ups_reward_is_what_sampled_answers_would_earn(tokenizer, capsys):
    right, places = 0.9, DIGITS + 1
    expected = sum(right**place for place in range(1, places + 1)) / places
    warm_up(Guessing(right), tokenizer, seed=0, until=0.999 * expected)
    assert f"mean reward {expected:.2f}" in capsys.readouterr().out


def test_assets_are_deterministic(assets, tmp_path):
    hardly_warm("cpu_smoke", tmp_path)
    first = assets("cpu_smoke")
    files = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
    assert Path("model/model.safetensors") in files
    assert files == sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    for file in files:
        assert (first / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_another_seed_gives_other_weights_and_leaves_the_random_state(tokenizer):
    import torch

    before = torch.get_rng_state()
    one, other = (build_model("cpu_smoke", tokenizer, seed).lm_head.weight for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_there_stays_unless_forced(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write_model", lambda folder, *_: folder.mkdir())
    assert len(make_assets("cpu_smoke", tmp_path)) == 3
    (tmp_path / "train.parquet").write_text("mine")
    (tmp_path / "val.parquet").unlink()
    assert make_assets("cpu_smoke", tmp_path) == [tmp_path / "val.parquet"]
    assert (tmp_path / "train.parquet").read_text() == "mine"
    assert len(make_assets("cpu_smoke", tmp_path, force=True)) == 3
    assert (tmp_path / "train.parquet").read_bytes().startswith(b"PAR1")


def test_an_interrupted_write_is_made_again(tmp_path, monkeypatch):
    def interrupted(folder, *_):
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_assets("cpu_smoke", tmp_path)
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(module, "write_model", lambda folder, *_: folder.mkdir())
    make_assets("cpu_smoke", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "train.parquet", "val.parquet"}
    assert not (tmp_path / "model" / "half").exists()


def test_the_reward_counts_the_places_before_the_first_wrong_one():
    expected = {"3489": 1.0, "34890": 4 / 5, "3489 ": 4 / 5, "348": 3 / 5, "3409": 2 / 5, "4489": 0, "": 0, " 3489": 0}
    for response, score in expected.items():
        given = compute_score("", response, "3489", extra_info={}, reward_router_address=None)
        assert given == pytest.approx(score), response


def test_transfer_queue_is_given_as_many_threads_as_it_wants(compose, monkeypatch):
    """TransferQueue warns at every call if TQ_NUM_THREADS, 8 by default, is more than the number of physical cores."""
    from transfer_queue.utils import common

    said = []
    monkeypatch.setattr(common.psutil, "cpu_count", lambda logical=True: 1)
    monkeypatch.setattr(common.logger, "warning", said.append)
    threads = compose("recipe=cpu_smoke").ray_kwargs.ray_init.runtime_env.env_vars.TQ_NUM_THREADS
    with common.limit_pytorch_auto_parallel_threads(int(threads)):
        assert said == []
    with common.limit_pytorch_auto_parallel_threads(8):
        assert "should not exceed" in said[0]
