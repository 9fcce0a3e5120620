"""Any bytes instead of a run's files lead to a page or to one line."""

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from tests.unit.report.hostile import METRICS, documents, leaves, lines, look, names, numbers, record, steps, words
from tests.unit.report.made_stores import field, log, mlflow_database, mlflow_rows, wandb_file, wandb_row
from tests.unit.report.made_trajectories import line
from verl_ext.report.figures.panels import PANELS

metrics = st.fixed_dictionaries({"step": steps, "data": st.dictionaries(names, leaves, max_size=6)})
events = st.fixed_dictionaries(
    {"step": steps, "rule": words, "signal": names, "value": numbers, "threshold": numbers | st.none()},
    optional={"action": st.sampled_from(["skip", "stop", "rollback", "warn"]) | words, "reason": words},
)
RUN = "".join(json.dumps({"step": step, "data": {"vllm_kl/k3": step / 100}}) + "\n" for step in range(1, 10)).encode()
KEYS = sorted(line(1, "a", count=4))
trajectories = st.builds(
    lambda key, value, step: line(step % 9, "a", count=4) | {key: value},
    st.sampled_from(KEYS),
    documents | st.lists(leaves, min_size=4, max_size=4) | st.lists(numbers, min_size=4, max_size=4),
    st.integers(0, 9),
)
often, seldom = at_most(40), at_most(4)


def looked_at(files: dict[str, bytes], **how: Any) -> str:
    """Reports the first of these files, with the others next to it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for name, content in files.items():
            (path / name).write_bytes(content)
        return look(path / next(iter(files)), path / "out", **how)


@often
@given(lines(metrics))
def test_metrics_of_verls_logger(content):
    looked_at({"run.jsonl": content}, compared=True)


series = st.dictionaries(
    st.sampled_from(METRICS),
    st.lists(st.one_of(st.just(0.5), numbers), min_size=40, max_size=40),
    min_size=1,
    max_size=4,
)


def logged(columns: dict[str, list[float]]) -> bytes:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return "".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in enumerate(rows, start=1)).encode()


@often
@given(series)
def test_metrics_of_any_size(columns):
    assert looked_at({"run.jsonl": logged(columns)}, compared=True) == "page"


@seldom
@given(series)
def test_figures_of_metrics_of_any_size(columns):
    assert looked_at({"run.jsonl": logged(columns)}, compared=True, panels=PANELS) == "page"


@seldom
@given(lines(metrics), lines(events), lines(trajectories))
def test_figures_of_anything(content, decisions, dumped):
    looked_at(
        {"run.jsonl": RUN + content, "run.guard.jsonl": decisions, "run.trajectories.jsonl": dumped}, panels=PANELS
    )


@often
@given(lines(events))
def test_decisions_of_the_guard_cannot_cost_the_page(content):
    assert looked_at({"run.jsonl": RUN, "run.guard.jsonl": content}) == "page"


@often
@given(lines(trajectories))
def test_dumped_trajectories_cannot_cost_the_page(content):
    assert looked_at({"run.jsonl": RUN, "run.trajectories.jsonl": content}) == "page"


cells = st.builds(str, numbers) | words | st.just("")
headers = st.sampled_from(["Step", "_step", "Name", "State"]) | names | st.builds("{} - {}".format, words, names)


@often
@given(
    st.lists(st.lists(headers, max_size=5), max_size=1),
    st.lists(st.lists(cells, max_size=5), max_size=8),
    st.binary(max_size=9),
)
def test_an_export_of_wandb(header, rows, garbage):
    text = "\n".join(",".join(row) for row in [*([["Step", *each] for each in header]), *rows])
    looked_at({"run.csv": text.encode("utf-8", "surrogatepass") + garbage})


# What the readers of texts and documents look for, so that chance finds the ways into them.
FRAGMENTS = (
    *("step:3 - a/b:1 - c:2\n", "{'loss': 0.1, 'reward': nan}\n", '{"step": 3, "reward": 0.5}'),
    *("rollout 3: {'a/b': 1}", "| Step | Reward |\n", "|---|---|\n", "| 3 | 0.5 |\n", "│ reward │ 0.5 │ x │ 1 │\n"),
    *("Step\tLoss\n", "3\t0.5\n", "=== Step 3/9 ===\n", "Epoch 1/1 Step 3/9 Train step 3/99\n", "  • Reward: 50%\n"),
    *("Validation Results:\n", "Step 3 | Reward 0.5 | Loss: 1e-4\n", "rewards: tensor([1., nan])  time: 7.2s\n"),
    *("Sample 1 | Reward: 1\n", "2025-11-26T18:13:33.1Z stdout F ", "Nov 26 18:13:33 node x[1]: ", "(W pid=7) "),
    *("[rank0]:", "trainer-1  | ", "\r", "Traceback (most recent call last):\n", "ValueError: x\n", "Killed\n"),
    *("Aborted (core dumped)\n", "Signal 9 (SIG", "  what():  x\n", "exit code 137\n", "exitcode  : -6\n"),
    *(" 3%|# | 3/99 [0:1<0:1, 1s/it]\n", "logging_steps=7\n", "step,reward\n3,0.5\n"),
    "<table><tr><th>Step</th><th>reward</th></tr><tr><td>3</td><td>1</td></tr></table>",
    *('{"cells": [{"cell_type": "code", "outputs": [', '"ename": "E", "output_type": "error"', "]}]}"),
    *('"log_history": [', "Iter 3: Train loss 0.1, Reward 0.5, KL 0.1\n", "[run]  3/9 | reward=0.5\n"),
    *(" Step Reward\n", "    3   50%\n", "epoch: 0|step: 3|x: 1\n", "3;0,5\n", "Step;Reward\n"),
    *(" 3% 3/99 [0:1<0:1, 1s/it]\n", "lr=1e-6, ", "{'reward': 1, 'global_step/max_steps': '3/9'}\n", "╒═══╤═══╕\n"),
    *('"data": {"text/html": ["<table><tr><th>Step', '{"reward": {"1": 0.5}, "kl": [1, 2]}'),
    *('[{"step": 1, "reward": 2}]', "[[", "{", "}", "]", ",", ": "),
)
texts = st.lists(st.sampled_from(FRAGMENTS) | words | st.builds(str, numbers), max_size=30).map("".join)


@often
@given(st.data(), st.sampled_from(["run.log", "run.ipynb", "trainer_state.json", "table.csv", "run.jsonl"]))
def test_texts_and_documents_of_any_pieces(data, name):
    text = data.draw(texts).encode("utf-8", "surrogatepass")
    looked_at({name: data.draw(st.sampled_from([b"", b"{", b"["])) + damaged(data, text)})


NOTEBOOK = {"cells": [{"cell_type": "code", "outputs": [{"data": {"text/html": "<table>"}, "text": ["x"]}]}]}


@often
@given(documents, st.sampled_from(["cells", "outputs", "data", "log_history", "step", "reward"]))
def test_documents_with_anything_in_them(inner, name):
    for outer in (
        {name: inner},
        [{name: inner}],
        NOTEBOOK | {name: inner},
        {"cells": [{"cell_type": "code", name: inner}]},
    ):
        looked_at({"run.json": json.dumps(outer).encode()})


def tensors():
    from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2

    shapes = st.lists(st.sampled_from([-1, 0, 1, 2, 2**40, 2**62]), max_size=3).map(
        lambda sizes: tensor_shape_pb2.TensorShapeProto(
            dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in sizes]
        )
    )
    return st.builds(
        tensor_pb2.TensorProto,
        dtype=st.integers(0, 130),
        tensor_shape=shapes,
        tensor_content=st.binary(max_size=9),
        float_val=st.lists(st.floats(width=32), max_size=2),
        half_val=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
        int_val=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
        bool_val=st.lists(st.booleans(), max_size=2),
    )


def summaries():
    from tensorboard.compat.proto import event_pb2, summary_pb2

    tags = names.filter(lambda name: not any("\ud800" <= each <= "\udfff" for each in name))
    value = st.builds(summary_pb2.Summary.Value, tag=tags, simple_value=st.floats(width=32)) | st.builds(
        summary_pb2.Summary.Value, tag=tags, tensor=tensors()
    )
    return st.builds(
        event_pb2.Event,
        step=st.integers(0, 20) | st.integers(-(2**63), 2**63 - 1),
        summary=st.builds(summary_pb2.Summary, value=st.lists(value, max_size=3)),
    ).map(lambda event: record(event.SerializeToString()))


@often
@given(st.data())
def test_event_files_of_tensorboard(data):
    content = data.draw(st.lists(summaries() | st.binary(max_size=20).map(record), max_size=12).map(b"".join))
    garbage, at = data.draw(st.binary(max_size=16)), data.draw(st.integers(0, len(content)))
    content = data.draw(st.sampled_from([content, content[:at] + garbage + content[at + len(garbage) :]]))
    looked_at({"events.out.tfevents.1.host": content})


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Draws the content as it is, with other bytes in one place, or cut."""
    garbage, at = data.draw(st.binary(max_size=16)), data.draw(st.integers(0, len(content)))
    return data.draw(st.sampled_from([content, content[:at] + garbage + content[at + len(garbage) :], content[:at]]))


def wandb_rows():
    inner = st.dictionaries(words, leaves | st.dictionaries(words, leaves, max_size=2), max_size=3)
    data = st.dictionaries(
        names | st.sampled_from(["_type", "_step", "training/global_step"]), leaves | inner, max_size=5
    )
    sizes = st.integers(0, 40) | st.integers(-(2**63), 2**63 - 1)
    return st.builds(lambda *row, old: field(2, wandb_row(*row, old=old)), sizes, data, old=st.booleans())


@often
@given(st.data())
def test_files_of_wandb(data):
    who = field(17, field(3, data.draw(words)) + field(8, data.draw(words)))
    records = data.draw(st.lists(wandb_rows() | st.binary(max_size=20), max_size=8))
    looked_at({"run-x.wandb": damaged(data, log([who, *records]))})


def test_numbers_of_wandb_in_any_json():
    values = ("[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "1,2", "9" * 5000, "1e999", "\ud800", "", "nul")
    rows = [field(2, field(1, field(2, f"a{n}") + field(16, each)) + wandb_row(1, {})) for n, each in enumerate(values)]
    assert looked_at({"run-x.wandb": log([*rows, field(2, wandb_row(2, {"fine": 1}))])}) == "page"


@often
@given(st.data())
def test_folders_of_mlflow(data):
    good = b"1700000000000 0.5 1\n1700000000000 0.5 2\n"
    cell = st.builds(lambda *parts: " ".join(map(str, parts)), st.integers(), numbers, steps) | words
    rows = data.draw(st.lists(cell, max_size=8).map(lambda cells: "\n".join(cells).encode("utf-8", "surrogatepass")))
    meta = f"run_name: {data.draw(words)}\nstart_time: {data.draw(st.integers())}\n".encode("utf-8", "surrogatepass")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "mlruns" / "1" / "abc"
        (run / "metrics").mkdir(parents=True)
        (run / "meta.yaml").write_bytes(damaged(data, meta))
        (run / "metrics" / "a").write_bytes(good)
        (run / "metrics" / "\x1b]0;x\udc80").write_bytes(rows)
        assert look(Path(folder) / "mlruns", Path(folder) / "out") == "page"


@often
@given(st.data())
def test_databases_of_mlflow(data):
    with tempfile.TemporaryDirectory() as folder:
        file = mlflow_database(Path(folder) / "mlruns.db")
        mlflow_rows(file, [(step, {"vllm_kl/k3": step / 100}) for step in range(1, 9)])
        file.write_bytes(damaged(data, file.read_bytes()))
        look(file, Path(folder) / "out")


def test_a_database_of_mlflow_whose_error_is_no_text(tmp_path):
    file = mlflow_database(tmp_path / "mlruns.db")
    file.write_bytes(file.read_bytes().replace(b"indexindex_", b"index\x8fndex_"))
    assert "cannot be read as MLflow's database" in look(file, tmp_path / "out")


def test_a_name_of_wandb_is_not_obeyed():
    content = wandb_file([(1, {"a\x1b[2J": 1})], name="\x1b]0;x\x07", project="\u202e")
    assert looked_at({"run-x.wandb": content}) == "page"
