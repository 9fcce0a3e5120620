"""Which rows of a batch belong together, read from verl's trajectory ids `{uid}_{session}_{index}`.

A prompt (uid) is sampled in several sessions, and an agent loop may return several outputs a session, one row each.
The last output carries the session's reward: group statistics count every session once.

Shape legend: B rows, S sessions, G groups (prompts).
"""

# ruff: noqa: N815 (shape suffixes)
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.errors import BatchError


@dataclass(frozen=True)
class Sessions:
    """The sessions of a batch, in the order of their first row.

    Attributes:
        final_S: the row of each session's last output.
        session_B: the session of each row.
        uid_S: the prompt each session answers.
    """

    final_S: list[int]
    session_B: list[int]
    uid_S: list[str]

    @classmethod
    def from_keys(cls, keys: Sequence[str]) -> "Sessions":
        """From trajectory ids, in any order; a uid may contain underscores.

        Raises:
            BatchError: a key is not `{uid}_{session}_{index}`.
        """
        sessions: dict[tuple[str, str], int] = {}
        last: list[tuple[int, int]] = []  # (index, row) of each session's latest output
        session_B = []
        for row, key in enumerate(keys):
            head, _, index = key.rpartition("_")
            uid, _, session = head.rpartition("_")
            if not uid or not index.isdecimal():
                raise BatchError(f"the trajectory id {key!r} is not {{uid}}_{{session}}_{{index}}")
            output, number = (int(index), row), sessions.setdefault((uid, session), len(sessions))
            if number == len(last):
                last.append(output)
            last[number] = max(last[number], output)
            session_B.append(number)
        return cls([row for _, row in last], session_B, [uid for uid, _ in sessions])


def group_ids(names: Sequence[object]) -> list[int]:
    """0, 1, ... for each different name, in the order of appearance."""
    ids: dict[object, int] = {}
    return [ids.setdefault(name, len(ids)) for name in names]
