"""An error's one line, and the fix that it carries."""

import ast
import pickle
import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests import ROOT
from verl_ext.base import errors
from verl_ext.base.errors import ConfigError

PACKAGE = ROOT / "verl_ext"
ROOMS = ("features", "launch", "trainer", "workers", "routing", "upstream")
KINDS = {*(name for name in vars(errors) if name.endswith("Error")), "CheckpointError"}
SOME = "SOME"  # in the place of what an f-string puts in


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "a.b=1 is wrong"),
        ({"fix": ("a.b=2",)}, "a.b=1 is wrong; set a.b=2"),
        ({"fix": ("a.b=2", "a.c=null")}, "a.b=1 is wrong; set a.b=2 and a.c=null"),
        ({"fix": ("a.b=2",), "otherwise": "leave it out"}, "a.b=1 is wrong; set a.b=2, or leave it out"),
        ({"otherwise": "leave it out"}, "a.b=1 is wrong; leave it out"),
    ],
)
def test_the_line_ends_in_the_fix_and_survives_a_process(arguments, line):
    error = ConfigError("a.b=1 is wrong", **arguments)
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert (str(same), same.fix) == (line, arguments.get("fix", ()))


def fixes(room):
    """The overrides written in the fixes of a room's errors, each with its line; names are looked up in their file."""
    for file in sorted((PACKAGE / room).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        named = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KINDS:
                for given in [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "fix")]:
                    for text in texts(given, named):
                        yield f"{room}/{file.name}:{call.lineno}", text


def texts(node, named):
    """The `key=value` in an expression."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else SOME for part in node.values)
    elif isinstance(node, ast.Constant):
        yield from [node.value] if "=" in str(node.value) else []
    elif isinstance(node, ast.Name):
        yield from texts(named[node.id], named) if node.id in named else []
    else:
        for part in ast.iter_child_nodes(node):
            yield from texts(part, named)


def keys(node, prefix=""):
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


@pytest.fixture(scope="module")
def settings(compose):
    """Returns the settings of some runs, one per line."""
    replay = "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3"  # which verl's FSDP config leaves out
    losses = ([f"stability={name}_loss"] for name in ("icepop", "opsm"))
    runs = ([replay], ["model_engine=megatron"], *losses)
    verls_own = "+trainer.remove_previous_ckpt_in_save=false"  # which verl reads and its config leaves out
    return "\n".join({key for run in runs for key in keys(OmegaConf.to_container(compose(*run, verls_own)))})


@pytest.mark.parametrize("override", [pytest.param(fix, id=where) for room in ROOMS for where, fix in fixes(room)])
def test_a_fix_is_an_override_of_a_setting_that_there_is(settings, override):
    (parsed,) = OverridesParser.create().parse_overrides([override])
    assert parsed.type.name in ("CHANGE", "FORCE_ADD")  # ++ for an environment variable, which no config names
    key = re.escape(parsed.key_or_group).replace(SOME, ".+")
    assert re.search(f"^{key}$", settings, re.MULTILINE)
