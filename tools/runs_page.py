"""The page of the whole runs: `python tools/runs_page.py > docs/runs.md`.

It lists each test of tests/stack with its docstring and the settings in its source: the test's own strings, and those
of the module's constants, functions and fixtures that it uses.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
STACK = ROOT / "tests" / "stack"
HEAD = """# The whole runs

The tests that start the real stack: verl, Ray, both engines. A run takes about a minute, so a new feature joins an
existing run. Look here for a run with your engines and presets.

`pytest tests/stack -m e2e` starts all of them, `pytest FILE::TEST` one. The column *settings* has the settings in the
test's source, without those of its recipe. `python tools/runs_page.py` generates this page from
[tests/stack](../tests/stack), and a test compares them."""
# Setting in a string -> its form in the table.
SHOWN = (
    (re.compile(r"^(?:\+\+|\+)?(stability=\w+)"), r"\1"),
    (re.compile(r"^(?:\+\+|\+)?stability\.(\w+(?:\.\w+)?)[.={]"), r"\1"),
    (re.compile(r"trainer_mode=(\w+)"), r"\1"),
    (re.compile(r"router_replay\.mode=(R\d)"), r"\1"),
    (re.compile(r"(bypass_mode)=[tT]rue"), r"\1"),
    (re.compile(r"^(precision=\w+)"), r"\1"),
    (re.compile(r"rollout\.(top_p|top_k)="), r"\1"),
    (re.compile(r"lora_rank=|^dense_lora$"), "LoRA"),  # the fixture that gives the settings of one
    (re.compile(r"multi_turn\.enable"), "several turns"),
)
TABLE = "| test | details | settings |\n|---|---|---|\n"
ENGINES = ("fsdp2", "megatron", "sglang", "vllm")


def page() -> str:
    sections = [HEAD]
    for file in sorted(STACK.glob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        rows = [f"| `{test.name}` | {_docstring(test)} | {', '.join(_settings(test, tree))} |" for test in _tests(tree)]
        link = f"[{file.name}](../tests/stack/{file.name})"
        sections.append(f"## {link}\n\n{_docstring(tree)}\n\n{TABLE}" + "\n".join(rows))
    return "\n\n".join(sections) + "\n"


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def _docstring(node: ast.FunctionDef | ast.Module) -> str:
    """Returns the first paragraph."""
    return (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _settings(test: ast.FunctionDef, tree: ast.Module) -> list[str]:
    """Returns the settings of a run that a test's strings name, including those of its module that the test uses."""
    defined = {name: node for node in tree.body for name in _names(node)}
    seen, waiting, found = set[str](), [test.name], dict[str, None]()
    while waiting:
        name = waiting.pop(0)
        if name in seen or name not in defined:
            continue
        seen.add(name)
        for node in ast.walk(defined[name]):
            if isinstance(node, ast.arg):
                waiting.append(node.arg)
                found |= dict.fromkeys(_shown(node.arg))
            elif isinstance(node, ast.Name):
                waiting.append(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= dict.fromkeys(_shown(node.value))
    return list(found)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _shown(text: str) -> Iterator[str]:
    if text in ENGINES:
        yield text
    for pattern, shown in SHOWN:
        if match := pattern.search(text):
            yield f"`{match.expand(shown)}`" if "\\" in shown else shown


if __name__ == "__main__":
    print(page(), end="")
