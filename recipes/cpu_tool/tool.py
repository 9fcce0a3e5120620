"""A tool, and a way to call it that a model with random weights finds by chance.

verl's agent loop worker executes this file (`rollout.multi_turn.function_tool_path`), which registers both.
"""

import json

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.ray_utils import get_event_loop

DIGITS = "0123456789"


@function_tool
def double(digit: int) -> str:
    """Double a digit.

    Args:
        digit: The digit, 0 to 9.
    """
    # Six characters for every digit, so that a test can count the tool's tokens.
    return f"{digit}+{digit}={2 * digit:02d}"


@ToolParser.register("digit")
class DigitToolParser(ToolParser):
    """A parser of calls: a turn that ends with a digit calls the tool with this digit.

    Random weights never generate JSON between two tags, which verl's other parsers require, but one of ten tokens is a
    digit. The digit also ends the turn, as a closing tag does for Gemma: no token follows the call.
    """

    @property
    def stop_token_ids(self) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(list(DIGITS))

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = await get_event_loop().run_in_executor(None, self.tokenizer.decode, responses_ids)
        if not text or text[-1] not in DIGITS:
            return text, []
        return text, [FunctionCall(name=double.__name__, arguments=json.dumps({"digit": int(text[-1])}))]
