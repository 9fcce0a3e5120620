"""What an answer shows by itself: its server, a loop at its end, whether it was cut, and how many of its tokens the
newest of its weights sampled.

The agent loop's process has the tokens, and writes a few numbers per trajectory (`answer_facts`); the controller reads
only these.

Shape legend: B trajectories.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from verl_ext.base.names import REPLICAS
from verl_ext.core import torch

if TYPE_CHECKING:
    from torch import Tensor

SERVER, LOOPED, LAST, FRESH = range(4)  # columns of the facts
LOOP_TOKENS, LOOP_TIMES = 64, 4  # the least length of a loop, and the least number of its periods
LONGEST_PERIOD = 256  # tokens


def answer_facts(servers: Collection[str], tokens: Sequence[int], fresh: int = 0) -> list[int]:
    """Returns the facts of one trajectory: the number of its server, the tokens of its loop, its last token, and the
    number of its tokens that the newest of its weights sampled.

    Args:
        servers: the addresses of the servers that generated it.
        tokens: the response, tool output included.
        fresh: the last of the four facts.
    """
    server = server_number(next(iter(servers))) if len(servers) == 1 else 0
    return [server, looped_tail(tokens), tokens[-1] if len(tokens) else -1, fresh]


def server_number(address: str) -> int:
    """Returns a number above 0 by which processes know a server, whose address is text."""
    return zlib.crc32(address.encode()) + 1


def looped_tail(tokens: Sequence[int]) -> int:
    """Returns how many tokens at the end repeat one period, the first time included; 0 if they are too few for a loop.

    It looks at the last LOOP_TIMES * LONGEST_PERIOD tokens. A loop has at least LOOP_TOKENS tokens and at least
    LOOP_TIMES periods.
    """
    tail: np.ndarray = np.asarray(tokens[-LOOP_TIMES * LONGEST_PERIOD :], dtype=np.int64)
    for period in (np.flatnonzero(tail[-2::-1][:LONGEST_PERIOD] == tail[-1]) + 1).tolist() if len(tail) else ():
        differs = np.flatnonzero(tail[period:] != tail[:-period])
        length = len(tail) - (int(differs[-1]) + 1 if len(differs) else 0)
        if length >= max(LOOP_TOKENS, LOOP_TIMES * period):
            return length
    return 0


def answer_metrics(
    facts: Tensor, lengths: Sequence[int], added: Collection[int], limit: int, end_ids: Collection[int]
) -> dict[str, float]:
    """Returns the shares of answers that end in a loop, and of answers that were cut at the length limit.

    Args:
        facts: [B, 4] int64, of `answer_facts`.
        lengths: of the responses, in tokens.
        added: the rows that verl has added to fill the batch.
        limit: the largest length.
        end_ids: tokens that end an answer: an answer of the largest length that ends with one is complete.
    """
    answers = enumerate(zip(facts.tolist(), lengths, strict=True))
    real = [(fact, length) for row, (fact, length) in answers if row not in added]
    if not real:
        return {}
    looped = sum(fact[LOOPED] > 0 for fact, _ in real)
    cut = sum(length >= limit and fact[LAST] not in end_ids for fact, length in real)
    return {"answers/looped": looped / len(real), "answers/cut": cut / len(real)}


class Servers:
    """The rollout's servers, numbered in verl's order, and their nodes, in the order of their first servers.

    Args:
        addresses: `HOST:PORT` each.
        accelerators: host -> the kind of its accelerators, of the hosts whose kind is known.

    Attributes:
        kinds: the kind of each server's accelerators; "" where it is not known.
    """

    def __init__(self, addresses: Iterable[str] = (), accelerators: Mapping[str, str] = MappingProxyType({})):
        self.addresses = list(dict.fromkeys(addresses))
        hosts = [address.rpartition(":")[0] for address in self.addresses]
        nodes = list(dict.fromkeys(hosts))
        places = enumerate(map(nodes.index, hosts))
        self.kinds = [accelerators.get(host.strip("[]"), "") for host in hosts]
        self._places = dict(zip(map(server_number, self.addresses), places, strict=True))

    def buckets(self, facts: Tensor) -> dict[str, Tensor]:
        """Returns `replica` and `node` -> [B] int64, the places of the trajectories' servers in BUCKETS; {} if there is
        one server.

        The last bucket has trajectories of several servers, or of a server that started later.

        Args:
            facts: [B, 4] int64.
        """
        if len(self.addresses) < 2:
            return {}
        places = [self._places.get(number, (REPLICAS, REPLICAS)) for number in facts[:, SERVER].tolist()]
        found = torch.tensor(places, dtype=torch.long).reshape(-1, 2).clamp(max=REPLICAS)
        return dict(zip(("replica", "node"), found.unbind(1), strict=True))

    @property
    def mixed(self) -> str:
        """The kinds of accelerators with the numbers of their servers, if they are of several kinds; else ""."""
        numbers: dict[str, list[str]] = {}
        for index, kind in enumerate(self.kinds):
            numbers.setdefault(kind or "unknown", []).append(f"{index:02d}")
        if len({kind for kind in self.kinds if kind}) < 2:
            return ""
        return "; ".join(f"{kind}: {', '.join(of_kind)}" for kind, of_kind in numbers.items())

    def __str__(self) -> str:
        servers = enumerate(zip(self.addresses, self.kinds, strict=True))
        return ", ".join(f"{index:02d} {address}{f' ({kind})' if kind else ''}" for index, (address, kind) in servers)
