from tests.unit.lab.made_variants import summary, variant
from verl_ext.lab.summary import Variant
from verl_ext.lab.table import Experiment

EXACT = variant("exact", [0.9, 0.91, 0.92])
NONE = variant("none", [0.3, 0.29, 0.34], collapsed=100, warned=60, warning=25)


def said(*variants) -> str:
    return "\n".join(Experiment(variants).findings)


def test_what_helps_what_harms_and_what_cannot_be_told_from_noise():
    tis, kpop, other = (
        variant("tis", [0.7, 0.69, 0.72]),
        variant("kpop", [0.1, 0.1, 0.12]),
        variant("r3", [0.6, 0.1, 0.3]),
    )
    text = said(EXACT, NONE, tis, kpop, other)
    assert "The gap costs 0.60 ±0.05 of the final reward: none against exact." in text
    better, worse, noise = (
        next(line for line in text.split("\n") if line.startswith(start)) for start in ("Better", "Worse", "Within")
    )
    assert "tis (+0.39" in better and "kpop (-0.20" in worse and "r3 (+0.02" in noise
    assert "kpop" not in better and "exact" not in better


def test_a_gap_that_costs_nothing_is_said_to_leave_nothing_to_win():
    text = said(EXACT, variant("none", [0.91, 0.9, 0.9]))
    assert "nothing to win back here" in text and "No run collapsed" in text


def test_collapses_have_their_seeds_and_steps_and_warnings_their_leads():
    alarmed = Variant("tis", (), {0: summary(0.7, warned=10), 1: summary(0.7), 2: summary(0.7)})
    text = said(EXACT, NONE, alarmed)
    assert "none in 3 of 3 (seed 0, 1, 2; step 100)" in text
    assert "came in time in 3 of 3 collapses, 25 to 25 steps ahead of the fall, and in 1 of the 6 runs that" in text


def test_a_late_warning_is_none():
    late = variant("none", [0.1, 0.1], collapsed=100, warned=120, warning=-15)
    assert "came in time in 0 of 2 collapses." in said(late)
    alarmed = Variant("none", (), {0: summary(0.7, warned=10), 1: summary(0.7)})
    assert "steps) came in 1 of the 2 runs that trained to their end without one." in said(alarmed)


def test_an_exact_arm_that_dies_by_itself_is_told():
    assert "exact collapses by itself" in said(variant("exact", [0.1, 0.1], collapsed=50), NONE)
    assert "exact collapses by itself" not in said(EXACT, NONE)


def test_one_seed_says_nothing_about_noise_and_missing_ones_are_told():
    assert "One seed shows nothing" in said(variant("exact", [0.9]), variant("none", [0.2]))
    assert "Fewer runs than the 3 of the others: tis (2)." in said(EXACT, NONE, variant("tis", [0.7, 0.8]))
    assert "tis, seed 2 failed: the experts are gone" in said(
        EXACT, NONE, variant("tis", [0.7, 0.8], {2: "the experts are gone"})
    )


def test_without_a_baseline_nothing_is_compared():
    text = said(EXACT, variant("tis", [0.7, 0.7]))
    assert "add none to --variants" in text and "Better" not in text
    assert "add none" not in said(EXACT, NONE)


ENDED = Variant(
    "guard",
    (),
    {
        0: summary(0.9),
        1: summary(None, last=0.6, stopped=38, warned=5),
        2: summary(None, last=0.4, stopped=150, collapsed=140, warned=5, warning=20),
    },
)


def test_a_run_that_the_guard_ended_early_neither_lived_nor_is_better_than_none():
    text = said(EXACT, NONE, ENDED)
    assert "The guard stopped runs early: guard in 2 of 3 (steps 38 to 150, at a reward of 0.50)." in text
    assert "guard in 1 of 2 (seed 2; step 140)" in text, "of one it is not known"
    better = [line for line in text.split("\n") if line.startswith(("Better", "Worse", "Within"))]
    assert not any("guard" in line for line in better)
    assert "in time in 4 of 4 collapses" in text and "runs that trained to their end" not in text
    none_left = Variant("skip", (), {0: summary(None, stopped=10)})
    assert "skip in 1 of 1 (step 10, before the first 20-step mean of the reward)" in said(EXACT, NONE, none_left)


def test_a_reward_then_is_of_the_runs_that_came_to_a_level():
    runs = {0: summary(None, last=0.4, stopped=40), 1: summary(None, stopped=10), 2: summary(None, stopped=9)}
    text = said(EXACT, Variant("guard", (), runs))
    assert (
        "(steps 9 to 40, at a reward of 0.40 in 1, in the others before the first 20-step mean of the reward)" in text
    )


def test_nothing_collapsed_is_said_of_runs_that_the_guard_did_not_end():
    ended = Variant("guard", (), {0: summary(None, stopped=10)})
    assert "No run collapsed among the runs that the guard did not stop (the 20" in said(EXACT, ended)
    assert "No run collapsed (the 20" in said(EXACT)
