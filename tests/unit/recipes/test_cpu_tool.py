import asyncio

import pytest
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.function_tool import load_function_tools_from_path

from recipes.cpu_tool.reward import compute_score
from recipes.make_assets import build_tokenizer
from tests import ROOT

RECIPE = ROOT / "recipes" / "cpu_tool"


@pytest.fixture(scope="module")
def tool():
    """Loads the tool as verl's agent loop worker does."""
    (tool,) = load_function_tools_from_path(str(RECIPE / "tool.py"))
    return tool


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def parser(tool, tokenizer, compose):
    """The parser that the recipe names."""
    return ToolParser.get_tool_parser(compose("recipe=cpu_tool").actor_rollout_ref.rollout.multi_turn.format, tokenizer)


def calls(parser, token_ids):
    return asyncio.run(parser.extract_tool_calls(token_ids))


def test_the_tool_doubles_in_six_characters(tool):
    answers = [asyncio.run(tool.call({"digit": digit})) for digit in range(10)]
    assert (answers[0], answers[4], answers[9]) == ("0+0=00", "4+4=08", "9+9=18")
    assert {len(answer) for answer in answers} == {6}


def test_the_tools_schema_asks_for_a_digit(tool):
    function = tool.tool_schema.function
    assert (function.name, function.parameters.required) == ("double", ["digit"])
    assert function.parameters.properties["digit"].type == "integer"


def test_the_ten_digits_end_a_turn(parser, tokenizer):
    assert tokenizer.convert_ids_to_tokens(parser.stop_token_ids) == list("0123456789")


@pytest.mark.parametrize("text", ["4", "k;Q4", "  4"])
def test_a_turn_that_ends_with_a_digit_is_a_call(parser, tokenizer, tool, text):
    content, (call,) = calls(parser, tokenizer.encode(text))
    assert content == text
    assert (call.name, call.arguments) == (tool.name, '{"digit": 4}')


@pytest.mark.parametrize("text", ["", "kQ", "4k", "4<end>", "k<end>"])
def test_any_other_turn_is_not(parser, tokenizer, text):
    assert calls(parser, tokenizer.encode(text)) == (text, [])


def test_verls_loop_appends_the_tools_output_to_the_very_tokens_that_were_sampled(tokenizer):
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3_moe")
    before = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "k;Q4"}]
    sampled = tokenizer.encode("<user>1+2=<assistant>k;Q4")
    merged = builder.merge_context_tokens(before, [*before, {"role": "tool", "content": "4+4=08"}], sampled)
    assert merged.token_ids == sampled + tokenizer.encode("<user>4+4=08<assistant>")
    mask, log_probs = builder.align_response_metadata(merged, [1] * 4, [-1.0] * 4)
    assert (mask, log_probs) == ([1] * 4 + [0] * 8, [-1.0] * 4 + [0.0] * 8)


def test_the_reward_is_1_for_the_right_digit_and_falls_with_the_distance():
    expected = {"3": 1.0, "3 and more": 1.0, "4": 0.3 + 0.4 * 8 / 9, "": 0, " 3": 0, "x3": 0, "²": 0, "٣": 0}
    for response, score in expected.items():
        given = compute_score("", response, "3", extra_info={}, reward_router_address=None)
        assert given == pytest.approx(score), response
    scores = [compute_score("", str(digit), "5") for digit in (0, 2, 4, 5)]
    assert scores == sorted(set(scores)) and scores[0] >= 0.3
