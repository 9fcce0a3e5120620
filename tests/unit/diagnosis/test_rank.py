"""The ranking of causes: which evidence counts, who is named, and which metric is asked for."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ext.diagnosis.causes import CAUSES, LEAST, WORDS, Cause
from verl_ext.diagnosis.findings.registry import RULES, Finding
from verl_ext.diagnosis.names import setting_for
from verl_ext.diagnosis.rank import MOST_NAMED, SECOND, evidence_of, name_causes
from verl_ext.diagnosis.series import Readings

NEVER = WORDS["never"]
MARKS = [(rule.name, level) for rule in RULES.values() for level in rule.levels]


def found(**levels):
    """Returns findings at these levels."""
    return {name: Finding(name, level, f"{name} is {level}") for name, level in levels.items()}


def cause(name, about="gap", only_with=(), harmless=False, **shows):
    return Cause(name, name, about, "it", only_with=only_with, harmless_if_close=harmless, shows=shows)


def logged(*names):
    """Returns a run that logs these metrics."""
    return Readings.of_pairs({name: [(1, 0.5)] for name in names})


def named(findings, *causes):
    return [suspect.cause.name for suspect in name_causes(logged(), findings, causes)[0]]


def question(findings, *causes, run=None, **more):
    asked = name_causes(run or logged(), findings, causes, **more)[1]
    return asked and (asked.first.name, asked.second.name, asked.setting)


# ------------------------------------------------------------------------------------------------------ what counts

cut = {"answers_cut": {"most": "often", "many": "rarely"}, "cut_began": {"at_once": "always", "later": "never"}}


def test_the_evidence_is_split_into_for_and_against():
    findings = found(answers_cut="most", gap_grew="steady", gap_spike="spike", gap_level="apart")
    shows = {"gap_spike": {"spike": "always"}, "gap_level": {"apart": "always"}, "gap_grew": {"steady": "rarely"}}
    (first,), _ = name_causes(logged(), findings, [cause("a", **shows, **cut)])
    assert first.points == 1.5 + 3 + 3 - 1.5
    assert first.speaks_for == ("gap_spike is spike", "gap_level is apart", "answers_cut is most")
    assert first.speaks_against == ("gap_grew is steady",)


words = st.sampled_from(list(WORDS))
some_cause = st.dictionaries(st.sampled_from(MARKS), words, max_size=30)
some_levels = st.fixed_dictionaries({}, optional={rule.name: st.sampled_from(rule.levels) for rule in RULES.values()})


def of_marks(marks, name="a"):
    shows = {}
    for (finding, level), word in marks.items():
        shows.setdefault(finding, {})[level] = word
    return cause(name, **shows)


@given(some_cause, some_levels)
def test_points_are_the_best_for_and_the_worst_against_of_each_family(marks, levels):
    seen = {}
    for name, level in levels.items():
        seen.setdefault(RULES[name].family, []).append(WORDS[marks.get((name, level), "sometimes")])
    expected = sum(max(0.0, *points) + min(0.0, *points) for points in seen.values())
    assert sum(each.points for each in evidence_of(of_marks(marks), found(**levels))) == expected


@given(some_cause, some_levels, some_levels)
def test_what_is_not_seen_or_only_sometimes_adds_nothing(marks, levels, more):
    """Only findings that the cause lists with another word than `sometimes` change its points."""
    silent = {name: level for name, level in more.items() if WORDS[marks.get((name, level), "sometimes")] == 0}
    silent = {name: level for name, level in silent.items() if name not in levels}
    a = of_marks(marks)
    assert evidence_of(a, found(**levels, **silent)) == evidence_of(a, found(**levels))


# ----------------------------------------------------------------------------------------------------- who is named

often = {"spike": "often"}
always = {"apart": "always"}


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([cause("a", gap_level=always)], ["a"]),  # LEAST points
        ([cause("a", gap_spike=often)], []),
        ([cause("a", gap_level=always), cause("b", gap_spike=often)], ["a", "b"]),  # SECOND points
        ([cause("a", gap_level=always), cause("b", gap_spike={"spike": "sometimes"})], ["a"]),
        ([cause("a", gap_level=always), cause("b", gap_spike=often), cause("c", gap_spike=often)], ["a", "b"]),
        ([cause("a", gap_spike=often), cause("b", gap_spike=often)], []),
        ([cause("a", gap_level=always), cause("b", gap_level=always, gap_spike=often)], ["b", "a"]),
        ([cause(name, gap_level=always) for name in "abcd"], ["a", "b", "c"]),  # MOST_NAMED
        ([cause("a", gap_level=always, gap_spike={"spike": "never"})], []),
    ],
)
def test_who_is_named(causes, expected):
    assert (LEAST, SECOND, MOST_NAMED) == (3, 1.5, 3)
    assert named(found(gap_level="apart", gap_spike="spike"), *causes) == expected


@pytest.mark.parametrize(
    ("only_with", "expected"),
    [
        ((), ["a"]),
        (("gap_spike.spike",), []),
        (("gap_spike.spike", "gap_spike.broken"), ["a"]),
        (("gap_grew.grew", "gap_spike.spike"), []),
        (("gap_level.apart",), ["a"]),
    ],
)
def test_a_cause_is_named_only_with_what_it_needs(only_with, expected):
    a = cause("a", only_with=only_with, gap_level=always)
    assert named(found(gap_level="apart", gap_spike="broken"), a) == expected


@pytest.mark.parametrize(("word", "expected"), [("rarely", ["a"]), ("never", [])])
def test_what_is_never_seen_rules_a_cause_out(word, expected):
    """Three findings that are `always` seen have more points than one `never` takes away."""
    shows = {"gap_level": always, "gap_started": {"at_once": "always"}, "gap_side": {"most": "always"}}
    a = cause("a", gap_spike={"spike": word}, **shows)
    seen = found(gap_level="apart", gap_started="at_once", gap_side="most", gap_spike="spike")
    assert named(seen, a) == expected


def points_of(a_cause, findings):
    return sum(each.points for each in evidence_of(a_cause, findings))


THREE_IN_THE_LEARNING = {"answers_empty": "many", "answers_loop": "many", "length_collapsed": "collapsed"}


@given(some_levels)
@example({"run_ended": "memory", "expert_overload": "overloaded", "answers_loop": "many"})
@example({"run_ended": "memory"})
@example({"gap_level": "close", "probe_fp32": "stays", "gap_by_probability": "even", **THREE_IN_THE_LEARNING})
def test_our_causes_are_named_by_their_points_whatever_is_found(levels):
    findings = found(**levels)
    marks = {f"{name}.{level}" for name, level in levels.items()}
    suspects, asked = name_causes(logged(), findings, CAUSES.values())
    assert len(suspects) <= MOST_NAMED
    for place, suspect in enumerate(suspects):
        assert suspect.points >= (SECOND if place == 1 else LEAST)
        assert not suspect.cause.only_with or marks & set(suspect.cause.only_with)
        assert not suspect.harmless or place == len(suspects) - 1
    if not any(suspect.harmless for suspect in suspects):
        points = [suspect.points for suspect in suspects]
        assert points == sorted(points, reverse=True)
        possible = [each for each in CAUSES.values() if not each.only_with or marks & set(each.only_with)]
        possible = [each for each in possible if not any(each.points(*mark.split(".")) == NEVER for mark in marks)]
        best = {
            end: max((points_of(each, findings) for each in possible if (each.about == "run") is end), default=0.0)
            for end in (False, True)
        }
        assert bool(suspects) == (max(best.values()) >= LEAST)
        # What ended a run is shown anyway: it is named as a cause only if no other cause is. Rounding of a harmless
        # size comes after the causes in the learning, so that it may be the fourth.
        harmless = levels.get("gap_level") in ("close", "none") and len(suspects) == MOST_NAMED
        assert harmless or not suspects or points[0] == (best[False] if best[False] >= LEAST else best[True])
    assert asked is None or asked.setting in {setting_for(name) for rule in RULES.values() for name in rule.needs}


# ------------------------------------------------------------------------------------------------- harmless rounding


def test_what_to_check_depends_on_what_is_seen():
    known = CAUSES["ended_by_error"]
    for level, check in (("error", known.check), ("late", known.check_if["run_ended.late"])):
        ((suspect,), _) = name_causes(logged(), found(run_ended=level), CAUSES.values())
        assert (suspect.cause.name, suspect.cause.check) == ("ended_by_error", check)


def test_what_a_sure_cause_explains_is_no_evidence_for_others():
    """A batch without a signal is no cause if all answers are cut."""
    cut = replace(cause("cut", about="learning", cut_and_low={"yes": "always"}), explains=("groups_dead.all",))
    no_signal = cause("no_signal", about="learning", groups_dead={"all": "always"}, advantages={"zero": "always"})
    assert named(found(cut_and_low="yes", groups_dead="all"), no_signal, cut) == ["cut"]
    assert named(found(cut_and_low="no", groups_dead="all"), no_signal, cut) == ["no_signal"]
    both = found(cut_and_low="yes", groups_dead="all", advantages="zero")
    assert named(both, no_signal, cut) == ["no_signal", "cut"]  # of equal points; what it does not explain still counts


rounding = cause("rounding", harmless=True, gap_started={"at_once": "always"})
fault = cause("fault", gap_started={"at_once": "always"}, gap_spike=often)
twin = cause("twin", gap_started={"at_once": "always"})
learning = cause("learning", about="learning", reward_fell={"falls": "always"})
weak = cause("weak", about="learning", reward_flat={"fell": "often"})


@pytest.mark.parametrize(
    ("levels", "causes", "expected", "harmless"),
    [
        ({"gap_level": "close"}, [rounding], ["rounding"], True),
        ({"gap_level": "none"}, [rounding], ["rounding"], True),
        ({"gap_level": "apart"}, [rounding], ["rounding"], False),
        ({}, [rounding], ["rounding"], False),  # the size of the gap is not known
        ({"gap_level": "close"}, [rounding, twin], ["rounding"], True),  # it hides what is behind it
        ({"gap_level": "apart"}, [rounding, twin], ["rounding", "twin"], False),
        ({"gap_level": "close", "gap_spike": "spike"}, [rounding, fault], ["fault", "rounding"], True),
        ({"gap_level": "close", "reward_fell": "falls"}, [rounding, learning], ["learning", "rounding"], True),
        ({"gap_level": "close", "reward_flat": "fell"}, [rounding, weak], ["rounding"], True),
        ({"gap_level": "close", "reward_fell": "falls"}, [rounding, twin, learning], ["learning", "rounding"], True),
    ],
)
def test_harmless_rounding_comes_last_and_hides_what_is_behind_it(levels, causes, expected, harmless):
    suspects, _ = name_causes(logged(), found(gap_started="at_once", **levels), causes)
    assert [suspect.cause.name for suspect in suspects] == expected
    assert [suspect.cause.name for suspect in suspects if suspect.harmless] == (["rounding"] if harmless else [])


@pytest.mark.parametrize("word", ["always", "often"])  # named, or too weak for that
def test_nothing_is_asked_about_harmless_rounding(word):
    rounds = cause("rounds", harmless=True, gap_started={"at_once": word})
    router = cause("router", gap_started={"at_once": "often"}, routers_differ={"much": "always", "in_ties": "never"})
    assert question(found(gap_started="at_once", gap_level="apart"), rounds, router) is not None
    assert question(found(gap_started="at_once", gap_level="close"), rounds, router) is None


# ------------------------------------------------------------------------------------------------------ the question

AT_ONCE = {"at_once": "always"}
ROUTERS, SYNC = "stability.router_agreement=true", "stability.sync_canary.trajectories=8"
ties = cause("ties", gap_started=AT_ONCE, routers_differ={"in_ties": "often", "much": "never"})
much = cause("much", gap_started=AT_ONCE, routers_differ={"much": "often", "in_ties": "never"})
small = cause("small", gap_started=AT_ONCE, routers_differ={"in_ties": "often"})
usual = cause("usual", gap_started=AT_ONCE, routers_differ={"not_at_all": "sometimes"})
lead = cause("lead", gap_started=AT_ONCE, gap_spike={"spike": "always"}, routers_differ={"much": "rarely"})
ahead = cause("ahead", gap_started=AT_ONCE, gap_spike=often, routers_differ={"much": "rarely"})
part = cause("part", gap_started=AT_ONCE, updates_arrived={"part": "always", "all": "never"})
none = cause("none", gap_started=AT_ONCE, updates_arrived={"none": "always", "all": "sometimes", "part": "never"})
both = cause("both", gap_started=AT_ONCE, routers_differ={"in_ties": "often"}, updates_arrived={"all": "always"})
old = cause("old", gap_started=AT_ONCE, rollout_age={"old": "always", "new": "never"})


@pytest.mark.parametrize(
    ("causes", "levels", "expected"),
    [
        ([ties, much], {}, ("ties", "much", ROUTERS)),
        ([ties, much], {"routers_differ": "deeper"}, None),  # it is logged
        ([part, none], {}, ("part", "none", SYNC)),
        ([part, none], {"updates_arrived": "unclear"}, None),
        ([small, usual], {}, None),  # no level speaks for the second one
        ([lead, much], {"gap_spike": "spike"}, None),  # 3 points ahead, and no level takes more than 3
        ([lead, ties], {"gap_spike": "spike"}, None),
        ([ahead, much], {"gap_spike": "spike"}, ("ahead", "much", ROUTERS)),  # 1.5 points ahead
        ([ties, lead], {}, ("ties", "lead", ROUTERS)),
        ([old, small], {}, None),  # no setting logs the age, and no level of the routers confirms `old`
        ([part, both], {}, ("part", "both", SYNC)),  # 7 points apart, and not 1.5
        ([ties], {}, None),
        ([], {}, None),
        ([ties, cause("silent", routers_differ={"much": "always"})], {}, None),  # it has no point yet
    ],
)
def test_the_question_names_what_is_not_logged_and_would_turn_the_order(causes, levels, expected):
    assert question(found(gap_started="at_once", **levels), *causes) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("vllm_kl/k3",), ("ties", "much", ROUTERS)),
        (("router/agreement",), None),  # it is logged, and shows nothing of the finding
    ],
)
def test_what_is_logged_is_not_asked_for(names, expected):
    assert question(found(gap_started="at_once"), ties, much, run=logged(*names)) == expected


def test_where_a_setting_may_not_be_asked_for_it_is_the_next_best():
    """The routers would move the two by 7 points, and the sync's canary by 4.5."""
    one = cause("one", gap_started=AT_ONCE, updates_arrived={"part": "often"}, routers_differ={"much": "always"})
    other = cause("other", gap_started=AT_ONCE, updates_arrived={"all": "always"}, routers_differ={"in_ties": "always"})
    assert question(found(gap_started="at_once"), one, other) == ("one", "other", ROUTERS)
    only = question(found(gap_started="at_once"), one, other, may_ask=lambda setting: setting != ROUTERS)
    assert only == ("one", "other", SYNC)


def test_a_question_needs_levels_that_move_the_two_far_enough():
    """`often` against nothing confirms by 1.5 and `rarely` turns by 1.5; less than DECIDED asks nothing."""
    a = cause("a", gap_started=AT_ONCE, routers_differ={"in_ties": "often"})
    b = cause("b", gap_started=AT_ONCE, routers_differ={"in_ties": "sometimes"})
    c = cause("c", gap_started=AT_ONCE, routers_differ={"much": "often"})
    assert question(found(gap_started="at_once"), a, b) is None
    assert question(found(gap_started="at_once"), a, c) == ("a", "c", ROUTERS)


def test_the_question_is_asked_also_if_no_cause_is_named():
    weak = [
        Cause(each.name, each.name, "gap", "it", shows=each.shows | {"gap_started": {"at_once": "often"}})
        for each in (ties, much)
    ]
    suspects, asked = name_causes(logged(), found(gap_started="at_once"), weak)
    assert suspects == [] and asked.setting == ROUTERS


def test_the_first_suspect_has_the_question_and_the_advice_of_its_model():
    old = CAUSES["old_weights"]
    findings = found(rollout_age="old")
    dense, routed = (name_causes(run, findings, [old])[0][0] for run in (logged(), logged("router/agreement")))
    assert (dense.override, routed.override) == (old.override, old.moe_override) and old.moe_override != old.override
    assert old.override in dense.advice and old.moe_override in routed.advice
    (first, second), asked = name_causes(logged(), found(gap_started="at_once"), [ties, much])
    assert first.question == asked and second.question is None
    assert ROUTERS in first.sentence and ROUTERS not in second.sentence
