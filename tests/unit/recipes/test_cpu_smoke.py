import importlib.util
import string
from pathlib import Path

import pytest

from tests import ROOT

RECIPE = ROOT / "recipes" / "cpu_smoke"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"cpu_smoke_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_assets = load("make_assets")
compute_score = load("reward").compute_score


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    out = tmp_path_factory.mktemp("assets")
    make_assets.make_assets(out)
    return out


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


def test_model_is_the_small_moe_in_bfloat16(assets):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype="auto")
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (4, 16, 4)
    assert 3.0e6 < sum(weight.numel() for weight in model.parameters()) < 4.0e6
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert model(torch.tensor([[3, 20, 15]])).logits.isfinite().all()


def test_rows_are_in_the_format_of_verls_dataset(rows):
    for split, count in (("train", make_assets.TRAIN_ROWS), ("val", make_assets.VAL_ROWS)):
        assert len(rows[split]) == count
        assert [row["extra_info"]["index"] for row in rows[split]] == list(range(count))
        for row in rows[split]:
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            (message,) = row["prompt"]
            assert message["role"] == "user"
            a, b = message["content"].removesuffix("=").split("+")
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(a) + int(b))}
            assert len(row["reward_model"]["ground_truth"]) == 1
    assert len({row["prompt"][0]["content"] for row in rows["train"]}) == 21


def test_prompts_fit_the_recipe(rows, tokenizer):
    lengths = {
        len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False))
        for row in rows["train"]
    }
    assert max(lengths) <= 16


def test_assets_are_deterministic(assets, tmp_path):
    make_assets.make_assets(tmp_path)
    files = sorted(file.relative_to(assets) for file in assets.rglob("*") if file.is_file())
    assert Path("model/model.safetensors") in files
    assert files == sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    for file in files:
        assert (assets / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_another_seed_gives_other_weights_and_leaves_the_random_state(tokenizer):
    import torch

    before = torch.get_rng_state()
    one, other = (make_assets.build_model(tokenizer, seed).lm_head.weight for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_there_stays_unless_forced(tmp_path, monkeypatch):
    monkeypatch.setattr(make_assets, "write_model", lambda folder, seed: folder.mkdir())
    assert len(make_assets.make_assets(tmp_path)) == 3
    (tmp_path / "train.parquet").write_text("mine")
    (tmp_path / "val.parquet").unlink()
    assert make_assets.make_assets(tmp_path) == [tmp_path / "val.parquet"]
    assert (tmp_path / "train.parquet").read_text() == "mine"
    assert len(make_assets.make_assets(tmp_path, force=True)) == 3
    assert (tmp_path / "train.parquet").read_bytes().startswith(b"PAR1")


def test_an_interrupted_write_is_made_again(tmp_path, monkeypatch):
    def interrupted(folder, seed):
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(make_assets, "write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_assets.make_assets(tmp_path)
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(make_assets, "write_model", lambda folder, seed: folder.mkdir())
    make_assets.make_assets(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "train.parquet", "val.parquet"}
    assert not (tmp_path / "model" / "half").exists()


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("3", "3", 1.0),
        ("3 and more", "3", 1.0),
        ("4", "3", 0.3 + 0.4 * 8 / 9),
        ("9", "0", 0.3),
        ("", "3", 0.0),
        (" 3", "3", 0.0),
        ("x3", "3", 0.0),
        ("²", "2", 0.0),
        ("٣", "3", 0.0),
    ],
)
def test_reward(response, answer, score):
    given = compute_score(make_assets.DATA_SOURCE, response, answer, extra_info={}, reward_router_address=None)
    assert given == pytest.approx(score)


def test_reward_prefers_the_closer_digit():
    scores = [compute_score("", str(digit), "5") for digit in (0, 2, 4, 5)]
    assert scores == sorted(scores)
    assert len(set(scores)) == 4


def test_transfer_queue_is_given_as_many_threads_as_it_wants(compose, monkeypatch):
    """It warns at every call where TQ_NUM_THREADS, 8 by default, is more than there are physical cores."""
    from transfer_queue.utils import common

    said = []
    monkeypatch.setattr(common.psutil, "cpu_count", lambda logical=True: 1)
    monkeypatch.setattr(common.logger, "warning", said.append)
    threads = compose("recipe=cpu_smoke").ray_kwargs.ray_init.runtime_env.env_vars.TQ_NUM_THREADS
    with common.limit_pytorch_auto_parallel_threads(int(threads)):
        assert said == []
    with common.limit_pytorch_auto_parallel_threads(8):
        assert "should not exceed" in said[0]
