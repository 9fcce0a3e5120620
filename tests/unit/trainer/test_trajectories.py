import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue import KVBatchMeta

from recipes.make_assets import build_tokenizer
from tests.support.store import Rows
from verl_ext.base.errors import ConfigError
from verl_ext.base.names import older_part
from verl_ext.core.tokens import Tokens
from verl_ext.features.settings import TrajectoryDump
from verl_ext.features.stability import stability_config
from verl_ext.trainer import trajectories
from verl_ext.trainer.trajectories import (
    Dump,
    ShownTrajectory,
    TrajectoryLog,
    choose_shown,
    decode_pieces,
    forget_trajectories,
    kept_stretches,
    write_step,
)

NAN = float("nan")


def tokens_of(*gaps, mask=None, **more):
    """Trajectories whose tokens have these |log k|."""
    flat = torch.tensor([gap for row in gaps for gap in row])
    offsets = torch.tensor([0, *(len(row) for row in gaps)]).cumsum(0)
    mask = torch.ones(len(flat), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return Tokens(l_infer=torch.full_like(flat, -1.0), l_old=flat - 1.0, mask=mask, offsets=offsets, **more)


def choose(tokens, count, step, never=()):
    return choose_shown(*tokens.log_k_sums(), count, step, never)


def test_the_largest_gap_is_chosen_and_others_at_random():
    tokens = tokens_of([0.1, 0.1], [0.0, 3.0], [0.2], [0.5])
    assert choose(tokens, 1, step=1) == {1: "largest gap"}
    chosen = choose(tokens, 3, step=1)
    assert [row for row, why in chosen.items() if why == "largest gap"] == [1, 3]
    assert chosen == choose(tokens, 3, step=1)
    by_chance = {row for step in range(40) for row, why in choose(tokens, 3, step).items() if why == "at random"}
    assert by_chance == {0, 2}


def test_trajectories_without_tokens_are_passed_over():
    tokens = tokens_of([], [0.1], [0.2, 0.2], [], [3.0], [])
    assert list(choose(tokens, 6, step=1)) == [4, 2, 1]


def test_a_gap_that_is_not_a_number_counts_as_the_largest_and_masked_tokens_do_not():
    tokens = tokens_of([9.0, 0.1], [NAN], [0.2], [5.0], mask=[0, 1, 1, 1, 0])
    assert choose(tokens, 10, step=1) == {1: "largest gap", 2: "largest gap", 0: "largest gap"}
    assert list(choose(tokens, 1, step=1, never={1})) == [2]


@given(st.integers(1, 50), st.integers(2, 60))
def test_kept_stretches_are_both_ends(length, most):
    stretches = kept_stretches(length, most)
    places = [place for start, count in stretches for place in range(start, start + count)]
    assert len(places) == len(set(places)) == min(length, most)
    assert places[0] == 0 and places[-1] == length - 1


def byte_level(texts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_character_of_several_tokens_stands_at_its_last_one():
    tokenizer = byte_level([])
    text = "a é 日本 😀"
    ids = tokenizer.encode(text)
    pieces = decode_pieces(ids, tokenizer)
    assert len(pieces) == len(ids) == len(text.encode()) and "".join(pieces) == text
    assert pieces[2:4] == ["", "é"]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_tokens_that_are_no_text_are_decoded_without_an_error(ids):
    assert len(decode_pieces(ids, byte_level([]))) == len(ids)


def test_garbage_costs_no_more_than_text():
    """Bytes that never begin a character: the library's stream waits for one, and reads all of them each time."""
    tokenizer = byte_level([])
    continuation = tokenizer.encode("é")[1]
    pieces = decode_pieces([continuation] * 20, tokenizer)
    assert [place for place, piece in enumerate(pieces) if piece] == [7, 15]
    text = tokenizer.encode("ok")
    assert "".join(decode_pieces([continuation] * 9 + text, tokenizer)).endswith("ok")


@pytest.mark.parametrize("token", [-1, 10_000, 2**33])
def test_an_id_that_is_no_token_has_no_text(token):
    tokenizer = byte_level([])
    a, b = tokenizer.encode("ab")
    assert decode_pieces([a, token, b], tokenizer) == ["a", "", "b"]


def test_a_tokenizer_without_a_backend_decodes_token_by_token():
    class Slow:
        def decode(self, ids, skip_special_tokens):
            return f"<{ids[0]}>"

    assert decode_pieces([3, 4], Slow()) == ["<3>", "<4>"]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written(settings, tokens, weight, mask=..., tags=..., **about) -> the lines of one step."""

    def run(settings, tokens, weight=None, mask=None, tags=None, **about):
        rows = len(tokens.offsets) - 1
        parts = [slice(int(tokens.offsets[row]), int(tokens.offsets[row + 1])) for row in range(rows)]
        mask = tokens.mask.long() if mask is None else torch.tensor(mask)
        ids = torch.arange(len(tokens.mask)) % 20 + 10
        stored = {
            f"t_{row}_0": {
                "prompts": torch.tensor([11, 12]),
                "responses": ids[part],
                "response_mask": mask[part],
                "advantages": torch.full((part.stop - part.start,), 0.5) * tokens.mask[part],
                "rm_scores": torch.tensor([0.0] * (part.stop - part.start - 1) + [2.0]),
            }
            for row, part in enumerate(parts)
        }

        Rows(stored).install(monkeypatch)
        batch = KVBatchMeta(keys=list(stored), tags=tags or [{}] * rows, partition_id="train", fields=[])
        log = TrajectoryLog(tmp_path / "run.trajectories.jsonl", settings, resumed=0)
        about = {"step": 3, "skipped": ""} | about
        added = {row for row, tag in enumerate(batch.tags) if tag.get("is_padding")}
        chosen = []
        for row, why in choose(tokens, settings.per_step, about["step"], added).items():
            part = parts[row]
            of_row = {name: values[part] for name, values in tokens.per_token().items()}
            one = Tokens(**of_row, offsets=torch.tensor([0, part.stop - part.start]))
            chosen.append(ShownTrajectory(row, why, one, None if weight is None else weight[part]))
        write_step(log, settings, batch, chosen, build_tokenizer(), **about)
        log.close()
        return [json.loads(line) for line in (tmp_path / "run.trajectories.jsonl").read_text().splitlines()]

    return run


def test_a_line_holds_what_the_view_shows(written):
    tokens = tokens_of(
        [0.0],
        [0.25, NAN, 1.0],
        mask=[1, 1, 1, 0],
        agreement=torch.tensor([1.0, 0.5, 1.0, 1.0]),
        entropy=torch.tensor([0.1, 0.2, 0.3, 0.4]),
    )
    weight = torch.tensor([1.0, 1.25, 0.0, 0.0])
    (line,) = written(TrajectoryDump(per_step=1), tokens, weight, mask=[1, 1, 0, 0], skipped="too far")
    tokenizer = build_tokenizer()
    assert line["step"] == 3 and line["key"] == "t_1_0" and line["why"] == "largest gap"
    assert line["skipped"] == "too far"
    assert line["prompt"] == tokenizer.decode([11, 12])
    assert (line["reward"], line["advantage"], line["tokens"]) == (2.0, 0.5, 3)
    assert (line["start"], line["length"]) == ([0], [3])
    assert line["id"] == [11, 12, 13] and "".join(line["text"]) == tokenizer.decode([11, 12, 13])
    assert line["generated"] == [1, 1, 0] and line["kept"] == [1, 0, 0]
    assert line["l_infer"] == [-1.0, -1.0, None]
    assert line["l_old"] == [-0.75, None, None]
    assert line["weight"] == [1.25, 0.0, None]
    assert line["agreement"] == [0.5, 1.0, None]
    assert line["entropy"] == pytest.approx([0.2, 0.3, None])


def test_a_trajectory_that_was_not_compared_has_no_agreement(written):
    agreement = torch.tensor([NAN, NAN, 1.0, 0.5])
    lines = written(TrajectoryDump(per_step=2), tokens_of([9.0, 9.0], [0.1, 0.1], agreement=agreement))
    assert [line["agreement"] for line in lines] == [[None, None], [1.0, 0.5]]


def test_a_long_response_keeps_its_ends(written):
    tokens = tokens_of([float(i) for i in range(10)])
    (line,) = written(TrajectoryDump(per_step=2, max_tokens=5), tokens)
    assert (line["start"], line["length"], line["tokens"]) == ([0, 8], [3, 2], 10)
    assert [value + 1 for value in line["l_old"]] == [0, 1, 2, 8, 9]
    assert len(line["text"]) == len(line["id"]) == 5
    assert "weight" not in line and "agreement" not in line and "entropy" not in line


def test_rows_that_fill_a_batch_are_not_written(written):
    lines = written(TrajectoryDump(per_step=5), tokens_of([9.0], [0.1]), tags=[{"is_padding": True}, {}])
    assert [line["key"] for line in lines] == ["t_1_0"]


def test_the_files_stay_within_their_size_and_hold_the_newest(tmp_path):
    path = tmp_path / "run.trajectories.jsonl"
    settings = TrajectoryDump(per_step=1, max_megabytes=0.001)  # two files of 500 bytes
    log = TrajectoryLog(path, settings, resumed=0)
    for step in range(100):
        log.write({"step": step, "text": "x" * 30})
    log.close()
    assert path.stat().st_size + older_part(path).stat().st_size <= 1000
    lines = [json.loads(line) for file in (older_part(path), path) for line in file.read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == list(range(steps[0], 100)) and len(steps) >= 500 // 52


def steps_of(*paths):
    return [[json.loads(line)["step"] for line in path.read_text().splitlines()] for path in paths]


def test_the_files_stay_together_if_the_process_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = TrajectoryLog(Path("run.trajectories.jsonl"), TrajectoryDump(max_megabytes=1e-4), resumed=0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for step in range(1, 9):
        log.write({"step": step, "text": "a" * 20})
    log.close()
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == {
        "run.trajectories.jsonl",
        "run.trajectories.1.jsonl",
    }


def test_a_resumed_run_goes_on_after_its_checkpoint_and_a_new_one_starts_empty(tmp_path):
    path = tmp_path / "run.trajectories.jsonl"
    settings = TrajectoryDump(per_step=1, max_megabytes=0.00033)  # two files of 165 bytes, three lines each
    for resumed, steps in ((0, (1, 2, 3, 4, 5, 5)), (4, (5, 6))):
        log = TrajectoryLog(path, settings, resumed=resumed)
        for step in steps:
            log.write({"step": step, "text": "x" * 30})
        log.close()
    assert steps_of(older_part(path), path) == [[1, 2, 3], [4, 5, 6]]
    TrajectoryLog(path, settings, resumed=2).close()
    assert steps_of(older_part(path), path) == [[1, 2], []]
    TrajectoryLog(path, settings, resumed=0).close()
    assert path.read_text() == "" and not older_part(path).exists()


def test_lines_that_a_full_disk_keeps_waiting_stay_in_their_file(tmp_path, monkeypatch):
    path = tmp_path / "run.trajectories.jsonl"
    log = TrajectoryLog(path, TrajectoryDump(per_step=1, max_megabytes=0.00033), resumed=0)
    with monkeypatch.context() as full:
        full.setattr("os.pwrite", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for step in range(1, 6):
            log.write({"step": step, "text": "x" * 30})
    log.write({"step": 6, "text": "x" * 30})
    log.close()
    assert steps_of(path) == [[1, 2, 3, 4, 5, 6]] and not older_part(path).exists()


def test_an_earlier_runs_trajectories_are_forgotten(tmp_path):
    path = tmp_path / "run.trajectories.jsonl"
    for file in (path, older_part(path)):
        file.write_text("{}")
    forget_trajectories(path)
    forget_trajectories(path)
    assert not list(tmp_path.iterdir())


def test_a_line_larger_than_the_allowance_is_still_written(tmp_path):
    path = tmp_path / "run.trajectories.jsonl"
    log = TrajectoryLog(path, TrajectoryDump(per_step=1, max_megabytes=0.0001), resumed=0)
    log.write({"step": 1, "text": "x" * 500})
    log.close()
    assert json.loads(path.read_text())["step"] == 1


@pytest.mark.parametrize(
    "wrong", [{"per_step": -1}, {"every": 0}, {"max_tokens": 1}, {"max_megabytes": 0.0}, {"max_megabytes": math.inf}]
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigError, match=rf"stability\.trajectories\.{next(iter(wrong))}="):
        stability_config({"trajectories": wrong})


def test_of_a_step_with_several_updates_the_first_is_dumped(monkeypatch):
    written = []
    monkeypatch.setattr(trajectories, "choose_trajectories", lambda batch, count, step: [batch])
    monkeypatch.setattr(trajectories, "write_step", lambda *given, **about: written.append((about["step"], given[3])))
    writing = Dump(object(), TrajectoryDump(1, every=2))
    for place, step in enumerate((7, 8, 8, 9, 10)):
        writing.look_at(place, step)
        writing.write(None, None, skipped="")
    assert written == [(8, [1]), (10, [4])]
