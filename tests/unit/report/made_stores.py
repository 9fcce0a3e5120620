"""W&B's and MLflow's stores, written by hand from their formats, and damaged if a test asks for it."""

import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Sequence[tuple[int, Mapping[str, object]]]
BLOCK = 1 << 15


def wandb_file(rows: Rows, *, name: str = "exp", project: str = "proj", run: str = "abc", started: int = 1) -> bytes:
    """Writes a `.wandb` file as wandb 0.31 does: a record of the run, one per row, and text such as the console's."""
    head = field(17, field(1, run) + field(3, project) + field(8, name) + field(17, number_field(1, started)))
    history = [field(2, wandb_row(step, data)) for step, data in rows]
    return log([field(21, b""), head, field(13, field(3, "some output")), *history, field(18, b"")])


def wandb_row(step: int, data: Mapping[str, object], *, old: bool = False) -> bytes:
    """Returns a HistoryRecord. A dictionary becomes nested keys; up to 0.16, a key was not a list."""
    items = b"".join(
        field(1, b"".join(field(1 if old else 2, part) for part in key) + field(16, json.dumps(value)))
        for key, value in _leaves((), {**data, "_step": step})
    )
    return items + (b"" if old else field(2, number_field(1, step)))


def _leaves(key: tuple[str, ...], value: object):
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves((*key, name), inner)
    else:
        yield key, value


def log(records: Sequence[bytes]) -> bytes:
    """Returns records in LevelDB's log format, after W&B's header."""
    out = bytearray(b":W&B\xe1\xbe\0")
    for record in records:
        first = True
        while first or record:
            if (left := BLOCK - len(out) % BLOCK) < 7:
                out += bytes(left)
                left = BLOCK
            part, record = record[: left - 7], record[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not record]
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
    return bytes(out)


def field(number: int, content: str | bytes) -> bytes:
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(content)) + content


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value % 2**64)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def wandb_run(folder: Path, rows: Rows, *, started: int = 1, run: str = "abc", **who) -> Path:
    """Writes a run into `folder`, which W&B calls wandb."""
    file = folder / f"offline-run-20260101_0000{started:02d}-{run}" / f"run-{run}.wandb"
    file.parent.mkdir(parents=True)
    file.write_bytes(wandb_file(rows, run=run, started=started, **who))
    return file


def mlflow_run(
    folder: Path, rows: Rows, *, started: int = 1, run: str = "abc", name: str = "exp", project: str = "proj", **more
) -> Path:
    """Writes a run into the file store `folder`; returns the run's folder."""
    experiment = folder / "123"
    here = experiment / run
    (here / "metrics").mkdir(parents=True)
    (experiment / "meta.yaml").write_text(f"experiment_id: '123'\nlifecycle_stage: active\nname: {project}\n")
    meta = {"run_id": run, "lifecycle_stage": "active", "run_name": name, "start_time": started, "tags": []} | more
    (here / "meta.yaml").write_text("".join(f"{key}: {value}\n" for key, value in meta.items()))
    for step, data in rows:
        for metric, value in data.items():
            file = here / "metrics" / metric
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(f"{1_700_000_000_000 + step} {value} {step}\n")
    return here


TABLES = """
CREATE TABLE experiments (experiment_id INTEGER NOT NULL, name VARCHAR(256) NOT NULL, lifecycle_stage VARCHAR(32));
CREATE TABLE runs (run_uuid VARCHAR(32) NOT NULL, name VARCHAR(250), status VARCHAR(9), start_time BIGINT,
    lifecycle_stage VARCHAR(20), experiment_id INTEGER, CONSTRAINT run_pk PRIMARY KEY (run_uuid));
CREATE TABLE metrics ("key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL,
    run_uuid VARCHAR(32) NOT NULL, step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL,
    CONSTRAINT metric_pk PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan));
CREATE INDEX index_metrics_run_uuid ON metrics (run_uuid);
INSERT INTO experiments VALUES (1, 'proj', 'active');
"""


def mlflow_database(file: Path) -> Path:
    """The tables that are read, as MLflow 3.17 makes them."""
    with sqlite3.connect(file) as database:
        database.executescript(TABLES)
    database.close()
    return file


def mlflow_rows(file: Path, rows: Rows, *, started: int = 1, run: str = "abc", name: str = "exp") -> None:
    """Writes rows as MLflow does: a NaN as 0 with a mark, an infinity as the largest double."""
    with sqlite3.connect(file) as database:
        database.execute("INSERT INTO runs VALUES (?, ?, 'RUNNING', ?, 'active', 1)", (run, name, started))
        for step, data in rows:
            for metric, value in data.items():
                nan = isinstance(value, float) and math.isnan(value)
                kept = 0 if nan else max(-1.7976931348623157e308, min(1.7976931348623157e308, value))
                database.execute("INSERT INTO metrics VALUES (?, ?, 0, ?, ?, ?)", (metric, kept, run, step, nan))
    database.close()
