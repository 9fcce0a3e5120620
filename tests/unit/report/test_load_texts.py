"""Console logs, documents and notebooks: a small sample of each form, and what their files look like in practice."""

import io
import json
import math
import re
import sys
import textwrap

import numpy as np
import pytest

from tests.unit.report.made_files import train, values, write
from verl_ext.cli import main
from verl_ext.diagnosis.findings.registry import RULES, FindingRule
from verl_ext.diagnosis.names import aliases_of
from verl_ext.report.load import Reader, read_run
from verl_ext.report.run import VALIDATION, ReportError
from verl_ext.report.sources import FORMATS, form_rows
from verl_ext.report.sources.text import detect_format, register_format
from verl_ext.report.terminal import dashboard_rows
from verl_ext.report.verdict import judge_run

VERL = "step:{0} - actor/lr:1e-06 - critic/score/mean:{1} - timing_s/step:2.5\n"
TRL = "{{'loss': {1}, 'grad_norm': 0.5, 'reward': {1}, 'epoch': {0}.0}}\n"
TRL_TEXTS = "{{'loss': '{1}', 'grad_norm': '0.5', 'reward': '{1}', 'epoch': '{0}.0'}}\n"
SLIME = "(Actor pid=7) [2026-01-01 00:00:00] x.py:1 - step {0}: {{'train/loss': 0.1, 'train/ppo_kl': {1}}}\n"
PAIRS = "Step {0} | Time: 3.1s | Reward: {1} | Entropy: 0.5\n"
TENSORS = "time: 7.2s     rewards: tensor([{1}, {1}, {1}])\n"


def many(line: str, values=(0.25, 0.5, 0.75), first: int = 1) -> str:
    return "".join(line.format(step, value) for step, value in enumerate(values, start=first))


def notebook(*outputs: dict) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "outputs": [output]} for output in outputs], "nbformat": 4})


def printed(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


TABLE = (
    "<table><thead><tr><th>Step</th><th>Training Loss</th><th>reward</th></tr></thead><tbody>"
    + "".join(
        f"<tr><td>{step}</td><td>0.1</td><td>{value}</td></tr>" for step, value in ((1, 0.25), (2, 0.5), (3, 0.75))
    )
    + "</tbody></table>"
)
STATE = json.dumps(
    {"global_step": 3, "log_history": [{"step": step, "reward": step / 4, "epoch": 0.1} for step in (1, 2, 3)]}
)
# form -> (name of the file, its text, name of the reward)
BAR = "Train epoch [1/1]: 100%|##| 2/2 [0:1<0:2, 6.6s/it, pg=-0.1, rm={1}, glen=7.28e+3]\n 0%| | 0/2 [0:0<?]\n"
SAMPLES = {
    "bars": ("run.log", many(BAR), "rm"),
    "bars below their numbers": (
        "run.log",
        many("[losses/total_loss: -0.28 | losses/policy_loss: {1}]:   2%| | {0}/3200 [13:58<56:57:20, 65.45s/it]\n"),
        "losses/policy_loss",
    ),
    "verl": ("run.log", many(VERL), "critic/score/mean"),
    "TRL": ("run.log", many(TRL), "reward"),
    "TRL, numbers as texts": ("run.out", many(TRL_TEXTS), "reward"),
    "TRL, aligned": ("run.log", many("{{'loss':    1.46,  'grad_norm' : {0}.50,   'reward':  {1}}}\n"), "reward"),
    "slime": ("run.txt", many(SLIME), "train/ppo_kl"),
    "boxes with their step in a cell": (
        "run.log",
        many("----------------\n| iterations | {0} |\n| ep_rew_mean | {1} |\n----------------\n"),
        "ep_rew_mean",
    ),
    "pairs": ("run.log", many(PAIRS), "Reward"),
    "tensors": ("run.log", many(TENSORS), "critic/score/mean"),
    "trainer_state.json": ("trainer_state.json", STATE, "reward"),
    "list of log entries": ("history.json", json.dumps(json.loads(STATE)["log_history"]), "reward"),
    "notebook, printed": ("run.ipynb", notebook(printed("hello\n"), printed(many(TRL))), "reward"),
    "notebook, table": ("run.ipynb", notebook({"data": {"text/html": [TABLE]}}), "reward"),
    "notebook, table of Unsloth": (
        "run.ipynb",
        notebook({"data": {"text/html": [TABLE.replace(">reward<", ">rewards / right / mean<")]}}),
        "rewards / right / mean",
    ),
    "notebook, odd outputs": ("run.ipynb", notebook("x", None, {"data": {"text/html": [TABLE]}}), "reward"),
    "notebook, other cells": (
        "run.ipynb",
        notebook(
            printed("easy  step_reward=0.05  score=0.2\n" * 9),
            {"data": {"text/html": [TABLE.replace("<th>reward</th>", "").replace("<td>0.1</td>", "")]}},
            {"data": {"text/html": [TABLE]}},
        ),
        "reward",
    ),
    "JSON, an object of lists": (
        "history.json",
        json.dumps({"config": {"lr": [1e-6, 1e-7]}, "log": {"step": [1, 2, 3], "reward": [0.25, 0.5, 0.75]}}),
        "reward",
    ),
    "JSON, steps of a name": (
        "history.json",
        json.dumps({"train/reward": {"1": 0.25, "2": 0.5, "3": 0.75}, "train/loss": {"2": 0.1}}),
        "train/reward",
    ),
    "JSON, objects by step": ("history.json", json.dumps({step: {"reward": step / 4} for step in (1, 2, 3)}), "reward"),
    "trainer_state.json in one line": ("state.json", STATE, "reward"),
    "Markdown": (
        "run.md",
        "# Run\n| Step | **Reward** |\n|---|---|\n| 1 | 0.25 |\n| 2 | `0.5` |\n| 3 | 75% |\n",
        "Reward",
    ),
    "rich": (
        "run.log",
        "┏━━━━━━┳━━━━━━━━┓\n┃ Step ┃ Reward ┃\n┡━━━━━━╇━━━━━━━━┩\n"
        "│ 1    │ 0.25   │\n│ 2    │ 0.5    │\n│ 3    │ 0.75   │\n",
        "Reward",
    ),
    "aligned columns": ("run.txt", "hello\n   Step  Reward\n0    1    0.25\n1    2    0.5\n2    3    0.75\n", "Reward"),
    "a box a step": (
        "run.log",
        many(
            "20251126-15:13:01.907 StatsLogger INFO: Epoch 2/5 Step 1/9 Train step {0}/45 done.\n"
            "╒═══╤═══╕\n│ rollout/reward │ {1:.4e} │ x/y │ 2.0e+00 │\n╘═══╧═══╛\n"
        ),
        "rollout/reward",
    ),
    "columns of single words": (
        "run.txt",
        " Step Reward_pct   Loss\n    1 25% -1.5\n    2 50% 128.00\n    3 75%    0.0\n",
        "Reward_pct",
    ),
    "names before numbers, in a list": (
        "run.log",
        many("Iter {0}: Train loss 0.013, Total rewards mean {1}, KL 0.001, Learning Rate 1.000e-05, It/sec 0.161\n"),
        "Total rewards mean",
    ),
    "a heading with other names": (
        "run.log",
        many("epoch: 0|step: {0}|ep: 1|act: -0.2\naverage reward score: {1}\n"),
        "average reward score",
    ),
    "a metric below a line with others (DeepSpeed-Chat)": (
        "run.log",
        many("[Rank 0] step={0}, skipped=0\nstep: {0}|act_loss: 0.3\naverage reward score: {1}\n----\n"),
        "average reward score",
    ),
    "a metric above a line that comes again": (
        "run.log",
        many(
            "[MEM][after step] alloc=4.0 GB\nPercentage of correct examples:  {1}\n"
            "GRPO Iteration:  {0} Epoch:  0 Microbatch:  0 / 2\n[MEM][forward] alloc=3.0 GB\n"
            "GRPO Iteration:  {0} Epoch:  0 Microbatch:  1 / 2\n"
        ),
        "Percentage of correct examples",
    ),
    "metrics below a line that comes again": (
        "run.log",
        many("Epoch 2/5 step 1/9 (global step {0}) finishes.\nworker: 3.0s\n", first=0, values=(1,))
        + many("Epoch 2/5 step 1/9 (global step {0}) finishes.\nworker: 3.0s\nreward: {1}\n"),
        "reward",
    ),
    "a banner with other words (torchforge)": (
        "run.log",
        many(
            "Backend: Logged 70 metrics at step {0}\n=== [global_reduce] - METRICS STEP {0} ===\n  episode/x: 16.0\n"
            "  reward/evaluate_response/avg_total_reward: {1}\n"
        ),
        "reward/evaluate_response/avg_total_reward",
    ),
    "a column a step": (
        "run.txt",
        "Metric   step 1   step 2   step 3\nreward   0.25     0.5      75%\nKL       0.1      -        0.3\n",
        "reward",
    ),
    "a list with back-ticks": (
        "run.md",
        many("# Step {0} summary\n\n- Rollout reward: `{1}` over 128 answers\n- Entropy: `~0.5`\n"),
        "Rollout reward",
    ),
    "a dictionary over several lines": (
        "run.log",
        many("{{'loss': 0.1, 'grad_norm': 0.5, \n'reward': {1}, \n'epoch': {0}.0}}\n\n"),
        "reward",
    ),
    "a reward by its words": (
        "run.jsonl",
        many('{{"step": {0}, "train_avg_reward": {1}, "val_avg_reward": 0.1, "reward_max": 1.0}}\n'),
        "train_avg_reward",
    ),
    "YAML below a step (EasyR1)": (
        "run.log",
        many(
            "(Runner pid=7) Step {0}\n(Runner pid=7) actor:\n(Runner pid=7)   entropy_loss: 0.5\n"
            "(Runner pid=7) critic:\n(Runner pid=7)   advantages:\n(Runner pid=7)     max: 1.5\n"
            "(Runner pid=7)   score:\n(Runner pid=7)     max: 1.0\n(Runner pid=7)     mean: {1}\n"
            "(Runner pid=7) response_length:\n(Runner pid=7)   mean: 300.0\n"
        ),
        "critic/score/mean",
    ),
    "a box of name=number (RLinf)": (
        "run.log",
        many(
            "╭───╮\n│ Global Step:   {0}/1000 │ Progress: ░░░ │   2.4% │\n│ Elapsed: 05:15:35 │ Step Time: 788.9s │\n"
            "├─ Training ─┤\n│actor/run_training=413.3    │actor/grad_norm=0.31     │env/success_once={1}   │\n╰───╯\n"
        ),
        "env/success_once",
    ),
    "a fraction for the step": (
        "run.log",
        many("[run_8B] seed=1 lr=3e-5\n[run_8B]   {0}/3 | loss=3.1 | reward={1}\n"),
        "reward",
    ),
    "names before numbers": ("run.log", many("12:00:00 SUCCESS Step {0} | 2.5s | Reward {1} | Error 0%\n"), "Reward"),
    "OpenRLHF": ("run.log", many("INFO ppo.py:7] Global step {0}: {{'reward': {1}, 'kl': 0.1}}\n"), "reward"),
    "JSON in a log": ("run.log", many('[12:00] {{"step": {0}, "a": {{"b": 1}}, "reward": {1}, "kl": 0}}\n'), "reward"),
    "flat JSON lines": ("run.log", many('{{"step": {0}, "reward": {1}}}\n').rstrip(), "reward"),
    "nested JSON lines": ("run.jsonl", many('{{"iteration": {0}, "train": {{"reward": {1}}}}}\n'), "train/reward"),
    "colours": (
        "run.log",
        many("\x1b[3{0}mstep\x1b[0m: {0} | \x1b[32mreward\x1b[0m: \x1b[1m{1}\x1b[0m\n"),
        "reward",
    ),
    "a config before JSON lines": (
        "run.jsonl",
        '{"event": "config", "lr": 1e-06, "steps": 9}\n' + many('{{"event": "step", "step": {0}, "reward": {1}}}\n'),
        "reward",
    ),
    "decimal commas": ("run.csv", "Step;reward\n1;0,25\n2;0,5\n3;0,75\n", "reward"),
    "TSV": ("run.tsv", "step\treward\n1\t0.25\n2\t0.5\n3\t0.75\n", "reward"),
    "CSV without its ending": ("table.txt", "global_step,reward\n1,0.25\n2,0.5\n3,0.75\n", "reward"),
}  # fmt: skip


def log(tmp_path, text: str, name: str = "run.log"):
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(("name", "text", "reward"), SAMPLES.values(), ids=SAMPLES)
def test_each_form_is_read_as_it_is(tmp_path, name, text, reward):
    run = read_run(log(tmp_path, text, name))
    assert values(run, reward) == {1: 0.25, 2: 0.5, 3: 0.75}
    assert run.events == ()


@pytest.mark.parametrize(("name", "text", "reward"), SAMPLES.values(), ids=SAMPLES)
def test_a_folder_with_one_log_stands_for_it(tmp_path, name, text, reward):
    if name in ("history.json", "state.json", "run.md", "table.txt") or (name == "run.log" and text.startswith('{"')):
        pytest.skip("only a file of a telling name is looked into")
    (tmp_path / "README.txt").write_text("nothing here\n")
    log(tmp_path, text, name)
    assert values(read_run(tmp_path), reward)[3] == 0.75


LONG = {"critic/score/mean": 0.25, "actor/entropy": 0.5, "actor/grad_norm": 1.5, "response_length/mean": 120.0}
WIDE = {
    "verl": lambda step: (
        f"(TaskRunner pid=12) step:{step} - " + " - ".join(f"{k}:{v + step * 0.5**step}" for k, v in LONG.items())
    ),
    "a dictionary": lambda step: str(
        {"step": step, **{name: value + step * 0.5**step for name, value in LONG.items()}}
    ),
}


def cut(line: str, width: int) -> list[str]:
    return [line[i : i + width].rstrip("\n") for i in range(0, len(line) - 1, width)]


def filled(line: str, width: int) -> list[str]:
    return [each.ljust(width) for each in cut(line, width)]


def wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


@pytest.mark.parametrize("width", [50, 80, 97])
@pytest.mark.parametrize("form", WIDE)
@pytest.mark.parametrize("pasted", [cut, filled, wrapped])
def test_lines_that_were_cut_or_wrapped_are_read_as_they_were_printed(tmp_path, form, width, pasted):
    lines = ["starting\n", *(WIDE[form](step) + "\n" for step in range(1, 9))]
    whole = read_run(log(tmp_path, "".join(lines)))
    pieces = [piece for line in lines for piece in pasted(line, width)]
    read = read_run(file := log(tmp_path, "\n".join(pieces), "cut.log"))
    assert whole.metrics.keys() == read.metrics.keys() and len(whole.metrics) >= len(LONG)
    assert all(np.array_equal(whole.metrics[name].values, read.metrics[name].values) for name in whole.metrics)
    assert read.sources == (file,) and read.name == "cut"
    assert pasted is wrapped or any("characters go on" in note for note in read.notes), "also lines below a heading"


@pytest.mark.parametrize("pasted", [cut, filled, wrapped])
def test_the_end_of_a_text_that_was_cut_or_wrapped(tmp_path, pasted):
    lines = [
        f"[rank{rank}]:[E4 10:42:28.85 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=44, OpType=ALLREDUCE, NumelIn=71552, NumelOut=572416, Timeout(ms)=600000) ran for "
        "600013 milliseconds before timing out.\n"
        for rank in range(4)
    ]
    (event,) = read_run(log(tmp_path, "\n".join(piece for line in lines for piece in pasted(line, 100)))).events
    assert "ranks 0, 1, 2, 3 in ALLREDUCE 44, for 600 s" in event.reason


def test_lines_that_are_equally_long_by_chance_stay_as_they_are(tmp_path):
    lines = [f"step:{step} - critic/score/mean:{step / 100:.2f} - actor/entropy:0.50\n" for step in range(10, 60)]
    run = read_run(log(tmp_path, f"{'=' * 52}\n".join(lines)))
    assert len(run.steps) == 50 and not any("characters" in note for note in run.notes)


W_AND_B = """wandb: Run history:
wandb:   actor/entropy █▆▄▂▁
wandb: Run summary:
wandb:         actor/entropy 0.0132
wandb:       actor/grad_norm 1,812.5
wandb:  training/global_step 420
"""
LISTED = "Hello,\n> actor/entropy: 0.0132\n> actor/grad_norm: 1812.5\nand a score of 3\n"
ONE_LINE = "step: 420, entropy: 0.0132, grad_norm: 1812.5\n"
ONE_COLUMN = "| Metric | Step 420 |\n|---|---|\n| actor/entropy | 0.0132 |\n| actor/grad_norm | 1812.5 |\n"
SAMPLED = "actor/entropy: 0.0132\n" + "".join(f"reward: {each}\n" for each in (0, 1)) + "actor/grad_norm: 1812.5\n"


@pytest.mark.parametrize(
    ("text", "step"), [(W_AND_B, 420), (LISTED, None), (ONE_LINE, 420), (ONE_COLUMN, 420), (SAMPLED, None)]
)
def test_figures_without_a_course_are_one_reading(text, step, tmp_path):
    run = read_run(log(tmp_path, text))
    found = {name: series for name in ("actor/entropy", "actor/grad_norm") if (series := run.get(name)) is not None}
    assert {name: series.values.tolist() for name, series in found.items()} == {
        "actor/entropy": [0.0132],
        "actor/grad_norm": [1812.5],
    }
    assert run.get("critic/rewards/mean") is None, "of samples there are many"
    assert ("names no step" in " ".join(run.notes)) == (step is None)
    assert run.steps.tolist() == [step] if step else run.steps[0] > 3, "no finding takes them for the first steps'"


def test_an_empty_tensor_is_no_number(tmp_path):
    text = "".join(f"Step {step} | rewards: tensor([]) | entropy: 0.5\n" for step in (1, 2, 3))
    run = read_run(log(tmp_path, text))
    assert run.steps.tolist() == [1, 2, 3] and not any("reward" in name for name in run.readings.every_name())


@pytest.mark.parametrize("said", ["WARN: rank 0 grad_norm is not finite: nan", "the grad_norm is NaN"])
def test_a_number_that_is_said_to_be_none_is_one(said, tmp_path):
    series = read_run(log(tmp_path, f"{said}\n")).logged("actor/grad_norm")
    assert series is not None and np.isnan(series.values).all()


@pytest.mark.parametrize(
    "text", ["", "a score of 3\n", "lr: 1e-6\n", "Metric  step 1\nlr  0.1\n", "reward: 1\nreward: 0\n"]
)
def test_text_without_figures_is_refused_or_empty(text, tmp_path):
    with pytest.raises(ReportError):
        read_run(log(tmp_path, text))


def test_every_format_has_a_sample(tmp_path):
    assert {detect_format(log(tmp_path, text, name)) for name, text, _ in SAMPLES.values()} - {None} == set(FORMATS)


def test_the_help_lists_every_form(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(title in said for title, _, _ in form_rows())


def test_verls_numbers_in_all_their_forms(tmp_path):
    text = (
        "\x1b[36m(TaskRunner pid=12)\x1b[0m step:4 - a:np.float64(0.5) - b:nan - c:-inf - d:tensor(2.5) - "
        "actor/lr(1e-4):0.010 - e:1e-05 - f:True - val-core/x:y/acc/mean@1:0.25 - training/global_step:4\n"
    )
    found = {name: series.values[0] for name, series in read_run(log(tmp_path, text)).metrics.items()}
    assert math.isnan(found.pop("b"))
    assert found == {
        **{"a": 0.5, "c": -math.inf, "d": 2.5, "e": 1e-5, "training/global_step": 4},
        **{"actor/lr": pytest.approx(1e-6), "val-core/x:y/acc/mean@1": 0.25},
    }


def test_lines_of_several_processes_and_a_progress_bar(tmp_path):
    text = (
        "Training Progress:   1%|  | 1/99 [00:30<49:00]\r(TaskRunner pid=1) step:1 - x/a:1 - b:2\n"
        "(WorkerDict pid=2) step:9 of 10 is not a row - x/a:7\n"
        "(TaskRunner pid=1) step:2 - x/a:2 - b:3(WorkerDict pid=2) a warning\n"
        "(TaskRunner pid=1) step:3 - x/a:3 - b:4step:4 - x/a:4 - b:5\n"
        "(TaskRunner pid=1) step:5 - x/a:5 - b:6 [repeated 3x across cluster]\n"
        "training/global_step:8 - x/a:8\n"
    )
    run = read_run(log(tmp_path, text))
    assert values(run, "x/a") == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert values(run, "b")[2] == 3 and values(run, "b")[5] == 6


def test_a_cut_line_keeps_its_whole_numbers_only(tmp_path):
    run = read_run(log(tmp_path, many(VERL) + "step:4 - x/a:0.5 - actor/lr:1e-0"))
    assert run.steps[-1] == 4 and values(run, "x/a") == {4: 0.5}
    assert 4 not in values(run, "actor/lr"), "1e-06 was cut to 1e-0"


@pytest.mark.parametrize(("second", "steps"), [(3, [1, 2, 3, 4]), (1, [1, 2])], ids=["resumed", "from the start"])
def test_a_job_that_was_started_again_in_the_same_file(tmp_path, second, steps):
    begun = many(VERL, (0.1, 0.2, 0.3)) + "RuntimeError: NCCL error\nslurmstepd: requeue\n"
    file = log(tmp_path, begun + many(VERL, (0.5, 0.6), first=second))
    assert read_run(file).steps.tolist() == steps
    first = read_run(file) if second == 3 else read_run(file, which=1)
    assert [(event.step, "NCCL" in event.reason) for event in first.events] == [(3, True)]
    assert second == 3 or read_run(file).events == (), "the end belongs to the run before"


def test_several_logs_of_one_run_in_any_order(tmp_path):
    first = log(tmp_path, many(VERL, (0.1, 0.2, 0.3)), "job-9.out")
    second = log(tmp_path, many(VERL, (0.4, 0.5), first=3), "job-10.out")
    for run in (read_run(second, more=[first]), read_run(tmp_path)):
        assert values(run, "critic/score/mean") == {1: 0.1, 2: 0.2, 3: 0.4, 4: 0.5}
    with pytest.raises(ReportError, match="not of one run"):
        read_run(first, more=[log(tmp_path, many(TRL), "other.log")])
    with pytest.raises(ReportError, match="only logs with rows of metrics are read together"):
        read_run(first, more=[write(tmp_path / "run.jsonl", train(1))])


ENDS = {
    "Traceback (most recent call last):\n  File \"x\"\ntorch.OutOfMemoryError: CUDA out of memory.\n": "torch.OutOfMem",
    "(WorkerDict pid=3) ValueError: bad\nray.exceptions.ActorDiedError: The actor died\n": "ValueError: bad",
    "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***\n": "Slurm's time limit",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n": "OOM killer",
    "kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a\n": "OOM killer",
    "srun: error: node1: task 0: Killed\n": "SIGKILL",
    "run.sh: line 12:  4711 Killed                  python -m verl\n": "SIGKILL",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n": "Ray's memory monitor",
    "Fatal Python error: Segmentation fault\n": "segmentation fault",
    "command terminated with exit code 137": "137",
    "[rank0]: Traceback (most recent call last):\n[rank0]: KeyboardInterrupt\n": "its user (KeyboardInterrupt)",
    "trainer-1 exited with code 130\n": "its user (SIGINT) (exit code 130)",
    "[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 'x'\n" + "[rank0]: more\n" * 9: "KeyError: 'x'",
    "2026-01-01 00:00:00,123 ERROR: RuntimeError: bad\n": "RuntimeError: bad",
    "[rank3]:[E1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout: WorkNCCL\n": "NCCL",
    "    exitcode  : -9 (pid: 7)\n": "(SIGKILL)",
    "2025-11-26T18:13:33.123Z stderr F Traceback (most recent call last):\n"
    "2025-11-26T18:13:33.123Z stderr F KeyError: 'zone'\n": "'zone'",
    "Nov 26 18:13:33 node python3[42]: Traceback (most recent call last):\n"
    "Nov 26 18:13:33 node python3[42]: KeyError: 'syslog'\n": "'syslog'",
    "trainer-1  | Traceback (most recent call last):\ntrainer-1  | KeyError: 'compose'\n": "'compose'",
    "1732644813.1 Traceback (most recent call last):\n1732644813.1 KeyError: 'epoch'\n": "'epoch'",
    "Traceback (most recent call last):\nKeyError: 'first'\n\nDuring handling of the above exception, another "
    "exception occurred:\n\nTraceback (most recent call last):\nRuntimeError: second\n": "'first'",
    "Traceback (most recent call last):\nray.exceptions.RayTaskError(KeyError): ray::run()\n  File 'x'\n"
    "KeyError: 'inner'\n": "KeyError: 'inner'",
    "Traceback (most recent call last):\nRuntimeError: [enforce fail] . unexpected pos 7 vs 5\n": "unexpected pos",
    "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n": "No space left",
    "run.sh: line 107: 834172 Aborted                 (core dumped) python3 x\n": "an abort",
    "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: bad\n": "CUDA error: bad",
    "    exitcode  : -6 (pid: 7)\n": "SIGABRT",
    "trainer-1 exited with code 137\n": "exit code 137",
    "The node was low on resource: memory. Threshold\n": "evicted the pod for lack of memory",
    "=>> PBS: job killed: walltime 3600 exceeded limit 3500\n": "PBS's limit of walltime",
    "TERM_RUNLIMIT: job killed after reaching LSF run time limit.\n": "LSF",
    "Traceback (most recent call last):\nValueError: driver\n"
    + "(W pid=7) Loading:  50%|#  | 1/2 [00:05<00:05, 5.0s/it]\n" * 4: "driver",
    "Traceback (most recent call last):\nValueError: old\n" + "wandb: a summary, or the next command\n" * 30
    + "Traceback (most recent call last):\nKeyError: 'no checkpoint'\n": "ValueError: old",
    "Training Progress: 100%|##| 3/3 [00:09<00:00]\nTraceback (most recent call last):\nOSError: full\n": "full",
    "Traceback (most recent call last):\n  File \"x.py\", line 3, in go\nException: no 7\n" + "more\n" * 9: "no 7",
    "Traceback (most recent call last):\n  File \"x.py\", line 3, in go\nhttpx.ReadTimeout\n" + "more\n": "ReadTime",
    "Traceback (most recent call last):\n  File \"x.py\", line 3, in go\n    here(\n": "in x.py, line 3, in go",
    "ERROR Fatal error in orchestrate\n": "Fatal error in orchestrate",
    "torch.OutOfMemoryError: CUDA out of memory.\n" + "wandb: a summary\nmore\n" * 9: "CUDA out of memory",
    "(Actor pid=3) CUDA Error: out of memory at /csrc/cumem_allocator.cpp:62\nRuntimeError: CUDA Error: o\n": "out of",
    "Train:  7%|# | 2/9 [0:1<0:1, 7.5s/it]x.cu:112: _assert_async_cuda_kernel: block: [0,0,0] Assertion `probability "
    "tensor contains either `inf`, `nan` or element < 0` failed.\n" + "more\n" * 9: "by x.cu:112",
    "SyncRPCServer ERROR: Engine method 'compute_logp' failed: HCCL function error\n": "compute_logp",
    "KeyError: 'before W&B'\n" + "wandb: a summary\n" * 20: "before W&B",
    "[c10d] The client socket has timed out after 300000ms while trying to connect to (0.0.0.0, 1)\n": "client so",
    "[0] ibvwrap.c:160 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out\n": "ibv_modify_qp",
    "[rank6]:[E429 13:55:49.3 ProcessGroupNCCL.cpp:1743] [PG ID 0 Rank 6] ProcessGroupNCCL's watchdog got stuck for "
    "480 seconds without making progress\n": "NCCL (the watchdog)",
    "Traceback (most recent call last):\n  File \"x.py\", line 3, in update_actor\n  File \"y.py\", line 4, in "
    "compute_log_prob\nKeyError: 'old'\n": "in the update by KeyError",
    "ray.exceptions.RayTaskError(TimeoutError): ray::RolloutManager.generate() (pid=2)\n": "in the rollout by",
    "ray.exceptions.RayTaskError(IndexError): ray::Runner.run() (pid=7, ip=1.2.3.4)\n  File \"x.py\", line 3, in fit\n"
    "ray.exceptions.RayTaskError(IndexError): ray::Worker.compute_log_probs() (pid=8)\n  File \"y.py\", line 5, in g\n":
    "in the log-probs by ray.exceptions.RayTaskError(IndexError): ray::Worker.compute_log_probs()",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: Critic\n"
    "\tactor_id: 66\nThe actor is dead because its node has died. Node Id: 5\n": "ActorDiedError: Critic: its node "
    "has died",
    "  File \"x.py\", line 3, in update_actor\n    here()\nmy.Odd: 9\n" + "more\n" * 9: "in the update by my.Odd: 9",
    "  File \"x.py\", line 3, in update_actor\n    here()\n": "in the update by a traceback whose last",
    "Traceback (most recent call last):\n  File \"a/b.py\", line 9, in go\n    assert x\nAssertionError\n": "by "
    "AssertionError, in a/b.py, line 9, in go",
    "".join(
        f"[rank{rank}]:[E4 10:42:28.85 ProcessGroupNCCL.cpp:6] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={number}, OpType=ALLTOALL, Timeout(ms)=600000) ran for 600013 milliseconds\n"
        for rank, number in ((7, 44), (3, 44), (0, 90), (0, 91))
    ): "NCCL (the watchdog): ranks 3, 7 in ALLTOALL 44; rank 0 in ALLTOALL 90, for 600 s",
    "torch.OutOfMemoryError: CUDA out of memory. Tried\n(main pid=3) Unhandled error: ray::Worker.generate() (pid=4)\n"
    "(main pid=3)   File \"base.py\", line 9, in func\n": "in the rollout by torch.OutOf",
    "torch.OutOfMemoryError: CUDA out of memory. Tried\nwhile running Actor's function sync_model_to_rollout: "
    "exception is X\n": "in the weight sync by torch.OutOf",
    "(raylet) node_manager.cc:3069: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed\n"
    "Traceback (most recent call last):\n  File \"x.py\", line 3, in go\n" + "    here(\n" * 9:
    "by Ray's memory monitor",
    "(raylet) A worker died or was killed while executing a task by an unexpected system error.\n"
    + "Traceback (most recent call last):\n  File \"x.py\", line 3, in go\n" + "    here(\n" * 9:
    "by a worker of Ray that died or was killed without a word, before a traceback whose last line is missing, in x.py",
    "ERROR the server failed to bind its port\nTraceback (most recent call last):\n  File \"x.py\", line 3, in go\n":
    "by the server failed to bind its port, before a traceback",
    "INFO: 2 requests failed\nTraceback (most recent call last):\n  File \"x.py\", line 3, in go\n": "by a traceback",
    "/aten/Indexing.cu:1: indexSelect: block: [2,0,0], thread: [3,0,0] Assertion `a < b` failed.\n" + "more\n" * 9:
    "by /aten",
    "Generating:  2%|# | 3/18 [8:3<1:4, 41.1s/it]Traceback (most recent call last):\n  File \"x.py\", line 3, in get\n"
    "_queue.Empty\n\nDuring handling of the above exception, another exception occurred:\n\n"
    "Traceback (most recent call last):\nRuntimeError: no results.\n": "in the rollout by RuntimeError: no results, af",
    "RuntimeError: Failed to import x because of the following error:\n/x.so: undefined symbol: y\n": "error: /x.so: u",
    "(LLMRayActor pid=3) CUDA Error: out of memory\n": "in the rollout by CUDA",
    "INFO:  1.2.3.4 - \"POST /update_named_param/ HTTP/1.1\" 200 OK\nKeyError: 'a'\n": "in the weight sync by KeyError",
    "已杀死\n": "a kill (SIGKILL)",
    "x.sh: Zeile 3: 47 Speicherzugriffsfehler\nSpeicherzugriffsfehler\n": "a segmentation fault",
    "torch.OutOfMemoryError: CUDA out of memory. Tried\n[rank0]: Traceback (most recent call last):\n"
    "[rank0]:   File \"t.py\", line 3, in training_step\n": "in the update by torch.OutOf",
}  # fmt: skip


@pytest.mark.parametrize(("text", "by"), ENDS.items(), ids=list(ENDS.values()))
def test_the_error_that_ended_a_run_is_an_event_at_its_step(tmp_path, text, by):
    (event,) = read_run(log(tmp_path, many(VERL) + text)).events
    assert (event.step, event.rule) == (3, "ended") and by in event.reason


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: an answer could not be parsed\n" + many(VERL, first=4),  # training went on
        "(TaskRunner pid=1) Final validation metrics: {'val-core/a': 0.5}\nConnectionError: at exit\n",
        "UserWarning: RuntimeError is likely\n",
        "- memory: OOM / OOM-kill: `0 / 0`, OOMKilled: 0\n",
        "the answer: RuntimeError: is what students write\n",
        "In the story: Killed the king\nKilled by the dragon, he\n",
        "ValueError: an answer could not be parsed\n" + "more text\n" * 9,
        "Traceback (most recent call last):\nValueError: a tool\nretrying\n"
        + " 9%|# | 5/50 [00:09<00:00, 3.0s/it]\n" * 3,
        "Final validation metrics: {}\nException ignored in: <function x>\nTraceback (most recent call last):\n"
        "AttributeError: 'NoneType'\n",
        "(R pid=7) Traceback (most recent call last):\n(R pid=7) ValueError: an answer\n(R pid=7) the next sample\n",
        'Traceback (most recent call last):\n  File "x.py", line 3, in go\n' + "other lines\n" * 3,  # it goes on
        'Traceback (most recent call last):\n  File "x.py", line 3, in go\nAnswer: wrong index\n' + "text\n" * 9,
        "[c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99), and tries again\n",
    ],
)
def test_what_is_no_end(tmp_path, text):
    assert read_run(log(tmp_path, many(VERL) + text)).events == ()


def test_the_phase_is_of_the_error_that_ended_the_run(tmp_path):
    handled = 'Traceback (most recent call last):\n  File "x.py", line 3, in compute_score\nValueError: an answer\n'
    killed = "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***\n"
    (event,) = read_run(log(tmp_path, many(VERL) + handled + "text\n" * 9 + killed)).events
    assert event.reason.startswith("ended at step 3 by Slurm's time limit")
    other = 'Traceback (most recent call last):\n  File "x.py", line 3, in update_actor\nKeyError: 1\n'
    (event,) = read_run(log(tmp_path, many(VERL) + other, "other.log")).events
    assert "in the update by KeyError" in event.reason


def test_long_lines_behind_the_last_row_are_looked_at_in_part(tmp_path):
    """Takes hours with patterns whose time grows with the square of a line."""
    for part in ("x", " ", "error ", "a/b.", "NCCL WARN "):
        assert read_run(log(tmp_path, f"{many(VERL)}Error {part * 300_000}\n")).events == ()
    assert read_run(log(tmp_path, many(VERL) + "\n" * 300_000)).events == ()


def test_rows_of_evaluations_are_not_counted(tmp_path):
    rows = [TRL.format(step, 0.5) + "{'eval_loss': 0.5, 'eval_reward': 0.1}\n" * (step % 5 == 0) for step in range(50)]
    run = read_run(log(tmp_path, " 2%|# | 10/500 [0:1<0:1, 1s/it]\n" + "".join(rows)))
    assert run.steps[-1] == 500 and len(values(run, "reward")) == 50


HANDLED = "Traceback (most recent call last):\nValueError: answer {} could not be parsed: {}\n"


def test_an_error_that_the_run_went_on_with_twice_is_not_its_end(tmp_path):
    rows = [HANDLED.format(step, "xyz"[step]) + many(VERL, (0.1,), first=step) for step in (0, 1, 2)]
    end = HANDLED.format(99, "abc")
    assert read_run(log(tmp_path, "".join(rows) + end)).events == ()
    (event,) = read_run(log(tmp_path, rows[0] + many(VERL, first=1) + end, "once.log")).events
    assert "could not be parsed: abc" in event.reason, "one step followed it: it may have been a restart"
    memory = [HANDLED.format(step, "x").replace("ValueError", "torch.OutOfMemoryError") for step in (0, 1, 2)]
    died = "".join(each + many(VERL, (0.1,), first=step) for step, each in enumerate(memory)) + memory[0]
    assert read_run(log(tmp_path, died, "memory.log")).events, "no process goes on without memory"
    resumed = [row.replace("step:", "Resuming from a checkpoint\nstep:") for row in rows]
    assert read_run(log(tmp_path, "".join(resumed) + end, "resumed.log")).events, "each died of it, and was resumed"
    other = "Traceback (most recent call last):\nKeyError: 'a'\n"
    (event,) = read_run(log(tmp_path, "".join(rows) + other + end, "other.log")).events
    assert "KeyError: 'a'" in event.reason


WORKER = (
    '(W pid={0}) Traceback (most recent call last):\n(W pid={0})   File "w.py", line {1}, in parse\n(W pid={0}) '
    "ValueError: answer {1} could not be parsed\n"
)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ((WORKER.format(7, 1) + "(W pid=7) next\n") * 3 + WORKER.format(7, 1) + WORKER.format(8, 1), False),
        ((WORKER.format(7, 1) + "(W pid=7) next\n") * 3 + WORKER.format(8, 1).rpartition("(W pid=8)")[0], False),
        ((WORKER.format(7, 1) + "(W pid=7) next\n") * 3 + WORKER.format(8, 2).rpartition("(W pid=8)")[0], True),
        ("".join(WORKER.format(pid, 1) + f"(W pid={pid}) at exit\n" for pid in (7, 8)) + WORKER.format(9, 1), True),
        ((WORKER.format(7, 1) + "(W pid=7) next\n") * 3 + WORKER.format(7, 1).replace("(W pid=7) ", ""), True),
    ],
    ids=["again", "Ray printed its last line for another", "elsewhere", "each once", "the driver too"],
)
def test_an_error_that_a_worker_went_on_with_twice_is_not_its_end(tmp_path, text, ends):
    assert bool(read_run(log(tmp_path, many(VERL) + text)).events) == ends


def test_slimes_rollouts_belong_to_the_first_step_on_them(tmp_path):
    lines = []
    for rollout in range(3):
        lines.append(f"x - rollout {rollout}: {{'rollout/raw_reward': {rollout}.5, 'rollout/truncated': 0.0}}\n")
        lines += [f"x - step {2 * rollout + i}: {{'train/loss': {2 * rollout + i}}}\n" for i in (0, 1)]
    run = read_run(log(tmp_path, "".join(lines)))
    assert values(run, "rollout/raw_reward") == {0: 0.5, 2: 1.5, 4: 2.5}
    assert list(values(run, "train/loss")) == list(range(6))


def test_nothing_in_a_log_is_evaluated(tmp_path):
    harm = "{'loss': __import__('os').system('touch " + str(tmp_path / "harm") + "'), 'reward': 0.5}\n"
    read_run(log(tmp_path, many(TRL) + harm))
    assert not (tmp_path / "harm").exists()


def test_a_growing_log_is_followed(tmp_path):
    file = log(tmp_path, many(VERL))
    reader = Reader(file)
    assert reader.refresh().steps[-1] == 3 and reader.refresh() is reader.refresh()
    with file.open("a") as more:
        more.write(VERL.format(4, 0.5)[:40])
    assert reader.refresh().steps[-1] == 4
    with file.open("a") as more:
        more.write(VERL.format(4, 0.5)[40:])
    assert values(reader.refresh(), "critic/score/mean")[4] == 0.5
    file.write_text(many(VERL, (0.7, 0.8)))
    assert values(reader.refresh(), "critic/score/mean") == {1: 0.7, 2: 0.8}, "it was replaced"


def test_counted_rows_are_counted_once(tmp_path):
    file = log(tmp_path, many(TRL).rstrip())
    reader = Reader(file)
    assert reader.refresh().steps[-1] == 3
    with file.open("a") as more:
        more.write("\n" + TRL.format(4, 0.5))
    assert reader.refresh().steps.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "before",
    [
        "args: logging_steps=10\n",
        "Loading:  50%|# | 7/9 [0:1<0:1]\n 2%|# | 10/500 [0:1<0:1, 1s/it]\n",
        "Loading: 50% 7/9 [0:1<0:1]\n  2% 10/500 [0:1<0:1, 1s/it]\n",  # in a shell of Colab
    ],
)
def test_the_log_shows_how_many_steps_a_row_of_trl_has(tmp_path, before):
    run = read_run(log(tmp_path, before + many(TRL)))
    assert values(run, "reward") == {10: 0.25, 20: 0.5, 30: 0.75} and "10 steps a row" in run.notes[0]


OTHERS = "config: {'lr': 0.1, 'seed': 3}\nWORLD INFO: {'localhost': 2}\n{'train_runtime': 9.0, 'train_loss': 0.5}\n"
BETWEEN = "{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.25}\n", "{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.5}\n"
READ = {  # text, name, its values by step
    "its brace was not copied": ("'loss': 0.5, 'reward': 0.25, 'kl': 0.1, 'epoch': 0.0}\n", "reward", {1: 0.25}),
    "cut in the middle": (
        '{"step": 24, ... "env/all/reward/total": -0.5, "env/all/format": 0.0, }\n',
        "env/all/reward/total",
        {24: -0.5},
    ),
    "steps in words, and a name in a code span": (
        "| Phase | Typical `gen_kl_error` | Max `reward` |\n|---|---|---|\n| Steps 1\u201320 (early) | ~0.45 | 1 |\n"
        "| Steps 21\u201362 (late) | ~0.25 | 1 |\n",
        "gen_kl_error",
        {20: 0.45, 62: 0.25},
    ),
    "a step's name with more in its header": (
        "| train_step x | reward |\n|---|---|\n| 1-10 | 0.5 |\n",
        "reward",
        {10: 0.5},
    ),
    "whole numbers at equal distances": (
        "| at | reward |\n|---|---|\n" + many("| {0} | {1} |\n", (0.1, 0.2, 0.3, 0.4, 0.5)),
        "reward",
        {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5},
    ),
    "a table below a heading for a validation": (
        "## val accuracy (test_freq=25)\n| step | accuracy |\n|---|---|\n| 0 (start) | 77% |\n| 25 | **80%** |\n",
        "validation/accuracy",
        {0: 0.77, 25: 0.8},
    ),
    "a table whose last cells are torn": (
        "| step | reward | kl |\n|---|---|---|\n| 1 | 0.25 | 0.1 |\n| 2 | 0.5 | 0.",
        "kl",
        {1: 0.1},
    ),
    "two tables of one run": (
        "| step | reward |\n|---|---|\n| 1 | 0.25 |\n| 2 | 0.5 |\n\n"
        "| step | kl |\n|---|---|\n| 1 | 0.1 |\n| 2 | 0.2 |\n",
        "reward",
        {1: 0.25, 2: 0.5},
    ),
    "only a torn row": (
        '{"loss": 0.5, "reward": 0.25, "kl": 0.1, "x/y": 0.5, "le\nngth": 3.0, "entropy": 0.',
        "kl",
        {1: 0.1},
    ),
    "torn before a number": ("{'loss': 0.5, 'reward': 0.25, 'kl': 0.1", "reward", {1: 0.25}),
    "a table of one row": ("| step | reward |\n|---|---|\n| 7 | 0.5 |\n", "reward", {7: 0.5}),
    "a table of ranges": (
        "| step | reward |\n|---|---|\n| Steps 1\u201320 (early) | ~0.5 |\n| 21-40 | 0.75 |\n",
        "reward",
        {20: 0.5, 40: 0.75},
    ),
    "a percentage is a share": (many("Step {0} | Reward: {1} | Entropy: 50%\n", (0, 1)), "Entropy", {1: 0.5, 2: 0.5}),
    "a log that begins in the middle of a line": ("ean:0.5 - x:1\n" + VERL.format(40, 0.5), "timing_s/step", {40: 2.5}),
    "a prompt that speaks of steps": (
        VERL.format(5, 0.5) + "(TaskRunner pid=1) step:1 - add the numbers. step:2 - multiply: 3\n",
        "critic/score/mean",
        {5: 0.5},
    ),
    "TRL that was started again counts from its epoch": (
        many(TRL, (0.1, 0.2, 0.3, 0.4)) + many(TRL, (0.8, 0.9), first=3),
        "reward",
        {1: 0.1, 2: 0.2, 3: 0.8, 4: 0.9},
    ),
    "a bar runs ahead of buffered rows": (
        " 50%|# | 2/3 [0:1<0:1, 1s/it]\n" + many(TRL),
        "reward",
        {1: 0.25, 2: 0.5, 3: 0.75},
    ),
    "dictionaries that are no metrics": (OTHERS + many(TRL) + OTHERS, "reward", {1: 0.25, 2: 0.5, 3: 0.75}),
    "an evaluation beside an update": (
        many("{{'reward': {1}, 'kl': 0.01, 'eval_reward': 0.9}}\n", (0.1, 0.2)),
        "reward",
        {1: 0.1, 2: 0.2},
    ),
    "a printed sample between rows": (
        "{'total_score': 1.0, 'mean_accuracy': 0.0}\n".join(["", *BETWEEN]),
        "reward",
        {1: 0.25, 2: 0.5},
    ),
    "a printed config between rows": (
        "{'learning_rate': 1e-6,\n 'reward': 1.0,\n 'kl': 0.04}\n".join(["", *BETWEEN]),
        "reward",
        {1: 0.25, 2: 0.5},
    ),
    "the step in front of a dictionary": (
        many("Iteration {0}/9 | {{'reward': {1}, 'kl': np.float64(0.5), 'ok': True}}\n", (0.1, 0.2), first=4),
        "kl",
        {4: 0.5, 5: 0.5},
    ),
    "the difference of two metrics": (
        many("x - rollout {0}: {{'rollout/log_probs': -0.5, 'rollout/rollout_log_probs': -0.25, 'a': {1}}}\n", (1, 2)),
        "vllm_kl/k1",
        {1: 0.25, 2: 0.25},
    ),
    "the ratio of two counts": (
        many('{{"step": {0}, "reward": 0.5, "groups_skipped": {1}, "groups_total": 8}}\n', (0, 1), first=0),
        "filter/zero_variance/dropped_trajectories",
        {0: 0, 1: 1 / 8},
    ),
}


@pytest.mark.parametrize(("text", "name", "found"), READ.values(), ids=READ)
def test_a_metric_is_read_at_its_steps(tmp_path, text, name, found):
    assert dict(read_run(log(tmp_path, text)).get(name).pairs()) == found


def test_bars_of_openrlhf_are_rows(tmp_path):
    """The mean of a bar that reached its end; it is printed again when it is closed."""
    bar = "Train epoch [1/1]: 50%|# | {0}/2 [0:1<0:2, 6.6s/it, pg=-0.1, rm={1}, glen=7.28e+3, kl=0, act_lr=5e-7]\r"
    text = "".join(bar.format(at, reward) for reward in (0.25, 0.5) for at in (1, 2, 2)) + bar.format(1, 9.0)
    text = "Episode [1/1]:  1%|# | 1/90 [0:9<9:9, 99.0s/it]\n" + text.replace(
        "1/2 [0:1<0:2, 6.6s/it, pg=-0.1", "1/2 [0:1<0:2, 6.6s/it, pg=-0.3"
    )
    run = read_run(log(tmp_path, f"{text}\n"))
    assert run.get("critic/score/mean").pairs() == [(1, 0.25), (2, 0.5)]
    assert run.get("actor/pg_loss").at(1) == pytest.approx(-0.2) and run.get("response_length/mean").at(2) == 7280


SAMPLED = (
    "===== Step {0}/9 =====\n🔥 Sample 1 | Reward: 1.0\nValidation Results:\n  • Accuracy: 0.3\n  • Avg Reward: 0.9\n"
    "Training Results:\n  • Avg Reward: {1}\n  • Mean Generation Length: 616.5\nTiming:\n  • Total step time: 4.7s\n"
)


def test_samples_and_validations_below_a_heading_are_not_the_run_s(tmp_path):
    run = read_run(log(tmp_path, many(SAMPLED)))
    assert run.get("critic/score/mean").pairs() == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.get("response_length/mean").at(3) == 616.5 and run.get("timing_s/step").at(1) == 4.7
    assert run.validations() and values(run, "validation/Accuracy")[2] == 0.3


@pytest.mark.parametrize("steps", [(1, 2, 3), (2, 3)], ids=["at every step", "not at the first"])
def test_rewards_of_samples_between_the_lines_that_have_the_step_are_not_the_run_s(tmp_path, steps):
    sampled = "The answer is 7.\nReward: 1.0\nThe answer is 9.\nReward: 0.0\n"
    text = "".join(f"Step {step} | Loss: 0.1\nEntropy: 0.5\n{sampled * (step in steps)}" for step in range(1, 5))
    run = read_run(log(tmp_path, text))
    assert run.get("critic/score/mean") is None and len(values(run, "Entropy")) == 4


def test_a_row_that_is_torn_is_counted_and_an_evaluation_is_one_as_a_whole(tmp_path):
    evaluation = "{'eval_loss': 0.5, 'eval_runtime': 9.0, 'completions/mean_length': 40.0}\n"
    torn = "{'loss': 0.1, 'grad_norm': 0.5,\n'reward': 0.7, 'comple\n"
    text = many(TRL) + torn + evaluation + many(TRL, (0.8,), first=4) + torn
    file = log(tmp_path, text.rstrip())
    reader = Reader(file)
    run = reader.refresh()
    assert values(run, "reward") == {1: 0.25, 2: 0.5, 3: 0.75, 4: 0.7, 5: 0.8, 6: 0.7}
    assert values(run, "eval_completions/mean_length") == {4: 40.0} and run.get("response_length/mean") is None
    assert [note for note in run.notes if note.endswith("the rest counts: 2")]
    with file.open("a") as more:
        more.write("tions/mean_length': 30.0}\n" + many(TRL, (0.9,), first=5))
    run = reader.refresh()
    assert run.get("response_length/mean").pairs() == [(6, 30.0)], "the rest of it was still to be written"
    assert values(run, "reward")[7] == 0.9 and [note for note in run.notes if note.endswith("the rest counts: 1")]


def test_the_error_of_the_cell_that_trained_ends_the_run(tmp_path):
    error = {"output_type": "error", "ename": "OutOfMemoryError", "evalue": "CUDA out of memory", "traceback": []}
    cell = {"cell_type": "code", "outputs": [{"data": {"text/html": [TABLE]}}, error]}
    other = {"cell_type": "code", "outputs": [error | {"ename": "NameError", "evalue": "name 'x' is not defined"}]}
    (event,) = read_run(log(tmp_path, json.dumps({"cells": [cell, other]}), "run.ipynb")).events
    assert event.step == 3 and "OutOfMemoryError: CUDA out of memory" in event.reason
    alone = {"cells": [cell | {"outputs": cell["outputs"][:1]}, other]}
    assert read_run(log(tmp_path, json.dumps(alone), "other.ipynb")).events == ()


def test_a_metric_that_may_matter_and_is_not_read_is_named_and_can_be_given_a_known_name(tmp_path, monkeypatch):
    own = {"my_kl": 0.1, "rollout/truncated_frac": 0.2, "staleness/mean": 4.0, "speed": 3, "time": 9}
    rows = "".join(json.dumps({"step": step, "reward": 0.5, **own}) + "\n" for step in (1, 2))
    file = log(tmp_path, rows, "run.jsonl")
    (note,) = read_run(file).notes
    assert "them: my_kl, rollout/truncated_frac, staleness/mean; " in note and "--name" in note
    monkeypatch.setitem(RULES, "mine", FindingRule("mine", "mine", ("staleness/mean",), (), (), lambda run: None))
    names = {"my_kl": "mismatch_kl", "nothing": "entropy", "rollout/truncated_frac": "answers/cut"}
    run = read_run(file, names=names)
    assert run.notes == ("--name: the run has no metric nothing",), "a finding reads the staleness"
    assert run.get("vllm_kl/k3").values.tolist() == [0.1, 0.1] and run.get("answers/cut") is not None
    assert "my_kl" not in run.metrics
    assert not read_run(file, names={"my_kl": "vllm_kl/k3"}).of_verl, "it has the name by --name"


def test_a_run_of_transformers_has_the_name_of_its_output_folder(tmp_path):
    state = json.dumps({"log_history": [{"step": step, "reward": 0.5} for step in (1, 2)]})
    for place in (tmp_path / "mine", tmp_path / "mine" / "checkpoint-2"):
        place.mkdir()
        (place / "trainer_state.json").write_text(state)
        assert read_run(place / "trainer_state.json").name == "mine"


def test_a_run_on_preferred_answers_is_named_and_its_kl_is_no_drift(tmp_path):
    line = "{{'loss': 0.4, 'rewards/chosen': 1.2, 'rewards/rejected': 0.3, 'logps/chosen': -20.0, 'kl': {1}}}\n"
    run = read_run(log(tmp_path, many(line)))
    assert run.get("actor/kl_loss") is None and values(run, "kl")[3] == 0.75
    assert [note for note in run.notes if "preferred and rejected" in note] and "not read" not in " ".join(run.notes)
    assert read_run(log(tmp_path, many(TRL.replace("'epoch'", "'kl': 0.1, 'epoch'")), "x.log")).get("actor/kl_loss")


def test_the_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(many(VERL).encode())))
    run = read_run("-")
    assert run.name == "standard input" and run.steps.tolist() == [1, 2, 3]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    with pytest.raises(ReportError, match=r"^the standard input: this is text"):
        read_run("-")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04rest", "a checkpoint of torch"),
        (b"\x1f\x8brest", "unpack it first"),
        (b"\x80\x04\x95", "a pickle, which is not opened"),
        (b"\x00\x01\x02", "a binary file"),
        (b'{"a": 1}', "this is JSON"),
        (b'{"cells": [{"cell_type": "code"}]}', "a notebook, and no table and no line in it has metrics"),
        (b"name,score,team\nx,1,2\n", "no column is the step"),
        (b"hello\nworld\n", "no line has a step"),
        (b"".join(b"****** trajectory idx=%d, reward=0.3 ******\n" % n for n in range(9)), "no line has a step"),
        (b"".join(b"Time: 2.%ds | Total Reward: 0.5 | Answers: 3\n" % n for n in range(9)), "no line has a step"),
        (b"lr: 0.1\nreward: 0.5\nreward: 0.6\n", "no line has a step .*: lr, reward"),
        (b"| seed | reward |\n|---|---|\n| 1 | 0.5 |\n| 2 | 0.6 |\n", "no line has a step .*one: reward"),
        (b"Run config: K=8 lr=5.0e-06 T=0.8\nLR schedule: lr=5.0e-06 warmup=6\n", "no line has a step"),
        (b"Training Progress:  33%|# | 33/99 [0:9<9:9, 66.8s/it]\nbye\n", r"no line has a step .*ends at 33 of 99"),
    ],
)
def test_a_file_that_nothing_reads_is_described_in_one_line(tmp_path, content, said):
    (tmp_path / "run.log").write_bytes(content)
    with pytest.raises(ReportError, match=said) as error:
        read_run(tmp_path / "run.log")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"foo": 1, "bar/baz": 2}, "none of the 2 names .* knows: foo, bar/baz$"),
        ({"reward": 1, "foo": 2}, r"knows 1 of the 2 names in this run \(reward\), and not foo$"),
        ({"reward": 1, "entropy": 2, "grad_norm": 3, "foo": 4}, None),
        ({"vllm_kl/k3": 1}, None),
    ],
)
def test_names_that_the_report_does_not_know_are_told(tmp_path, row, said):
    notes = [*read_run(log(tmp_path, json.dumps({"step": 1} | row) + "\n", "run.jsonl")).all_notes()]
    assert (not notes) if said is None else re.search(said, *notes)


@pytest.mark.parametrize(
    "line",
    [
        "Micro Step 3/8 | Loss: 0.9 | Reward: 0.9",
        "Best step 12 | reward: 0.9",
        "Total steps: 1000 | reward: 1.0",
        " 50%|##   | 2/4 [00:01<00:01, 1.2it/s, reward=0.9, loss=0.1]",
        "Step 1 | Evaluating | eval_reward: 0.9",
    ],
)
def test_other_counts_are_no_steps(tmp_path, line):
    for before in (many(PAIRS) + f"{line}\n", f"{line}\n" + many(PAIRS)):
        run = read_run(log(tmp_path, before + PAIRS.format(4, 0.8)))
        assert values(run, "Reward") == {1: 0.25, 2: 0.5, 3: 0.75, 4: 0.8}, line
        assert run.notes == ()


@pytest.mark.parametrize(
    "line",
    [
        "iteration {0}/100: reward = {1}, loss = 0.1\n",
        "Epoch 1 Step {0}/100 - reward: {1} - loss: 0.1\n",
        "[INFO] step={0} reward={1} loss=0.1\n",
        "========== Step {0}/100 ==========\nResults:\n  \u2022 Loss: 0.1\n  \u2022 Reward: {1}\n",
    ],
)
def test_the_ways_to_write_a_line_of_pairs(tmp_path, line):
    run = read_run(log(tmp_path, many(line)))
    reward, loss = run.logged("critic/score/mean"), run.logged("actor/loss")
    assert reward.pairs() == [(1, 0.25), (2, 0.5), (3, 0.75)] and loss.at(3) == 0.1


def test_every_name_of_a_validation_is_shown(tmp_path):
    names = {alias.name: 0.5 for alias in aliases_of(VALIDATION) if not alias.is_family}
    assert "eval_reward" in names
    run = read_run(log(tmp_path, json.dumps({"step": 1} | names) + "\n", "run.jsonl"))
    assert {row.metric for row in dashboard_rows(run)} <= names.keys() and len(dashboard_rows(run)) > 1


def test_an_evaluation_does_not_start_a_run_again(tmp_path):
    rows = "".join(f'{{"step": {step}, "reward": {step / 4}}}\n' for step in (1, 2, 3))
    run = read_run(log(tmp_path, rows + '{"step": 2, "eval_reward": 0.5}\n', "run.jsonl"))
    assert values(run, "reward") == {1: 0.25, 2: 0.5, 3: 0.75} and run.notes == ()


def test_steps_of_ms_swift_and_steps_as_text(tmp_path):
    swift = "".join(f'{{"reward": {step / 4}, "global_step/max_steps": "{step}/9"}}\n' for step in (1, 2, 3))
    assert values(read_run(log(tmp_path, swift, "logging.jsonl")), "reward") == {1: 0.25, 2: 0.5, 3: 0.75}
    lines = many("{{'loss': 0.1, 'reward': {1}, 'global_step/max_steps': '{0}/9', 'percentage': '1%'}}\n", first=5)
    run = read_run(log(tmp_path, lines))
    assert values(run, "reward") == {5: 0.25, 6: 0.5, 7: 0.75} and run.notes == ()


def test_a_folder_of_trl_has_the_last_state(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        log(
            tmp_path / f"checkpoint-{step}",
            STATE.replace('"global_step": 3', f'"global_step": {step}'),
            "trainer_state.json",
        )
    assert read_run(tmp_path).sources == (tmp_path / "checkpoint-10" / "trainer_state.json",)


def test_a_run_that_died_before_its_first_step_is_reported(tmp_path):
    run = read_run(log(tmp_path, "loading\n" + next(iter(ENDS))))
    (event,) = run.events
    assert not run.metrics and event.rule == "ended" and "before its first step by torch.OutOf" in event.reason
    assert "torch.OutOfMemoryError" in judge_run(run).sentence


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("Training Progress:  10%|#  | 116/1155 [7:54:43<67:30:48, 233.93s/it]\n", " at about step 116 of 1155 by "),
        (
            "Loading: 100%|##| 9/9 [7:54:43<0:0, 233.93s/it]\nTraining Progress:  0%|  | 0/9 [0:0<?]\n",
            " first ",
        ),
        ("INFO: Epoch 2/5 step 2/12 (global step 14) finishes.\n", " at about step 14 of 60 by "),
        ("Loading the weights\nIteration: 44\n", "ended by "),  # whatever its rows are
        ("Loading the weights\nTotal training steps: 29\n", " before its first step by "),
        ("the traceback alone\n", "ended by "),
    ],
)
def test_when_a_run_without_rows_ended_is_what_its_bar_says(tmp_path, text, when):
    (event,) = read_run(log(tmp_path, f"{text}ValueError: bad\n")).events
    assert when in event.reason


@pytest.mark.parametrize(
    ("folder", "of_verl"),
    [("site-packages/verl", True), ("work/verl-0.7/verl", True), ("work/EasyR1/verl", False), ("EasyR1/trl", False)],
)
def test_an_end_in_the_code_of_a_fork_is_not_in_verl_s(tmp_path, folder, of_verl):
    text = f'Traceback (most recent call last):\n  File "/{folder}/trainer/main.py", line 3, in fit\nKeyError: 1\n'
    assert read_run(log(tmp_path, text)).of_verl == of_verl


@pytest.mark.parametrize(
    ("text", "is_a_table"),
    [
        ("name,a,b\nx,1,2\n", True),
        ("name,a,b\n", True),
        ("loading a, b, and c\nready\n", False),
        ("Train:  21%|# | 841/4096 [1:0<4:0, 4.5s/it, pg=-0.1, rm=0.2, glen=770]\n", False),
        ("loading a, b, and c\nready, a, b, and c\n", False),
    ],
)
def test_text_with_commas_is_a_table_only_if_two_lines_have_as_many(tmp_path, text, is_a_table):
    with pytest.raises(ReportError, match="may be a table" if is_a_table else "this is text"):
        read_run(log(tmp_path, text))


@pytest.mark.parametrize(
    ("behind", "noted"),
    [
        (
            "Training Progress:   3%|  | 3/100 [0:9<9:9, 3.0s/it]\n",
            "ends at step 3 of 100, and without an error; if it",
        ),
        (
            "Train:   3%|  | 3/100 [0:9<9:9, 3.0s/it]\nINFO 10-10 17:06:36 [pool.py:2] reset prefix cache\n",
            "without an error (in the rollout)",
        ),
        ("Early stopping at step 3\n", "finished"),
        ("Epoch 1/9 step 3/12 (global step 3) finishes.\n", "ends at step 3 of 108"),
        ("Training Progress: 100%|##| 3/3 [0:9<0:0, 3.0s/it]\n", "finished"),
        ("{'train_runtime': 4037.1, 'train_samples_per_second': 0.074}\nDone!\n", "finished"),
        (
            "Training Progress:   3%|  | 3/100 [0:9<9:9, 3.0s/it]\nTraceback (most recent call last):\nKeyError: 1\n",
            "",
        ),
        ("Update epoch:  50%|# | 64/128 [0:9<9:9, 3.0s/it]\n", ""),  # of micro-batches
    ],
)
def test_a_log_that_ends_before_its_bar_does_or_with_it_is_noted(tmp_path, behind, noted):
    notes = read_run(log(tmp_path, many(VERL) + behind)).notes
    assert [noted in note for note in notes] == [True] * bool(noted)


def test_updates_that_a_loss_scaler_skipped_are_counted(tmp_path):
    told = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 8\nGradient overflow.  Skipping step, x\n"
    (note,) = read_run(log(tmp_path, many(VERL, (0.1,)) + told + many(VERL, (0.2,), first=2) + told)).notes
    assert "overflowed: 4" in note


def test_an_object_within_a_row_is_no_row_of_its_own(tmp_path):
    run = read_run(log(tmp_path, many('x {{"step": {0}, "train": {{"reward": {1}, "kl": 0.1}}}}\n')))
    assert values(run, "train/reward") == {1: 0.25, 2: 0.5, 3: 0.75} and run.notes == ()


def test_the_end_is_the_first_thing_that_the_report_says(tmp_path):
    verdict = judge_run(read_run(log(tmp_path, many(VERL) + next(iter(ENDS)))))
    assert verdict.sentence.startswith("The run ended at step 3 by torch.OutOfMemoryError")


def test_a_key_in_an_error_is_on_neither_terminal_page_nor_json(tmp_path, capsys):
    """Also one at which the error is cut."""
    key = "abcdEFGH" * 5
    file, out = tmp_path / "run.log", tmp_path / "out"
    for said in (f"401 for https://host/?token=hf_{key}", f"{'x' * 150} Authorization: Bearer {key}"):
        file.write_text(f"{many(VERL)}Traceback (most recent call last):\nHTTPError: {said}\n")
        assert main(["report", str(file), "--out", str(out)]) == 0
        shown = capsys.readouterr().out
        assert main(["report", str(file), "--no-page", "--json"]) == 0
        shown += capsys.readouterr().out + next(out.rglob("*.html")).read_text()
        assert "HTTPError" in shown and "***" in shown and key[:8] not in shown


def test_dumped_answers_are_no_metrics(tmp_path):
    rows = [{"input": "x" * 300, "output": "y", "score": 0.5, "step": step} for step in (1, 2)]
    with pytest.raises(ReportError, match="no line is a JSON object with a step"):
        read_run(log(tmp_path, "".join(f"{json.dumps(row)}\n" for row in rows), "rollouts.jsonl"))


def test_a_format_of_ones_own_is_tried_before_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_ext.report.sources.text.FORMATS", list(FORMATS))

    @register_format("my trainer's log")
    class Mine:
        def sniff(self, text):
            return b"step:" in text

        def rows(self, line):
            yield int(line[5]), {"my/metric": float(line[5])}

    run = read_run(log(tmp_path, many(VERL)))
    assert values(run, "my/metric") == {1: 1, 2: 2, 3: 3}
