"""The table of causes: the names in it exist, and a command decides between the two causes of a pair."""

import itertools

import pytest

from verl_ext.base.causes import CAUSES, PROBE_READINGS, settling_sentence
from verl_ext.doctor import command  # noqa: F401 (registers all checks)
from verl_ext.doctor.checks import CAUSE_OF_CHECK, CHECKS
from verl_ext.probe.sweep import NAMES

PAIRS = list(itertools.permutations(CAUSES.values(), 2))


def test_the_checks_that_a_cause_names_are_the_doctors_and_each_of_one_cause():
    named = [check for cause in CAUSES.values() for check in cause.doctor]
    assert set(named) <= set(CHECKS)
    assert len(named) == len(CAUSE_OF_CHECK)


def test_each_reading_is_of_a_cause_and_its_options_are_the_probes():
    assert {name for cause in CAUSES.values() for name in cause.probe} == set(PROBE_READINGS)
    for reading in PROBE_READINGS.values():
        if reading.options:
            option, setting = reading.options.split()
            assert option == "--sweep" and setting in NAMES


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(cause.name for cause in pair))
def test_what_settles_a_pair_tells_the_two_apart(pair):
    """The probe is named if no reading shows both causes; its text describes what each would show."""
    first, second = pair
    said = settling_sentence(first, second)
    apart = bool(first.probe) and not set(first.probe) & set(second.probe)
    assert ("`verl-ext probe" in said) == apart
    for cause in pair:
        assert (f'"{cause.title}"' in said) == (apart and bool(cause.probe))
        assert not apart or all(PROBE_READINGS[name].shows in said for name in cause.probe)
    assert apart or not said or "`verl-ext doctor`" in said


def test_rounding_and_coarse_weights_are_told_apart_by_a_sweep():
    said = settling_sentence(CAUSES["two_precisions"], CAUSES["quantized"])
    assert said.startswith("`verl-ext probe --sweep fp32` with the overrides of the launch: if ")


def test_what_the_probe_switches_off_the_doctor_settles():
    """The probe samples at temperature 1 from all tokens, so it can show neither cause."""
    said = settling_sentence(CAUSES["truncated"], CAUSES["raw_log_probs"])
    assert said.endswith('shows it at "truncated sampling" and "vocabulary" and "log-prob mode"')


def test_of_one_cause_alone_the_probe_says_what_it_shows():
    assert settling_sentence(CAUSES["lost_sync"]).endswith(PROBE_READINGS["lost"].shows)
    assert settling_sentence(CAUSES["hacked_reward"]) == ""
