"""The words of the causes against the corpus: "always" and "never" are claims that runs can refute, points are not."""

from collections import defaultdict
from functools import cache

import pytest

from tools import cases
from verl_ext.diagnosis.causes import CAUSES
from verl_ext.diagnosis.findings.registry import find_all

FEWEST = 5  # cases of a cause without which its words are not judged
ALWAYS, NEVER = 0.9, 0.02  # shares of the cases that show the finding at all


@cache
def levels_by_cause() -> dict[str, dict[str, list[str]]]:
    """Cause -> finding -> its level in each case whose cause is known and that shows the finding."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for _, file, known in cases.cases():
        causes = known["expect"].get("cause", ())
        if causes and causes[0] in CAUSES and (len(causes) == 1 or known["kind"] == "planted"):
            for name, seen in find_all(cases.read_case(file).readings).items():
                found[causes[0]][name].append(seen.level)
    return found


def refuted(shows: dict[str, dict[str, str]], seen: dict[str, list[str]]) -> list[str]:
    """Returns the words that the levels of at least FEWEST cases refute. If several levels of a finding are "always",
    one of them has to be seen."""
    found = []
    for name, words in shows.items():
        levels = seen.get(name, [])
        if len(levels) < FEWEST:
            continue
        share = {word: sum(words.get(level) == word for level in levels) / len(levels) for word in ("always", "never")}
        if "always" in words.values() and share["always"] < ALWAYS:
            found.append(f"{name}: always, and seen in {share['always']:.0%} of {len(levels)}")
        if share["never"] > NEVER:
            found.append(f"{name}: never, and seen in {share['never']:.0%} of {len(levels)}")
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_the_corpus_does_not_refute_the_words_of_a_cause(name):
    assert refuted(CAUSES[name].shows, levels_by_cause()[name]) == []


def test_most_causes_of_the_lab_have_enough_cases():
    counts = {name: max(map(len, seen.values()), default=0) for name, seen in levels_by_cause().items()}
    assert sum(count >= FEWEST for count in counts.values()) >= 18


def test_a_wrong_word_is_refuted():
    seen = {"replay": ["none"] * 9 + ["own_experts"]}
    assert len(refuted({"replay": {"own_experts": "always"}}, seen)) == 1
    assert len(refuted({"replay": {"none": "never"}}, seen)) == 1
    assert refuted({"replay": {"none": "always", "other_experts": "never"}}, seen) == []
    assert refuted({"replay": {"none": "never"}}, {"replay": ["none"] * (FEWEST - 1)}) == []
