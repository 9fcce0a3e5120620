"""JSON documents of TRL and transformers: `trainer_state.json`, or a list of its log entries."""

import json
import re
from collections.abc import Iterator

from verl_ext.report.run import ReportError
from verl_ext.report.sources.printed_dicts import SUMMARY, numbers_of, step_in, without_step
from verl_ext.report.sources.text import Row, register_format

LIST = re.compile(rb"\[\s*\{")


@register_format("trainer_state.json (or a list of its log entries)", document=True)
class TrainerState:
    def sniff(self, text: bytes) -> bool:
        text = text.lstrip()
        return (text.startswith(b"{") and b'"log_history"' in text) or LIST.match(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportError(f"this is not whole JSON ({error}); is it still being written?") from None
        entries = read.get("log_history") if isinstance(read, dict) else read
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and SUMMARY not in entry:
                yield step_in(entry), without_step(numbers_of(entry))
