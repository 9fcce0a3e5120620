"""Made-up trajectories, as a run dumps them: a tool turn, dropped tokens, characters of several tokens."""

import math
import random
from pathlib import Path
from typing import Any

import orjson

SENTENCES = (
    *("Let", " me", " think", " about", " the", " number", " of", " pairs", " first", ".", " Since", " 7", " divides"),
    *(" n", "²", ",", " we", " have", " n", " =", " ", "7", "k", ".\n\n", "So", " the", " sum", " becomes", " \\("),
    *("\\sum", "_{k}", " 7", "k", "\\)", ",", " which", " is", " ", "2", "8", "0", ".\n"),
    *("Wait", ",", " check", " again", ":", "\n"),
)
CALL = ("<tool_call>", "\n", "print", "(", "sum", "(range", "(", "5", "))", "</tool_call>", "\n")
ANSWER = ("<tool_response>", "\n", "10", "\n", "</tool_response>", "\n")
FOREIGN = ("", "", "你", "好", "、", "", "", "", "🙂", " ok", "\n")


def line(
    step: int, key: str, texts: list[str] | None = None, *, count: int = 300, total: int | None = None,
    correction: bool = True, agreement: bool = True, drift: float = 1.0, **more: Any,
) -> dict:  # fmt: skip
    """One line of a dump, before JSON."""
    dice = random.Random(f"{step} {key}")
    if texts is None:
        texts, tool = [], set()
        while len(texts) < count:
            if len(texts) > count // 4 and not tool:
                texts += CALL
                tool = set(range(len(texts), len(texts) + len(ANSWER)))
                texts += [*ANSWER, *FOREIGN]
            texts += SENTENCES
        texts = texts[:count]
    else:
        tool = set()
    count = len(texts)
    own = [i not in tool for i in range(count)]
    l_infer = [round(-(dice.expovariate(1) ** 3) / 3, 5) for _ in texts]
    gaps = [dice.gauss(0, 0.0004 + 0.03 * min(1, -value)) * drift for value in l_infer]
    for i in dice.sample([i for i in range(count) if own[i]], count // 100):
        gaps[i] = dice.choice((-1, 1)) * dice.uniform(0.75, 2)
    filtered = set(dice.sample(range(count), count // 50))
    weight = [0.0 if not 0.5 < math.exp(gap) < 2 else 1.0 for gap in gaps]
    record = {
        "step": step,
        "key": key,
        "why": "largest gap" if step % 2 else "at random",
        "prompt": "What is 1 + 2 + ... + 7?\nThink step by step.",
        "reward": round(dice.random(), 3),
        "advantage": round(dice.gauss(0, 1), 3),
        "skipped": "",
        "tokens": total or count,
        "start": [0] if not total else [0, total - (count - count // 2)],
        "length": [count] if not total else [count // 2, count - count // 2],
        "text": texts,
        "id": [dice.randrange(150_000) for _ in texts],
        "generated": [int(mine) for mine in own],
        "l_infer": [value if mine else None for value, mine in zip(l_infer, own, strict=True)],
        "l_old": [value + gap if mine else None for value, gap, mine in zip(l_infer, gaps, own, strict=True)],
        "kept": [int(mine and i not in filtered) for i, mine in enumerate(own)],
        "entropy": [dice.expovariate(2) if mine else None for mine in own],
    }
    if correction:
        record["weight"] = [value if mine else None for value, mine in zip(weight, own, strict=True)]
    if agreement:
        shares = (1 - min(1, dice.expovariate(1) ** 2 * 0.02 * drift) for _ in texts)
        record["agreement"] = [share if mine else None for share, mine in zip(shares, own, strict=True)]
    return record | more


def dump(folder: Path, rows: list[dict], name: str = "run.trajectories.jsonl", tail: bytes = b"") -> Path:
    file = folder / name
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows) + tail)
    return file
