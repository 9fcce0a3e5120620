"""Writes a few trajectories of a step, token by token, as one JSON line each, for the report's trajectory view.

Shape legend: N response tokens of all trajectories, n tokens of one.
"""

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base import names
from verl_ext.core.tokens import Tokens
from verl_ext.features.settings import TrajectoryDump
from verl_ext.trainer.batch import QueueBatch
from verl_ext.trainer.logs import LineFile, say
from verl_ext.trainer.queue import get_fields, part_of

FIELDS = (names.PROMPTS, names.RESPONSES, names.RESPONSE_MASK, names.ADVANTAGES, names.REWARDS)
PROMPT_CHARACTERS = 4000  # only the end of a longer prompt is written
DIGITS = 7  # decimal places of a log-probability; float32 has as many
MEGABYTE = 1e6
STEP = re.compile(rb'\{"step":(\d+)')  # how a line begins
LONGEST_CHARACTER = 8  # tokens; UTF-8 needs at most four bytes


class TrajectoryLog:
    """Writes lines to `path`. Before it exceeds half of the allowed size, the file replaces the older `....1.jsonl`.

    So the newest lines are always kept: at least half of the allowed size, at most all of it.

    Args:
        resumed: the step after which a resumed run continues: lines of later steps are removed, because it writes them
            again. 0 for a new run, which starts empty.
    """

    def __init__(self, path: Path, settings: TrajectoryDump, *, resumed: int):
        path = path.absolute()  # the process may change its folder
        self._path, self._older = path, names.older_part(path)
        self._half = settings.max_megabytes * MEGABYTE / 2
        if not resumed:
            self._older.unlink(missing_ok=True)
        for file in (self._older, path):
            _cut(file, after=resumed)
        self._file = LineFile(path, resume=resumed > 0)
        self._size = path.stat().st_size if path.is_file() else 0

    def write(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record) + b"\n"
        # Lines that wait because of a full disk would be lost with their file.
        if self._size and self._size + len(line) > self._half and not self._file.waiting:
            self._file.close()
            self._path.replace(self._older)
            self._file, self._size = LineFile(self._path, resume=False), 0
        self._file.write(line)
        self._size += len(line)

    def close(self) -> None:
        self._file.close()


class Dump:
    """Writes trajectories at an interval of steps; for a step with several updates, those of the first.

    A failure to write them does not end the run.
    """

    def __init__(self, log: TrajectoryLog, settings: TrajectoryDump):
        self._log: TrajectoryLog | None = log
        self._settings = settings
        self._last_step = -1
        self._chosen: list[ShownTrajectory] = []

    def look_at(self, batch: QueueBatch, step: int) -> None:
        """Chooses trajectories of a measured batch, if this step's are written."""
        if self._log is None or step % self._settings.every or step == self._last_step:
            return
        self._last_step = step
        self._unless_it_fails(lambda: self._chosen.extend(choose_trajectories(batch, self._settings.per_step, step)))

    def write(self, batch: KVBatchMeta, tokenizer: Any, *, skipped: str) -> None:
        """Writes the chosen trajectories; see `write_step`."""
        log, step, chosen = self._log, self._last_step, self._chosen
        self._chosen = []
        if log is not None and chosen:
            about = {"step": step, "skipped": skipped}
            self._unless_it_fails(lambda: write_step(log, self._settings, batch, chosen, tokenizer, **about))

    def _unless_it_fails(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a tokenizer may raise anything: data that is only for reading must not end a run
            self.close()
            say(f"no more trajectories are written; the run continues: {error!r}")

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()


def forget_trajectories(path: Path) -> None:
    for file in (path, names.older_part(path)):
        file.unlink(missing_ok=True)


def _cut(file: Path, after: int) -> None:
    """Removes the lines of later steps from a file, in which steps ascend."""
    if not file.is_file():
        return
    with file.open("r+b") as lines:
        while line := lines.readline():
            begun = STEP.match(line)
            if begun and int(begun.group(1)) > after:
                lines.truncate(lines.tell() - len(line))
                return


@dataclass(frozen=True)
class ShownTrajectory:
    """A trajectory to write: its place in the batch, why it was chosen, its tokens, and their weights [n] or None."""

    row: int
    why: str
    tokens: Tokens
    weight: Tensor | None


def choose_trajectories(batch: QueueBatch, count: int, step: int) -> list[ShownTrajectory]:
    rows = choose_shown(*batch.log_k_sums(), count, step, batch.added)
    if not rows:
        return []
    tokens, weight = batch.tokens_of(list(rows))
    chosen = []
    for place, (row, why) in enumerate(rows.items()):
        own, places = tokens.of_rows([place])
        chosen.append(ShownTrajectory(row, why, own, None if weight is None else weight[places]))
    return chosen


def choose_shown(
    log_k_B: Tensor, counts_B: Tensor, count: int, step: int, never: Collection[int] = ()
) -> dict[int, str]:
    """Returns row -> why it was chosen: the largest mean |log k| of its generated tokens, or at random (a rerun chooses
    the same).

    Rows without generated tokens, and `never`, are left out.

    Args:
        log_k_B, counts_B: from `Tokens.log_k_sums`.
    """
    mean_B, counts = log_k_B / counts_B, counts_B.tolist()
    rows = [row for row in mean_B.argsort(descending=True, stable=True).tolist() if counts[row] and row not in never]
    largest = rows[: (count + 1) // 2]
    others = sorted(rows[len(largest) :])
    by_chance = random.Random(step).sample(others, min(count - len(largest), len(others)))
    return dict.fromkeys(largest, "largest gap") | dict.fromkeys(sorted(by_chance), "at random")


def write_step(
    log: TrajectoryLog,
    settings: TrajectoryDump,
    batch: KVBatchMeta,
    chosen: Sequence[ShownTrajectory],
    tokenizer: Any,
    **about: Any,
) -> None:
    """Writes some trajectories of a batch as it goes to the update, or would have gone.

    Args:
        batch: verl's, with FIELDS; filters have cleared response_mask of dropped tokens.
        about: `step`, and `skipped`: why the update is skipped, "" if it takes place.
    """
    batch = part_of(batch, [one.row for one in chosen])
    data = get_fields(batch, FIELDS)
    rows = {name: data[name].unbind() for name in FIELDS}
    for place, one in enumerate(chosen):
        fields = {name: rows[name][place].cpu() for name in FIELDS}
        line = record(fields, one.tokens, one.weight, settings, tokenizer)
        log.write({**about, "key": batch.keys[place], "why": one.why, **line})


def record(
    fields: Mapping[str, Tensor], tokens: Tokens, weight: Tensor | None, settings: TrajectoryDump, tokenizer: Any
) -> dict[str, Any]:
    """Returns a trajectory's line, without the keys that `write_step` adds; fields, tokens and weight are [n]."""
    stretches = kept_stretches(len(tokens.mask), settings.max_tokens)
    index = torch.cat([torch.arange(start, start + length) for start, length in stretches])
    generated = tokens.mask.cpu()[index]
    per_token = {
        "l_infer": tokens.l_infer,
        "l_old": tokens.l_old,
        "weight": weight,
        "agreement": tokens.agreement,
        "entropy": tokens.entropy,
    }
    ids = fields[names.RESPONSES][index].tolist()
    advantages = fields[names.ADVANTAGES][tokens.mask.cpu()].double()
    return {
        "prompt": tokenizer.decode(fields[names.PROMPTS].tolist(), skip_special_tokens=False)[-PROMPT_CHARACTERS:],
        "reward": float(fields[names.REWARDS].double().sum()),
        "advantage": float(advantages.mean()),
        "tokens": len(tokens.mask),
        "start": [start for start, _ in stretches],
        "length": [length for _, length in stretches],
        "text": [
            text
            for start, length in stretches
            for text in decode_pieces(fields[names.RESPONSES][start : start + length].tolist(), tokenizer)
        ],
        "id": ids,
        "generated": generated.int().tolist(),
        "kept": fields[names.RESPONSE_MASK][index].ne(0).int().tolist(),
        **{name: _numbers(values.cpu()[index], generated) for name, values in per_token.items() if values is not None},
    }


def _numbers(values: Tensor, generated: Tensor) -> list[float | None]:
    """Rounds the values; None for tokens that the model did not write. orjson writes null for values that are not
    finite."""
    pairs = zip(values.double().tolist(), generated.tolist(), strict=True)
    return [round(value, DIGITS) if own else None for value, own in pairs]


def kept_stretches(length: int, most: int) -> list[tuple[int, int]]:
    """Returns (start, length) of the written parts of a response: all of it, or its two ends."""
    if length <= most:
        return [(0, length)]
    head = (most + 1) // 2
    return [(0, head), (length - (most - head), most - head)]


def decode_pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Returns the text that each token adds; "" for a token that ends inside a character: the token that completes it
    has the text.

    Tokenizers that are not of the `tokenizers` library decode each token by itself.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [_decode(tokenizer, [token]) for token in ids]
    from tokenizers.decoders import DecodeStream

    pieces, waiting = list[str](), list[int]()
    stream = DecodeStream(skip_special_tokens=False)
    for token in ids:
        waiting.append(token)
        try:
            piece = stream.step(backend, token) or ""
        except Exception:  # its type is not exported: no text, or none that continues the text so far
            piece, waiting = _decode(tokenizer, [token]), waiting[:0]
            stream = DecodeStream(skip_special_tokens=False)
        if not piece and len(waiting) >= LONGEST_CHARACTER:  # the stream would wait, and take longer with each token
            piece = _decode(tokenizer, waiting)
            stream, waiting = DecodeStream(skip_special_tokens=False), []
        if piece:
            waiting = []
        pieces.append(piece)
    return pieces


def _decode(tokenizer: Any, ids: list[int]) -> str:
    try:
        return tokenizer.decode(ids, skip_special_tokens=False)
    except (OverflowError, TypeError, ValueError):  # an id that no tokenizer can have
        return ""
