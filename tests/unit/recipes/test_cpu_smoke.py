import string
from functools import partial
from pathlib import Path

import pytest

from recipes import make_assets as recipe_assets
from recipes.cpu_smoke.reward import compute_score
from recipes.make_assets import DIGITS, TRAIN_ROWS, VAL_ROWS, build_model, prefix_sums, warm_up, worked_examples

make_assets = partial(recipe_assets.make_assets, "cpu_smoke")
HARDLY = 0.002  # a mean reward that is reached within a few steps of the warm-up


def hardly_warm(out):
    """Writes the assets after only a few steps of the warm-up, which is quick."""
    make_assets(out, warm=HARDLY)
    return out


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return hardly_warm(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def tokenizer(assets):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets / "model")


@pytest.fixture(scope="module")
def rows(assets):
    from pyarrow.parquet import read_table

    return {split: read_table(assets / f"{split}.parquet").to_pylist() for split in ("train", "val")}


@pytest.mark.parametrize("text", ["1+2=", "two  spaces , kept .", "a\nb\n", string.printable[:95], ""])
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_token_id_of_the_model_belongs_to_the_tokenizer(tokenizer, assets):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(assets / "model")
    assert config.vocab_size == len(tokenizer) == len(tokenizer.get_vocab())
    assert sorted(tokenizer.get_vocab().values()) == list(range(config.vocab_size))
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_chat_template(tokenizer):
    prompt = [{"role": "user", "content": "1+2="}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", "1", "+", "2", "=", "<assistant>"]
    answered = [*prompt, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == "<user>1+2=<assistant>3<end>"


def test_model_is_the_small_moe_in_float32(assets):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype="auto")
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (2, 8, 2)
    assert not config.output_router_logits, "else the load-balancing loss would be computed in training too"
    assert 2.0e5 < sum(weight.numel() for weight in model.parameters()) < 3.0e5
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert model(torch.tensor([[3, 20, 15]])).logits.isfinite().all()


def test_rows_are_in_the_format_of_verls_dataset(rows):
    for split, count in (("train", TRAIN_ROWS), ("val", VAL_ROWS)):
        assert len(rows[split]) == count
        assert [row["extra_info"]["index"] for row in rows[split]] == list(range(count))
        for row in rows[split]:
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            (message,) = row["prompt"]
            assert message["role"] == "user"
            digits = [int(digit) for digit in message["content"]]
            assert len(digits) == DIGITS
            sums = "".join(str(sum(digits[: place + 1]) % 10) for place in range(len(digits)))
            assert row["reward_model"] == {"style": "rule", "ground_truth": sums}
    prompts = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert len(prompts["train"]) == TRAIN_ROWS
    assert not prompts["train"] & prompts["val"]


def test_worked_examples_are_prompts_with_their_right_answers_in_the_chat_template(tokenizer):
    import torch

    examples = worked_examples(tokenizer, 3, torch.Generator().manual_seed(0))
    for ids in examples.tolist():
        digits, answer = tokenizer.decode(ids).removeprefix("<user>").removesuffix("<end>").split("<assistant>")
        assert answer == prefix_sums(digits)
        row = [{"role": "user", "content": digits}, {"role": "assistant", "content": answer}]
        assert tokenizer.apply_chat_template(row, tokenize=True, return_dict=False) == ids


def test_of_worked_examples_the_first_may_copy_their_prompt(tokenizer):
    import torch

    examples = worked_examples(tokenizer, 8, torch.Generator().manual_seed(0), copied=5)
    for number, ids in enumerate(examples.tolist()):
        digits, answer = tokenizer.decode(ids).removeprefix("<user>").removesuffix("<end>").split("<assistant>")
        assert answer == (digits if number < 5 else prefix_sums(digits))


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

        wrong = 10
        logits = torch.zeros(*ids.shape, wrong + 100)
        odds = math.log(self.right / (1 - self.right) * (logits.shape[-1] - 1))
        logits[:, :-1].scatter_(-1, ids[:, 1:, None], odds)
        return SimpleNamespace(loss=self.weight * 1.0, logits=logits)


def test_the_warm_ups_reward_is_what_sampled_answers_would_earn(tokenizer, capsys):
    right, places = 0.9, DIGITS + 1
    expected = sum(right**place for place in range(1, places + 1)) / places
    warm_up(Guessing(right), tokenizer, seed=0, until=0.999 * expected)
    assert f"mean reward {expected:.2f}" in capsys.readouterr().out


def test_prompts_and_answers_fit_the_recipe(rows, tokenizer, compose):
    config = compose("recipe=cpu_smoke").data
    lengths = {
        len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False))
        for row in rows["train"]
    }
    assert max(lengths) <= config.max_prompt_length
    assert config.max_response_length > DIGITS + 1


def test_assets_are_deterministic(assets, tmp_path):
    hardly_warm(tmp_path)
    files = sorted(file.relative_to(assets) for file in assets.rglob("*") if file.is_file())
    assert Path("model/model.safetensors") in files
    assert files == sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    for file in files:
        assert (assets / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_another_seed_gives_other_weights_and_leaves_the_random_state(tokenizer):
    import torch

    before = torch.get_rng_state()
    one, other = (build_model("cpu_smoke", tokenizer, seed).lm_head.weight for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_there_stays_unless_forced(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_assets, "write_model", lambda folder, *_: folder.mkdir())
    assert len(make_assets(tmp_path)) == 3
    (tmp_path / "train.parquet").write_text("mine")
    (tmp_path / "val.parquet").unlink()
    assert make_assets(tmp_path) == [tmp_path / "val.parquet"]
    assert (tmp_path / "train.parquet").read_text() == "mine"
    assert len(make_assets(tmp_path, force=True)) == 3
    assert (tmp_path / "train.parquet").read_bytes().startswith(b"PAR1")


def test_an_interrupted_write_is_made_again(tmp_path, monkeypatch):
    def interrupted(folder, *_):
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe_assets, "write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_assets(tmp_path)
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(recipe_assets, "write_model", lambda folder, *_: folder.mkdir())
    make_assets(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "train.parquet", "val.parquet"}
    assert not (tmp_path / "model" / "half").exists()


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("3489", "3489", 1.0),
        ("34890", "3489", 4 / 5),
        ("3489 ", "3489", 4 / 5),
        ("348", "3489", 3 / 5),
        ("3409", "3489", 2 / 5),
        ("4489", "3489", 0.0),
        ("", "3489", 0.0),
        (" 3489", "3489", 0.0),
    ],
)
def test_reward(response, answer, score):
    given = compute_score("verl_ext/prefix_sums", response, answer, extra_info={}, reward_router_address=None)
    assert given == pytest.approx(score)


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
