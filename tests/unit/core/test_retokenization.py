"""The first place where a response no longer encodes to itself, with a tokenizer that has one merge, a + b -> ab."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core.filters import first_drift

WORDS = {1: "a", 2: "b", 12: "ab", 3: "c"}
IDS = {word: i for i, word in WORDS.items()}


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def encode(text):
    ids = []
    while text:
        word = "ab" if text.startswith("ab") else text[0]
        ids.append(IDS[word])
        text = text[len(word) :]
    return ids


@given(st.lists(st.tuples(st.sampled_from(list(WORDS)), st.booleans()), max_size=12))
def test_this_tokenizer_drifts_at_an_a_before_a_b_of_its_turn(tokens):
    pairs = pairwise(tokens)
    expected = next((at for at, pair in enumerate(pairs) if pair == ((1, True), (2, True))), None)
    ids, generated = [i for i, _ in tokens], [m for _, m in tokens]
    assert first_drift(ids, generated, decode, encode) == expected


@pytest.mark.parametrize(
    ("again", "expected"), [([7, 8], None), ([7], 1), ([], 0), ([7, 8, 9], 2), ([9, 8], 0), ([7, 9, 8], 1)]
)
def test_fewer_tokens_more_and_others(again, expected):
    assert first_drift([7, 8, 5], [True, True, False], lambda ids: "", lambda text: again) == expected


def test_only_what_the_model_wrote_is_encoded_a_turn_at_a_time():
    seen = []

    def remember(ids):
        seen.append(list(ids))
        return decode(ids)

    assert first_drift([1, 2, 3, 2, 12], [True, False, False, True, True], remember, encode) is None
    assert seen == [[1], [2, 12]]
