"""The search: what it tries, which of it goes on, and what it says of the winner."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.lab import standin
from tests.unit.lab.test_command import the_standin  # noqa: F401
from verl_ext.cli import main
from verl_ext.errors import ConfigError
from verl_ext.lab.search import FEWEST, Standing, halving
from verl_ext.lab.search_command import SPACE, _table
from verl_ext.lab.space import candidates

SHORT = ["--steps", "25", "--jobs", "2", "--no-page"]


def test_the_table_shows_settings_with_brackets(capsys):
    from rich.console import Console

    settings = "stability.correction=[icepop,geo_mask]"
    Console(width=200).print(_table([Standing("one", (0.5,))], {"one": settings}))
    assert settings in capsys.readouterr().out


def test_the_product_of_what_is_swept_named_by_its_values():
    points, common = candidates(
        ["lab.stale.lag=8", "stability.correction=tis,[icepop,geo_mask]", "stability=none,r3"], ()
    )
    assert common == ("lab.stale.lag=8",)
    assert points == {
        name: f"{given} stability.batch_skip.threshold=null"
        for name, given in {
            "none-tis": "stability=none stability.correction=tis",
            "r3-tis": "stability=r3 stability.correction=tis",
            "none-icepop+geo_mask": "stability=none stability.correction=[icepop,geo_mask]",
            "r3-icepop+geo_mask": "stability=r3 stability.correction=[icepop,geo_mask]",
        }.items()
    }


def test_names_tell_candidates_apart():
    points, _ = candidates(["stability.icepop.low=0.5,0.8", "stability.tis.high=range(2,5)"], ())
    assert set(points) == {f"low{low}-high{high}" for low in (0.5, 0.8) for high in (2, 3, 4)}
    points, _ = candidates(["stability.correction='a,b','a/b'"], ())
    assert len(points) == 2


def test_the_batch_skip_that_is_asked_for_stays():
    points, _ = candidates(["stability.batch_skip.threshold=0.1,0.2"], ())
    assert list(points.values()) == ["stability.batch_skip.threshold=0.1", "stability.batch_skip.threshold=0.2"]


def test_without_a_sweep_the_space_is_searched():
    points, common = candidates(["lab.stale.lag=8"], SPACE)
    assert common == ("lab.stale.lag=8",) and len(points) == 12
    assert {"none-null", "r3-tis", "none-icepop+geo_mask"} < set(points)


@pytest.mark.parametrize("overrides", [["a=[1"], ["a=1,range(2,4)"], ["stability.tis.high=range(1,1000)"]])
def test_a_space_that_cannot_be_searched_is_one_line(overrides):
    with pytest.raises(ConfigError) as error:
        candidates(overrides, ())
    assert "\n" not in str(error.value)


rewards = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    min_size=1,
    max_size=20,
)


@given(rewards, st.integers(1, 4))
def test_the_better_half_goes_on(table, seeds):
    asked = []

    def run(names, seed):
        asked.append(list(names))
        return {name: table[name][seed] for name in names}

    standings = halving(list(table), range(seeds), run)
    assert sorted(each.name for each in standings) == sorted(table)
    assert len(asked) == seeds and len(asked[0]) == len(table)
    for before, after in pairwise(asked):
        assert len(after) == min(len(before), max(FEWEST, (len(before) + 1) // 2)) and set(after) <= set(before)
    for each in standings:
        assert each.rewards == tuple(table[each.name][: len(each.rewards)])
    full = [each for each in standings if len(each.rewards) == seeds]
    assert standings[: len(full)] == full and all(full[0].mean >= each.mean for each in full)


def test_a_candidate_that_fails_is_out():
    standings = halving("ab", (0, 1), lambda names, seed: {name: 0.5 for name in names if name != "a"})
    assert [each.name for each in standings] == ["b"]


def test_a_search_ends_where_nobody_is_left():
    asked = []

    def nobody_at_1(names, seed):
        asked.append(seed)
        return dict.fromkeys(names, 0.5) if seed == 0 else {}

    assert [each.rewards for each in halving("abcdef", (0, 1, 2), nobody_at_1)] == [(0.5,)] * 3, "who was out before"
    assert asked == [0, 1]
    assert halving("ab", (0, 1), lambda names, seed: {}) == []


def test_a_search_ends_with_its_winner_on_other_seeds(tmp_path, capsys):
    words = [
        "lab",
        "search",
        "stale",
        "stability.correction=mis,tis,icepop",
        "--seeds",
        "2",
        "--confirm",
        "5-6",
        *SHORT,
    ]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "stability.correction=tis" in captured.out and "winner" in captured.out
    assert "the winner on seeds that it was not picked on: stability.correction=tis" in captured.err
    out = tmp_path / ".lab" / "search" / "stale"
    found = json.loads((out / "confirmed" / "results.json").read_text())
    assert found["winner"].startswith("stability.correction=tis") and found["seeds"] == [5, 6]
    assert [each["name"] for each in found["variants"]] == ["exact", "winner", "none"]
    assert [len(each["rewards"]) for each in found["search"]] == [2, 2, 1]
    capsys.readouterr()
    assert main([*words, "--json"]) == 0  # nothing runs again
    captured = capsys.readouterr()
    assert json.loads(captured.out)["winner"] == found["winner"] and "6 of 6 runs are done already" in captured.err


def test_seeds_to_confirm_on_are_others(capsys):
    assert main(["lab", "search", "stale", "--confirm", "2-4"]) == 2
    assert "--confirm: seed 2 is one of --seeds" in capsys.readouterr().err


def test_a_candidate_that_the_guard_ended_is_out_and_named(capsys):
    words = ["lab", "search", "stale", "--seeds", "1", "--confirm", "5-6", *SHORT, "--json"]
    assert main([*words, "stability.tis.high=3,7"]) == 0
    captured = capsys.readouterr()
    assert "out: high7: the guard ended it at step 22 of seed 0" in captured.err
    assert [each["overrides"] for each in json.loads(captured.out)["search"]] == [
        "stability.tis.high=3 stability.batch_skip.threshold=null"
    ]
    assert main([*words, "stability.tis.high=7,8", "--seeds", "2", "--out", "other"]) == 2
    said = "the guard ended every candidate early, which leaves nothing to compare; the first, high7:"
    assert said in capsys.readouterr().err


def test_every_candidate_fails(monkeypatch, capsys):
    monkeypatch.setattr(standin, "run_arm", failing)
    assert main(["lab", "search", "stale", "stability.tis.high=2,3", "--seeds", "2", *SHORT]) == 2
    assert "every candidate failed; the first: lab.warm_up.reward=0.9 was not reached" in capsys.readouterr().err


def failing(*_):
    raise ConfigError("lab.warm_up.reward=0.9 was not reached")
