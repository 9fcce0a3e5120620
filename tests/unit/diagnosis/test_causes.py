"""The files of causes: what is refused, what the shipped ones hold, and which command decides between two of them."""

import shlex

import pytest

from verl_ext.diagnosis.causes import (
    CAUSES,
    LEAST,
    WORDS,
    Cause,
    CauseError,
    check_apart,
    known_causes,
    read_cause,
    settling_of,
)
from verl_ext.diagnosis.findings.probe import FP32, PROBE_SHOWS
from verl_ext.diagnosis.findings.registry import RULES
from verl_ext.diagnosis.names import setting_for
from verl_ext.doctor import diagnose  # noqa: F401 (registers all checks)
from verl_ext.doctor.checks import CAUSE_OF_CHECK, CHECKS
from verl_ext.features.stability import stability_config
from verl_ext.probe.sweep import NAMES

HEAD = """\
title = "The reward is old"
about = "learning"
check = "the date of the grader"
"""
SHOWS = """
[shows]
reward_flat = { flat = "always", rose = "never" }
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.toml"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


# ------------------------------------------------------------------------------------------------- one file of a cause


def test_a_file_is_read_under_its_keys(write):
    more = """\
try = "stability=guard"
try_moe = "stability=moe"
why = "refuses bad updates"
doctor = ["weight sync"]
harmless_if_close = true
a_correction_helps = true
only_with = ["reward_flat.flat"]
alike = ["small_groups"]
"""
    assert read_cause(write(HEAD + more + SHOWS, "old_reward.toml")) == Cause(
        name="old_reward",
        title="The reward is old",
        about="learning",
        check="the date of the grader",
        override="stability=guard",
        moe_override="stability=moe",
        why="refuses bad updates",
        doctor=("weight sync",),
        harmless_if_close=True,
        a_correction_helps=True,
        only_with=("reward_flat.flat",),
        alike=("small_groups",),
        shows={"reward_flat": {"flat": "always", "rose": "never"}},
    )


def without(key):
    return "".join(line for line in HEAD.splitlines(keepends=True) if not line.startswith(key)) + SHOWS


BAD = {  # what is wrong -> (the file, what the error names)
    "not TOML": (HEAD + "try =\n" + SHOWS, "line 4"),
    "not UTF-8": (b'title = "\xff"\n', "utf-8"),
    "nothing in it": ("", "title"),
    "no title": (without("title"), "title"),
    "an empty title": (without("title").replace("about", 'title = ""\nabout'), "title"),
    "a check of two lines": (without("check").replace("about", 'check = """a\nb"""\nabout'), "check"),
    "no subject": (without("about"), "about"),
    "no check": (without("check"), "check"),
    "an unknown subject": (HEAD.replace("learning", "teaching") + SHOWS, "teaching"),
    "an unknown key": (HEAD + 'titel = "x"\n' + SHOWS, "titel"),
    "a text that is a number": (HEAD + "try = 3\n" + SHOWS, "try"),
    "a title that is a date": (without("title").replace("about", "title = 2026-01-01\nabout"), "title"),
    "a list that is a text": (HEAD + 'doctor = "layer"\n' + SHOWS, "doctor"),
    "a list of numbers": (HEAD + "only_with = [3]\n" + SHOWS, "only_with"),
    "a switch that is a text": (HEAD + 'harmless_if_close = "yes"\n' + SHOWS, "harmless_if_close"),
    "a switch that is a number": (HEAD + "a_correction_helps = 1\n" + SHOWS, "a_correction_helps"),
    "only_with of no finding": (HEAD + 'only_with = ["reward_sad.yes"]\n' + SHOWS, "reward_sad.yes"),
    "only_with of no level": (HEAD + 'only_with = ["reward_flat.sad"]\n' + SHOWS, "reward_flat.sad"),
    "only_with without a level": (HEAD + 'only_with = ["reward_flat"]\n' + SHOWS, "reward_flat"),
    "shows nothing": (HEAD, "3"),
    "shows a text": (HEAD + 'shows = "much"\n', "shows"),
    "shows several tables": (HEAD + "[[shows]]\n" + 'reward_flat = { flat = "always" }\n', "shows"),
    "an unknown finding": (HEAD + SHOWS + 'reward_sad = { yes = "often" }\n', "reward_sad"),
    "an unknown level": (HEAD + SHOWS.replace("rose", "sad"), "sad"),
    "an unknown word": (HEAD + SHOWS.replace("never", "hardly"), "hardly"),
    "a word that is a number": (HEAD + SHOWS.replace('"never"', "-4"), "reward_flat.rose"),
    "a word that is a list": (HEAD + SHOWS.replace('"never"', '["never"]'), "reward_flat.rose"),
    "a word that is a table": (HEAD + SHOWS.replace('"never"', '{ of = "never" }'), "reward_flat.rose"),
    "a word for all levels": (HEAD + '[shows]\nreward_flat = "always"\n', "reward_flat"),
    "a finding without levels": (HEAD + "[shows]\nreward_flat = {}\n", "mine.toml"),
    "too few points to be named": (HEAD + SHOWS.replace("always", "often"), "3"),
    "two findings of one family": (
        HEAD + '[shows]\nreward_fell = { falls = "often" }\nreward_peaked = { peaked = "often" }\n',
        "3",
    ),
}


@pytest.mark.parametrize(("text", "named"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_in_one_line_that_names_it(write, text, named):
    file = write(text)
    with pytest.raises(CauseError) as refused:
        read_cause(file)
    said = str(refused.value)
    assert said.startswith(f"{file}: ") and named in said.removeprefix(str(file)) + file.name and "\n" not in said


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_opened_is_refused(tmp_path, name):
    with pytest.raises(CauseError) as refused:
        read_cause(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name}: ")


def test_a_cause_that_needs_two_families_to_be_named_is_accepted(write):
    text = HEAD + '[shows]\nreward_fell = { falls = "often" }\nentropy_gone = { low = "often" }\n'
    assert read_cause(write(text)).points("entropy_gone", "low") == 1.5


# --------------------------------------------------------------------------------------------------------- all of them


def shows(name, alike=(), **levels):
    return Cause(name, name, "gap", "it", alike=alike, shows=levels)


FAR = {"apart": "always", "close": "never"}


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (shows("a", gap_level=FAR), shows("b", gap_level=FAR), False),
        (shows("a", gap_level=FAR), shows("b", gap_level=FAR | {"broken": "often"}), False),  # by 1.5 points
        (shows("a", gap_level=FAR), shows("b", gap_level=FAR | {"apart": "often"}), False),
        (shows("a", gap_level=FAR), shows("b", gap_level=FAR | {"broken": "always"}), True),
        (shows("a", gap_level=FAR), shows("b", gap_level=FAR | {"close": "rarely"}), True),  # by 2.5 points
        (shows("a", gap_level=FAR), shows("b", gap_level=FAR, gap_spike={"spike": "never"}), True),
        (shows("a", gap_level=FAR), shows("b", ("a",), gap_level=FAR), True),
        (shows("a", ("b",), gap_level=FAR), shows("b", gap_level=FAR), True),
        (shows("a", ("c",), gap_level=FAR), shows("b", gap_level=FAR), False),
    ],
)
def test_two_causes_that_no_finding_tells_apart_are_refused(one, other, apart):
    if apart:
        check_apart([one, other])
        return
    with pytest.raises(CauseError) as refused:
        check_apart([one, other])
    assert f" {one.name} " in str(refused.value) and f" {other.name}:" in str(refused.value)


def test_a_cause_of_ones_own_comes_after_ours(write):
    mine = write(HEAD + SHOWS)
    assert list(known_causes((mine,))) == [*known_causes(), "mine"]


@pytest.mark.parametrize("names", [("leak.toml",), ("mine.toml", "again/mine.toml")])
def test_a_name_that_is_taken_is_refused(write, names):
    files = tuple(write(HEAD + SHOWS, name) for name in names)
    with pytest.raises(CauseError) as refused:
        known_causes(files)
    assert str(refused.value).startswith(f"{files[-1]}: ") and files[-1].stem in str(refused.value)


def test_a_cause_that_is_alike_to_none_is_refused(write):
    with pytest.raises(CauseError, match="mine: alike lists leek"):
        known_causes((write(HEAD + 'alike = ["leek"]\n' + SHOWS),))


def test_a_cause_that_looks_like_one_of_ours_is_refused(write):
    """It differs from it by what `often` and `sometimes` are apart, which is less than APART."""
    words = "".join(f"{name} = {{ {levels} }}\n" for name, levels in inline(CAUSES["reference_runaway"]))
    file = write(HEAD + "[shows]\n" + words + 'reward_peaked = { peaked = "often" }\n')
    with pytest.raises(CauseError, match="reference_runaway and mine"):
        known_causes((file,))
    text = file.read_text()
    assert "mine" in known_causes(
        (write(text.replace("[shows]", 'alike = ["reference_runaway"]\n[shows]'), "b/mine.toml"),)
    )


def inline(cause):
    for name, levels in cause.shows.items():
        yield name, ", ".join(f'{level} = "{word}"' for level, word in levels.items())


# ------------------------------------------------------------------------------------------------------------ our own


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_a_cause_is_in_words_that_fit(cause):
    assert 0 < len(cause.check) <= 90 and 0 < len(cause.title) <= 90
    assert not any(text.endswith(".") or "\n" in text for text in (cause.title, cause.check, cause.why))
    assert bool(cause.why) == bool(cause.override)
    assert {other for other in cause.alike} <= set(CAUSES) - {cause.name}


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_a_cause_can_be_named_with_what_it_needs(cause):
    """One of the levels that it is named with only, and the best levels of the other findings, give it LEAST points."""
    require_logged = [mark.split(".") for mark in cause.only_with] or [(None, None)]
    assert any(most_points(cause, name, level) >= LEAST for name, level in require_logged)


def most_points(cause, require_logged, level):
    """The points if `needed` is seen at that level, and each other finding at its best one or not at all."""
    best = {}
    for name, levels in cause.shows.items():
        points = (
            cause.points(name, level)
            if name == require_logged
            else max(0.0, *(WORDS[word] for word in levels.values()))
        )
        key = (RULES[name].family, points > 0)
        best[key] = max(best.get(key, 0.0), points, key=abs)
    return sum(best.values())


def tried():
    every = {text for cause in CAUSES.values() for text in (cause.override, cause.moe_override)}
    asked = {setting_for(name) for rule in RULES.values() for name in rule.needs}
    return sorted((every | asked) - {""})


@pytest.mark.parametrize("text", tried())
def test_what_to_try_or_to_measure_acts_on_a_launch(compose, text):
    config = compose(
        "recipe=cpu_smoke", *([] if text.startswith("stability=") else ["stability=icepop"]), *shlex.split(text)
    )
    stability_config(config.stability)
    for word in shlex.split(text):
        name, _, value = word.removeprefix("++").partition("=")
        if "." in name and "{" not in value and "[" not in value:
            node = config
            for part in name.split("."):
                node = node[part]
            assert str(node).lower() == value.lower(), name


def test_the_checks_that_a_cause_names_are_the_doctors_and_each_of_one_cause():
    named = [check for cause in CAUSES.values() for check in cause.doctor]
    assert set(named) <= set(CHECKS)
    assert len(named) == len(CAUSE_OF_CHECK)


# ------------------------------------------------------------------------------------------- the command that decides


def test_what_the_probe_shows_is_of_a_cause_and_its_sweep_is_the_probes():
    assert {mark for cause in CAUSES.values() for mark in cause.probe} == set(PROBE_SHOWS)
    levels = {f"{rule.name}.{level}" for rule in RULES.values() for level in rule.levels}
    assert set(PROBE_SHOWS) <= levels and FP32 in RULES and "fp32" in NAMES


@pytest.mark.parametrize("first", CAUSES.values(), ids=CAUSES)
def test_what_settles_a_pair_tells_the_two_apart(first):
    """The probe is named if no reading shows both causes; its text describes what each would show."""
    for second in CAUSES.values():
        if second is first:
            continue
        settling = settling_of(first, second)
        said = settling.sentence if settling is not None else ""
        apart = bool(first.probe) and not set(first.probe) & set(second.probe)
        assert ("`verl-ext probe" in said) == apart
        for cause in (first, second):
            assert (f'"{cause.title}"' in said) == (apart and bool(cause.probe))
            assert not apart or all(PROBE_SHOWS[mark] in said for mark in cause.probe)
        assert ("`verl-ext doctor`" in said) == (not apart and bool(first.doctor or second.doctor))


def test_nothing_settles_what_neither_command_finds():
    hacked, noisy = CAUSES["hacked_reward"], CAUSES["noisy_reward"]
    assert settling_of(hacked) is None and settling_of(hacked, noisy) is None
