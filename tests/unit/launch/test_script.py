"""Launch scripts: what is read of them is what bash would start, and nothing is executed."""

import os
import shutil
import subprocess

import pytest
from hypothesis import assume, settings, strategies
from hypothesis import given as given_by

from tests.support.examples import at_most
from verl_ext.base.errors import ConfigError
from verl_ext.features.verl_config import hydra_value
from verl_ext.launch.command_line import read_launch
from verl_ext.launch.script import read_command, read_script

MAIN = "verl.trainer.main_ppo"
START = f"python3 -m {MAIN}"
# Name -> a script that bash can run too, if a stub stands for python3 and for the launchers.
SCRIPTS = {
    "lines": f"""
        set -xeuo pipefail
        export HYDRA_FULL_ERROR=1
        N=${{N:-4}} EMPTY=${{NOT_SET:-}}
        WANDB_MODE=offline {START} \\
            a.n=$N  b.files="['x y.parquet', '$N.parquet']" \\
            c.logger='["console","wandb"]' d.path=~/x "$@" 2>&1 | tee log.txt
    """,
    "arrays": f"""
        P=2048; R=$((1024 * 8))
        DATA=(
            # a comment
            data.max_prompt_length=$P
            "data.max_response_length=${{R}}"  # another
        )
        DATA+=(x.tokens=$(((P + R) * 2)) "x.name=two words")
        EXTRA=()
        {START} "${{DATA[@]}}" "${{EXTRA[@]}}" n=${{#DATA[@]}} first=${{DATA[0]}}
    """,
    "text": f"""
        ARGS="a=1 \\
              b=2"
        ARGS="$ARGS c=3"
        CMD="{START} $ARGS"
        eval $CMD
    """,
    "conditions": f"""
        MODE=${{MODE:-vllm}}; TP=4; X=
        if [ "$MODE" = sglang ] || [[ -n $X ]]; then A=1
        elif (( TP % 2 == 0 )) && [ $TP -gt 1 ]; then A=2; else A=3; fi
        case "$MODE" in s*) B=1 ;; vllm|trt) B=2 ;; *) exit 1 ;; esac
        [ -z "$X" ] && C=1 || C=2
        [[ $MODE == v* && -d . ]] && D=1
        {START} a=$A b=$B c=$C d=$D
    """,
    "names": f"""
        MODEL=Qwen/Qwen3-30B-A3B.tar
        {START} a=${{MODEL##*/}} b=${{MODEL%.tar}} c=${{MODEL,,}} d=${{MODEL/Qwen3/Q3}} e=$(basename $MODEL .tar) \\
            f=${{NONE:-"['a', 'b']"}} g="${{NONE:-['c','d']}}" h=${{NONE:+x}}y i='{{a:1,'\\
'b:2}}' j=$(echo 3)
    """,
    "functions": f"""
        train() {{
            local lr=$1; shift
            {START} lr=$lr "$@"
        }}
        for lr in 1e-6; do train $lr a=1 b="$lr x"; done
    """,
    "cluster": f"ray job submit --runtime-env=x.yaml -- {START} a=1 b=2",
    "shell": f"""
        A=1
        srun --nodes=2 bash -c "{START} a=$A b='[x]'"
    """,
    "torchrun": "torchrun --nproc_per_node=8 -m verl.trainer.main_ppo a=1 --config-path=config",
    "launcher": """
        LAUNCH=(uv run --frozen python3)
        if [ "${USE_UV:-1}" != 1 ]; then LAUNCH=(python3); fi
        "${LAUNCH[@]}" -m verl_ext.main_ppo stability=moe --config-path config
    """,
}
STUB = """#!/bin/bash
while [[ $# -gt 0 && $1 != *main_ppo* && $1 != -c ]]; do shift; done
if [[ $1 == -c ]]; then shift; exec /bin/bash -c "$1"; fi
shift; printf '%s\\0' "$@" > "$OUT"
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_bash_reads_it(name, tmp_path):
    script, folder = tmp_path / "run.sh", tmp_path / "bin"
    script.write_text("\n".join(line.removeprefix(8 * " ") for line in SCRIPTS[name].splitlines()))
    folder.mkdir()
    for program in ("python3", "uv", "ray", "srun", "torchrun"):
        (folder / program).write_text(STUB)
        (folder / program).chmod(0o755)
    environ = {"HOME": str(tmp_path), "OUT": str(tmp_path / "out")}
    bash = shutil.which("bash")
    path = f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
    subprocess.run(
        [bash, script, "own=1"], env={**environ, "PATH": path}, cwd=tmp_path, check=False, capture_output=True
    )
    launch = read_script(script, ["own=1"], environ)
    assert launch.arguments == (tmp_path / "out").read_text().split("\0")[:-1]
    assert not launch.unknown and launch.left_out == launch.others == ()


def read(text, tmp_path, *arguments, **environ):
    script = tmp_path / "run.sh"
    script.write_text(text)
    return read_script(script, arguments, environ)


PIECES = ["$d", "${d}", "${e:-[$d]}", "[", "]", ",", "/", ".", "#", "'$d'", '"$d"', '"[$d"', '"\'"', "$(echo $d)"]
PIECES += [" c=", "\\\\", "\\\n", "'\\\n'", '"\\\n"', "\"$(echo '$d')\""]


@settings(at_most(60), deadline=None)  # a process of bash for each
@given_by(strategies.lists(strategies.sampled_from(PIECES), max_size=9).map("".join))
def test_words_are_those_of_bash(tmp_path_factory, word):
    text = "d=x/y\nval=[$d,\\\n$d]\n# it's\n: <<'END'\nit's $d\n\nEND\n"
    words = f"a={word} b=$val"
    command = ["bash", "-c", f"set -f\n{text}printf '%s\\0' {words}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False)
    assume(printed.returncode == 0)
    launch = read(f"{text}{START} {words}", tmp_path_factory.mktemp("words"))
    assert launch.arguments == [one for one in printed.stdout.split("\0") if one]


def test_nothing_is_executed(tmp_path):
    made = [tmp_path / name for name in "abcd"]
    touch = [f"touch {file}" for file in made]
    launch = read(
        f"{touch[0]}\nX=$({touch[1]}; echo 1)\nif {touch[2]}; then Y=1; fi\n{START} x=$X `{touch[3]}` > {made[0]}",
        tmp_path,
    )
    assert launch.left_out == ("x", f"words of `{touch[3]}`")
    assert not any(file.exists() for file in made)


def test_what_is_not_known_is_listed(tmp_path):
    launch = read(
        f"""
        DEVICE=${{DEVICE:-$(probe)}}
        ARGS=(a=1)
        if [ $DEVICE = npu ]; then ARGS+=(b=2); MINE=1; else MINE=2; fi
        if nvidia-smi; then GPUS=8; fi
        {START} "${{ARGS[@]}}" nodes=$SLURM_NNODES name=run_$(date +%d)_x path=/data/$USER_DIR gpus=$GPUS mine=$MINE
        """,
        tmp_path,
    )
    assert launch.arguments == ["a=1", "name=run_$date_d_x", "path=/data/$USER_DIR"]
    assert launch.left_out == ("words of $DEVICE", "nodes", "gpus", "mine")
    assert {cause: (int(where.rpartition(" ")[2]), *those) for cause, (where, those) in launch.unknown.items()} == {
        "$DEVICE": (2, "words of $DEVICE", "mine"),  # the line and the settings of each
        "$SLURM_NNODES": (6, "nodes"),
        "$(date +%d)": (6, "name"),
        "$USER_DIR": (6, "path"),
        "nvidia-smi": (5, "gpus"),
    }
    text = f"NAME=${{NAME:-r-$(date)}}\nDIR=/x/$NAME\n{START} \\\n a=1 \\\n b=$NAME \\\n c=$DIR d=$N"
    launch = read(text, tmp_path)
    assert launch.unknown == {"$(date)": ("run.sh, line 1", ["b", "c"]), "$N": ("run.sh, line 6", ["d"])}


def test_a_file_that_is_not_here_may_be_where_the_script_runs(tmp_path):
    tests = [
        "if [ ! -f /data/t.parquet ]; then exit 1; fi",
        "[ -d /data ] || exit 1",
        "if test ! -f /data/v; then exit; fi",
    ]
    for text in tests:
        assert read(f"{text}\n{START} a=1", tmp_path).arguments == ["a=1"]
    launch = read(f"if [ -f /data/t ]; then A=1; else A=2; fi\n{START} a=$A", tmp_path)
    assert launch.left_out == ("a",)


LAUNCH = f"{START} a.b=1 \\\n"
LATER = "+trainer.nnodes=1 \\\n data.x=$N\n"


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            f"{LAUNCH}# data.y=2 \\\n{LATER}",
            {"trainer.nnodes": "a command of its own", "data.x": "a command of its own"},
        ),
        (f"{START} a.b=1 # why \\\n{LATER}", ["trainer.nnodes", "data.x"]),
        (f"{START} a.b=1\n{LATER}", ["trainer.nnodes", "data.x"]),
        (f"{LAUNCH} 2>&1 | tee x.log \\\n trainer.nnodes=1", {"trainer.nnodes": "tee"}),
        (f"f() {{\n{START} a.b=1\n{LATER}}}\nf", ["trainer.nnodes", "data.x"]),
        (f"{LAUNCH}{LATER}", []),
        (f"# {LATER}{LAUNCH} 2>&1 | tee x.log\necho trainer.nnodes=1", []),
        (f"./prepare.sh data.x=1 | cat\n{LAUNCH}\npython3 -m verl.model_merger merge data.x=1", []),
    ],
)
def test_overrides_that_the_shell_gives_to_others_are_lost(text, lost, tmp_path):
    found = read(text, tmp_path).lost
    assert [*found] == [*lost]
    if isinstance(lost, dict):
        assert all(found[key].startswith(to) and "run.sh, line" in found[key] for key, to in lost.items())


@pytest.mark.parametrize(
    ("text", "machines"),
    [
        (f"export CUDA_VISIBLE_DEVICES=0,3\n{START} a=1", [("CUDA_VISIBLE_DEVICES=0,3", 1, 2)]),
        (f"X=1 CUDA_VISIBLE_DEVICES=4 {START} a=1", [("CUDA_VISIBLE_DEVICES=4", 1, 1)]),
        (f"CUDA_VISIBLE_DEVICES=0 vllm serve x &\n{START} a=1", []),  # of that command alone
        (
            f"export CUDA_VISIBLE_DEVICES=0,1\nCUDA_VISIBLE_DEVICES=2 x &\n{START} a=1",
            [("CUDA_VISIBLE_DEVICES=0,1", 1, 2)],
        ),
        (f"export CUDA_VISIBLE_DEVICES=$GPUS\n{START} a=1", []),
        (f"CUDA_VISIBLE_DEVICES=0\n{START} a=1", []),  # not exported
        (f"export CUDA_VISIBLE_DEVICES=0\nray start --head --num-gpus=8\n{START} a=1", []),
        (f"export CUDA_VISIBLE_DEVICES=0\nray job submit -- {START} a=1", []),
        (
            f"#SBATCH --nodes=2  # machines\n#SBATCH --gres=gpu:h100:4\nray start --head\n{START} a=1",
            [("#SBATCH --nodes=2 --gres=gpu:h100:4", 2, 4)],
        ),
        (f"#SBATCH -N 1-4\n##SBATCH --gpus-per-node=8\n{START} a=1", []),
        (f"#SBATCH --gpus-per-node=8\n{START} a=1", [("#SBATCH --gpus-per-node=8", None, 8)]),
        (f"#SBATCH --nodes=1\nexport RAY_ADDRESS=x\n{START} a=1", []),
    ],
)
def test_machines_that_a_script_asks_for(text, machines, tmp_path):
    assert [*read(text, tmp_path).machines] == machines


def test_variables_of_the_environment_count(tmp_path):
    text = f"{START} nodes=$NODES model=${{MODEL:-mine}}"
    assert read(text, tmp_path, NODES="2", MODEL="yours").arguments == ["nodes=2", "model=yours"]


def test_arguments_of_the_script(tmp_path):
    text = f'if [ $# -lt 1 ]; then exit 1; fi\nENGINE=$1; shift\n{START} name=$ENGINE "$@"'
    assert read(text, tmp_path, "sglang", "x").arguments == ["name=sglang", "x"]
    with pytest.raises(ConfigError, match=r"with these arguments and variables it ends at line 1$"):
        read(text, tmp_path)


def test_another_script_is_followed(tmp_path):
    (tmp_path / "env.sh").write_text("MODEL=mine")
    (tmp_path / "train.sh").write_text(f'{START} model=$1 other="$MODEL"')
    launch = read('source "$(dirname "$0")/env.sh"\nbash train.sh $MODEL', tmp_path)
    assert launch.arguments == ["model=mine", "other=mine"] and launch.where == "train.sh, line 1"


def test_the_first_of_several_is_read(tmp_path):
    launch = read(f"{START} --cfg job a=1\necho {START} x=1\n{START} a=2\n{START} a=3", tmp_path)
    assert (launch.arguments, launch.where, launch.others) == (["a=2"], "run.sh, line 3", ("run.sh, line 4",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "python3 -m verl.trainer.main_generation a=1",
            r"; it starts verl.trainer.main_generation \(run.sh, line 1\)$",
        ),
        ("python3 -m verl.experimental.one_step_off_policy.main_ppo a=1", "it starts verl.experimental"),
        ("pkill -f verl.trainer.main_ppo; vim main_ppo.py", "verl_ext.main_ppo$"),
        ("f() { f; }; f", "cannot be read as a shell script"),
    ],
)
def test_a_script_without_a_launch(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        read(text, tmp_path)


def test_a_file_of_an_entry_point_counts():
    model = "actor_rollout_ref.model.path=mine"
    words = ["accelerate", "launch", "mine/main_ppo.py", model]
    assert read_command(words, {}).arguments == [model]


def test_another_entry_point_is_read_if_it_is_told_its_model(tmp_path):
    settings = "data.train_files=a actor_rollout_ref.model.path=b"
    launch = read(f"torchrun -m torch.distributed.run -m mine.train {settings}", tmp_path)
    assert (launch.module, launch.arguments) == ("mine.train", settings.split())
    assert read(f"python3 mine/go.py {settings}\n{START} a=1", tmp_path).module == MAIN
    with pytest.raises(ConfigError, match=r"it starts mine.train \(run.sh, line 1\)$"):
        read("python3 -m mine.train data.train_files=a trainer.nnodes=2 x=1", tmp_path)
    with pytest.raises(ConfigError, match="has no command"):
        read("python3 -m pytest data.train_files=a", tmp_path)
    with pytest.raises(ConfigError, match=r"starts mine\.train"):
        given("python3", "-m", "mine.train", *settings.split(), complete=True)


def given(*words, complete=False, **environ):
    return read_launch(words, environ, complete=complete)[:2]


def test_what_people_give(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"export KEY=1\nN=${{1:-2}}\n{START} n=$N nodes=$NODES")
    assert given("stability=moe", "~x.y", "--cfg") == (["stability=moe", "~x.y", "--cfg"], "")
    overrides, said = given(str(script), "b=1")
    assert overrides == ["n=2", "b=1"]
    assert said.endswith(
        "for that: nodes; set a variable in front of verl-ext, as in NODES=VALUE, or these settings, as KEY=VALUE"
    )
    assert given("NODES=3", "bash", str(script), "5", "b=1")[0] == ["n=5", "nodes=3", "b=1"]
    script.write_text(f"{START} +a.x=$(date) +a.y=1 a.z=$(date) ++a.w=1 ~a.v a.u={{b:1}} stability=moe")
    added = ["~a.x", "a.y=2", "++a.z=2", "+a.w=2", "a.v=2", "a.u={c:2}", "stability=icepop"]
    overrides, said = given(str(script), *added)
    assert "a.x=" in overrides[0] and "not known" not in said
    placed = ["+a.y=2", "++a.z=2", "++a.w=2", "~a.v", "a.u={b:1}", "stability=icepop"]
    assert overrides[1:] == [*placed, "~a.x", "a.v=2", "a.u={c:2}"]  # a value is given once
    assert given("b=1", "A=1", "python3", "-m", MAIN, "a=1")[0] == ["a=1", "b=1"]
    assert given(f"{START} a=1 b='x y'")[0] == ["a=1", "b=x y"]
    with pytest.raises(ConfigError, match=r"gone\.sh does not exist; give a launch script"):
        given("gone.sh")


def test_a_job_needs_all_values(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"export KEY=1\n{START} nodes=$NODES")
    with pytest.raises(ConfigError, match=r"not known here: \$NODES"):
        given(str(script), complete=True)
    overrides, said = given(str(script), "trainer.x=1", "nodes=2", complete=True)
    assert overrides == ["nodes=2", "trainer.x=1"] and "variables that the job does not get: KEY" in said


def test_overrides_in_yaml(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("a:\n  b: 1.0e-06\n  c: [x y, true, null]\n+d.e: {}\nlr: 1e-6\nname: ${a.b}\n")
    assert given(str(file), "z=1")[0] == [
        "a.b=1e-06",
        "a.c=['x y',True,null]",
        "+d.e={}",
        "lr=1e-06",
        "name='${a.b}'",
        "z=1",
    ]
    file.write_text("- a=1\n- ~b\n")
    assert given(str(file))[0] == ["a=1", "~b"]
    for text, said in {
        "defaults: [x]": "--config-name=mine",
        "- 3": "must have a list of",
        "a: [": "cannot be read",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            given(str(file))


def test_values_in_hydras_grammar():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for value in ["it's", "a\\", 3, 0.5, True, None, ["a b", {"k": [1]}], "null", "x=y"]:
        assert OverridesParser.create().parse_override(f"a={hydra_value(value)}").value() == value


@pytest.mark.parametrize(
    ("module", "override", "complete", "expected"),
    [
        ("verl.trainer.main_ppo", "stability=moe", False, True),
        ("verl.trainer.main_ppo", "stability=moe", True, False),  # a job starts ours
        ("verl.trainer.main_ppo", "model_engine=megatron", False, False),
        ("verl_ext.main_ppo", "stability=moe", False, False),
    ],
)
def test_an_override_of_ours_needs_our_module(tmp_path, module, override, complete, expected):
    (tmp_path / "run.sh").write_text(f"python3 -m {module} trainer.nnodes=2\n")
    _, said = given(str(tmp_path / "run.sh"), override, complete=complete)
    assert ("needs python -m verl_ext.main_ppo" in said) is expected
