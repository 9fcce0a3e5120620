"""Finds the command that starts verl in a shell script, and expands its arguments. Nothing is executed.

The script is parsed with tree-sitter-bash and then followed as bash would: assignments, arrays, tests on known values,
functions, loops, `bash -c`, other scripts that it calls. What only a run could know, such as `$(...)`, stays unknown.
bashlex would parse as well, but its licence (GPLv3+) does not fit a plugin under Apache-2.0.
"""

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import tree_sitter_bash
from tree_sitter import Language, Parser

from verl_ext.base.errors import ConfigError
from verl_ext.launch.command_line import Launch, Machines

# A value is text. An unknown part of it is its cause between two private characters, without blanks; FIELD ends a word.
UNKNOWN, BLANK, FIELD = re.compile("\ue000(.*?)\ue001"), "\ue003", "\ue002"
STARTS = re.compile(r"(?:[\w.]+\.|(?:\S*/)?)main_\w+(?:\.py)?")  # a module or file of an entry point
SETTING = re.compile(r"\+*(?:actor_rollout_ref|algorithm|critic|data|reward\w*|trainer)\.[\w.]+=")  # of verl's config
MODEL = re.compile(r"\+*actor_rollout_ref\.model\.path=")
NO_COMMAND = re.compile(r"[+~]*[a-z]\w*(?:\.\w+)+=")  # an override where the shell expects a command's name
VISIBLE = "CUDA_VISIBLE_DEVICES"
IDS = re.compile(r"(?:\d+|(?:GPU|MIG)-[\w-]+)(?:,(?:\d+|(?:GPU|MIG)-[\w-]+))*")
REMOTE = re.compile(r"\bRAY_ADDRESS\b|\bray\s+(?:job|submit|exec)\b")  # the run starts on machines of another job
CLUSTER = re.compile(rf"{REMOTE.pattern}|\bray\s+(?:start|up)\b|ray\w*\.sh\b")  # whose Ray counts the GPUs itself
SLURM = re.compile(r"^#SBATCH[ \t]+(.*)", re.MULTILINE)
COMMENTS = re.compile(r"(?:[ \t]*(?:#.*)?\n)*")  # Slurm reads its lines up to the first command
NODES = re.compile(r"(?<!\S)(?:--nodes[= ]|-N ?)(\d+)(?![\w-])")
GPUS_PER_NODE = re.compile(r"(?<!\S)--(?:gres[= ]gpu:|gpus-per-node[= ])(?:[A-Za-z][\w.-]*:)?(\d+)(?![\w,])")
MAIN = re.compile(r"(?:.*/)?(?:verl[./]trainer|verl_ext)[./]main_ppo(?:\.py)?")
PYTHON = re.compile(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate)")
COMMAND, COMMAND_TEXT = "the command", re.compile(r"main_| -m ")
PRINTS = {"--cfg", "-c", "--help", "-h", "--info", "-i", "--hydra-help"}  # Hydra's flags that start nothing
PROBE = re.compile(r"\s*import (\w+)\s*")  # of `python -c`
SCRIPTS = {"bash", "sh", "source", ".", "exec", "sbatch", "srun", "--"}  # commands that run the file behind them
FILTERS = {"grep", "egrep", "sed", "awk", "while"}  # of what the launch prints; their words may look like overrides
SILENT = {"cd", "mkdir", "true", ":", "set", "unset", "shift"}
EXPANSION = re.compile(
    r"(?P<length>#(?=\w))?(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>[^]]*)\])?"
    r"(?:(?P<operator>:?[-=+?]|##?|%%?|//?|,,|\^\^)(?P<rest>.*))?",
    re.DOTALL,
)
ARITHMETIC = re.compile(r"\s*(\d+|&&|\|\||[<>=!]=|[-+*/%()<>!])")
AS_PYTHON = {"/": "//", "&&": " and ", "||": " or ", "!": " not "}
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__, "-ne": int.__ne__, "-gt": int.__gt__, "-ge": int.__ge__, "-lt": int.__lt__, "-le": int.__le__
}  # fmt: skip
# What decides whether `$name` and a backslash at the end of a line stand in a word, in the order of the attempts.
LEXEME = re.compile(
    r"(?P<join>(?<=\S)(?:\\\n)+)|\\.|(?P<ansi>\$'(?:\\.|[^'\\])*')|(?P<raw>'[^']*')|(?P<toggle>[\"`])"
    r"|(?P<open>\$?\(|\$\{)|(?P<close>[)}])|(?P<comment>(?<![^\s;&|(])#[^\n]*)|(?P<line>\n)"
    r"|(?<!<)<<-?\s*['\"\\]?(?P<end>[A-Za-z_]\w*)['\"]?|\$(?P<name>[A-Za-z_]\w*)",
    re.DOTALL,
)
MOST_TURNS = 100  # of a loop
Node: TypeAlias = Any  # tree_sitter.Node, whose text and fields may be None by its type, and here never are
Status: TypeAlias = bool | str  # of a command; the cause if it is not known


def read_script(
    file: Path, arguments: Sequence[str], environ: Mapping[str, str], replaced: Collection[str] = ()
) -> Launch:
    """Returns the first command of a script that starts verl; the run would start with it.

    Args:
        arguments: those of the script.
        environ: the environment in which it would start.
        replaced: settings whose values do not matter.

    Raises:
        ConfigError: it is not text, or starts nothing that is known.
    """
    shell = _Shell(environ, file, arguments)
    ended = ""
    try:
        shell.run_text(file.read_text(encoding="utf-8"))
    except _EndedError as error:
        ended = f"; with these arguments and variables it ends at line {error}"
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as a shell script: {error}") from error
    if not shell.found:  # perhaps in a function that another machine calls
        for body in [*shell.functions.values()]:
            shell.apart(partial(_Shell.run, node=body))
    return _chosen(shell, str(file), ended, replaced)


def read_command(words: Sequence[str], environ: Mapping[str, str], replaced: Collection[str] = ()) -> Launch:
    """Returns the launch of a command line, such as `["ray", "job", "submit", "--", "python3", "-m", ...]`.

    Raises:
        ConfigError: it starts nothing that is known.
    """
    shell = _Shell(environ, Path(COMMAND), ())
    shell.texts = [" ".join(words)]
    shell.execute(list(words), COMMAND, "")
    return _chosen(shell, COMMAND, "", replaced)


def _chosen(shell: "_Shell", name: str, ended: str, replaced: Collection[str]) -> Launch:
    launches = [one for one in shell.found if MAIN.fullmatch(one.module)]
    # Another entry point has a config of its own. A launch that names its model tells enough to be judged by verl's.
    launches = launches or [one for one in shell.found if any(map(MODEL.match, one.arguments))]
    if not launches:
        others = ", ".join(dict.fromkeys(f"{one.module} ({one.where})" for one in shell.found))
        instead = f"; it starts {others}" if others else ended
        lines = f"; line {shell.unparsed[0]} is no shell that can be read" if shell.unparsed and not others else ""
        starts = "starts verl.trainer.main_ppo or verl_ext.main_ppo"
        raise ConfigError(f"{name} has no command that {starts}{instead}{lines}")
    trains = [one for one in launches if not PRINTS & {*one.arguments}] or launches
    chosen = trains[0]
    asked = [word for word in chosen.arguments if word.partition("=")[0].lstrip("+") not in replaced]
    lost = [word for word in asked if UNKNOWN.fullmatch(word.partition("=")[2] or word)]
    kept = [word for word in chosen.arguments if word not in lost]
    unknown = dict[str, tuple[str, list[str]]]()
    for word in asked:
        for cause in dict.fromkeys(UNKNOWN.findall(word)):
            place = shell.places.get(cause, chosen.where)
            unknown.setdefault(cause.replace(BLANK, " "), (place, []))[1].append(_setting_of(word))
    return replace(
        chosen,
        arguments=[UNKNOWN.sub(lambda at: "$" + re.sub(r"\W+", "_", at[1]).strip("_")[:40], word) for word in kept],
        entry="" if MAIN.fullmatch(chosen.module) else chosen.module,
        unknown=unknown,
        left_out=tuple(map(_setting_of, lost)),
        others=tuple(dict.fromkeys(one.where for one in trains if one.where != chosen.where)),
        lost={key: to for key, to in chosen.lost.items() if key not in replaced and not shell.unparsed},
        machines=tuple(_machines(shell, chosen.exports)),
    )


def _machines(shell: "_Shell", exports: Mapping[str, str]) -> Iterator[Machines]:
    """Yields the GPUs that a script makes visible, and those that it asks Slurm for, if Ray starts on them."""
    text, first = "\n".join(shell.texts), "\n".join(shell.texts[:1])
    slurm = " ".join(SLURM.findall("".join(COMMENTS.findall(first)[:1])))
    if "RAY_ADDRESS" in shell.variables or REMOTE.search(text) or "hetjob" in slurm:
        return
    if IDS.fullmatch(value := exports.get(VISIBLE, "")) and not CLUSTER.search(text):
        yield Machines(f"{VISIBLE}={value}", 1, value.count(",") + 1)
    nodes, gpus = ([*pattern.finditer(slurm)][-1:] for pattern in (NODES, GPUS_PER_NODE))
    if nodes or gpus:
        said = " ".join(one[0] for one in (*nodes, *gpus))
        yield Machines(f"#SBATCH {said}", *(int(found[0][1]) if found else None for found in (nodes, gpus)))


def _setting_of(word: str) -> str:
    return UNKNOWN.sub("", word.partition("=")[0]).lstrip("+") or f"words of {_causes(word)}"


def entry_of(words: Sequence[str]) -> int | None:
    """Returns the index of the entry point: the module behind `-m`, or a file that Python starts, with a usual name or
    with two of verl's settings behind it."""
    found = None
    for index, word in enumerate(words[1:], 1):
        by_python = any(PYTHON.fullmatch(one) or UNKNOWN.fullmatch(one) for one in words[:index])
        if words[index - 1] in ("-m", "--module") or (by_python and word.endswith(".py") and "=" not in word):
            if STARTS.fullmatch(word):
                return index
            found = index if sum(map(bool, map(SETTING.match, words[index:]))) > 1 else found
    return found


def _unknown(cause: str) -> str:
    cause = re.sub(r"\$\{(\w+)\}", r"$\1", UNKNOWN.sub("", cause))
    return f"\ue000{BLANK.join(cause.split())}\ue001"


def _causes(text: str) -> str:
    return ", ".join(dict.fromkeys(UNKNOWN.findall(text))).replace(BLANK, " ")


class _EndedError(Exception):
    """The script exits, at this line."""


class _ReturnedError(Exception):
    """A function returns."""


class _Shell:
    """Follows a script. Copies of it follow a branch; they share what was found."""

    def __init__(self, environ: Mapping[str, str], script: Path, arguments: Sequence[str]) -> None:
        self.variables: dict[str, str | list[str]] = {**environ, "PWD": str(Path.cwd())}
        self.script, self.arguments, self.first_line = script, list(arguments), 1
        self.functions: dict[str, Node] = {}
        self.found: list[Launch] = []
        self.exports: set[str] = set()
        self.texts, self.piped = list[str](), False  # piped: behind a launch, in its pipeline
        self.unparsed, self.joined = list[int](), list[int]()
        self.printed: list[str] = []
        self.places: dict[str, str] = {}
        self.depth = 0

    def copy(self) -> "_Shell":
        other = _Shell.__new__(_Shell)
        other.__dict__ |= self.__dict__
        other.variables, other.arguments, other.printed = dict(self.variables), list(self.arguments), []
        other.exports = set(self.exports)
        other.depth += 1
        if other.depth > 50:
            raise RecursionError("it calls itself")
        return other

    # Statements

    def run_text(self, text: str) -> Status:
        self.texts.append(text)
        plain, self.joined = _as_grammar_reads(text)
        return self.run(_parsed(plain))

    def line(self, node: Node) -> int:
        line = node.start_point[0]
        for joined in self.joined:
            line += joined < line
        return self.first_line + line

    def note(self, value: str | list[str], node: Node) -> None:
        """Keeps where the unknown parts of a value stand first."""
        for cause in UNKNOWN.findall("".join(value)):
            self.places.setdefault(cause, f"{self.script.name}, line {self.line(node)}")

    def apart(self, way: "Callable[[_Shell], Any]") -> "_Shell":
        """Follows it in a subshell, which it returns."""
        other = self.copy()
        with contextlib.suppress(_EndedError, _ReturnedError):
            way(other)
        return other

    def run_all(self, nodes: Iterable[Node]) -> Status:
        status: Status = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                status = self.run(node)
        return status

    def run(self, node: Node) -> Status:
        match node.type:
            case "command":
                return self.command(node)
            case "variable_assignment":
                self.assign(node)
            case "declaration_command":
                exported = node.children[0].type in ("export", "declare") and b"local" not in node.text[:6]
                for child in node.named_children:
                    name = self.assign(child) if child.type == "variable_assignment" else child.text.decode()
                    if exported and child.type.startswith("variable"):
                        self.exports.add(name)
            case "unset_command":
                for child in node.named_children:
                    self.variables.pop(child.text.decode(), None)
            case "list":
                return self.run_list(*(child for child in node.children if child.type != "comment"))
            case "if_statement":
                self.choose(_clauses(node))
            case "case_statement":
                self.run_case(node)
            case "for_statement":
                self.run_for(node)
            case "while_statement":
                status = self.run(node.child_by_field_name("condition"))
                body = node.child_by_field_name("body")
                if status is not False:
                    self.branch(node, str(status), lambda one: one.run(body), lambda one: None)
            case "function_definition":
                self.functions[node.child_by_field_name("name").text.decode()] = node.child_by_field_name("body")
            case "subshell":
                self.apart(lambda other: other.run_all(node.children))
                return "a subshell"
            case "negated_command":
                status = self.run_all(node.children)
                return status if isinstance(status, str) else not status
            case "test_command":
                return self.test(node.named_children[0]) if node.named_children else node.text.decode()
            case "compound_statement" if node.children[0].type == "((":
                value = self.arithmetic(node.named_children)
                return _causes(value) or value != "0"
            case "pipeline":
                found = len(self.found)
                for child in node.children:
                    self.piped = len(self.found) > found
                    self.run_all([child])
                self.piped = False
                self.printed = [_unknown(node.text.decode())]
                return node.text.decode()
            case "heredoc_redirect":
                self.run_all(child for child in node.children if child.type in ("pipeline", "list", "command"))
            case "redirected_statement":
                status, *_ = [self.run(child) for child in node.named_children if child.type != "file_redirect"]
                return status
            case _:
                if node.type == "ERROR":
                    self.unparsed.append(self.line(node))
                return self.run_all(node.children)
        return True

    def run_list(self, left: Node, operator: Node, right: Node) -> Status:
        """Follows `a && b` and `a || b`. A command in front of `&&` is expected to succeed, an unknown test is not."""
        status = self.run(left)
        if isinstance(status, bool):
            return self.run(right) if status is (operator.type == "&&") else status
        if operator.type == "||":
            self.branch(left, status, lambda one: None, lambda one: one.run(right))
        elif left.type in ("command", "redirected_statement", "pipeline"):
            self.run(right)
        else:
            self.branch(left, status, lambda one: one.run(right), lambda one: None)
        return status

    def choose(self, clauses: Sequence[tuple[list[Node], list[Node]]]) -> None:
        """Follows the first clause whose condition is true; an empty condition is `else`."""
        if not clauses:
            return
        (condition, body), *rest = clauses
        status = self.run_all(condition)
        if isinstance(status, str):
            self.branch(condition[0], status, lambda one: one.run_all(body), lambda one: one.choose(rest))
        elif status:
            self.run_all(body)
        else:
            self.choose(rest)

    def branch(self, node: Node, cause: str, *ways: "Callable[[_Shell], Any]") -> None:
        """Follows each way; what differs afterwards is not known."""
        self.note(_unknown(cause), node)
        ends = []
        for way in ways:
            other = self.copy()
            try:
                way(other)
                ends.append(other)
            except _EndedError as error:
                ended = error
        if not ends:
            raise ended
        for name in {name: None for end in ends for name in end.variables}:
            values = [end.variables.get(name, "") for end in ends]
            if all(value == values[0] for value in values):
                self.variables[name] = values[0]
            elif all(isinstance(value, list) for value in values):
                same = takewhile(lambda items: len({*items}) == 1, zip(*values, strict=False))
                self.variables[name] = [*(items[0] for items in same), _unknown(cause)]
            else:
                self.variables[name] = _unknown(cause)
        if any(end.printed for end in ends):
            self.printed.append(_unknown(cause))

    def run_case(self, node: Node) -> None:
        value = self.text(node.child_by_field_name("value"))
        ways, complete = [], False
        for item in node.children:
            if item.type != "case_item":
                continue
            end = next(index for index, child in enumerate(item.children) if child.type == ")")
            patterns = [self.text(child) for child in item.children[:end] if child.is_named]
            body = item.children[end + 1 :]
            if not UNKNOWN.search(value) and any(fnmatchcase(value, pattern) for pattern in patterns):
                self.run_all(body)
                return
            ways.append(lambda one, body=body: one.run_all(body))
            complete |= "*" in patterns
        if UNKNOWN.search(value):
            self.branch(node, _causes(value), *ways, *([] if complete else [lambda one: None]))

    def run_for(self, node: Node) -> None:
        name, body = node.child_by_field_name("variable").text.decode(), node.child_by_field_name("body")
        values = [word for child in node.children_by_field_name("value") for word in self.words(child)]
        for value in values[:MOST_TURNS]:
            self.variables[name] = value
            self.run(body)

    def assign(self, node: Node) -> str:
        """Sets a variable; returns its name."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, new = target.text.decode(), self.value(value)
        if any(child.type == "+=" for child in node.children):
            old = self.variables.get(name, [] if isinstance(new, list) else "")
            if isinstance(new, list) or isinstance(old, list):
                new = [*([old] if isinstance(old, str) else old), *([new] if isinstance(new, str) else new)]
            else:
                new = old + new
        self.variables[name] = new
        self.note(new, node)
        return name

    def value(self, node: Node | None) -> str | list[str]:
        if node is None:
            return ""
        if node.type == "array":
            return [word for child in node.named_children if child.type != "comment" for word in self.words(child)]
        return self.home(self.text(node)).replace(FIELD, " ")

    def home(self, text: str) -> str:
        return f"{self.variables.get('HOME', _unknown('$HOME'))}{text[1:]}" if text.startswith("~/") else text

    # Commands

    def command(self, node: Node) -> Status:
        words, own, before = list[str](), set[str](), dict(self.variables)
        named = node.child_by_field_name("name") or node
        for child in node.named_children:
            if child.type == "variable_assignment":
                name = self.assign(child)
                between = node.text[child.end_byte - node.start_byte : max(named.start_byte - node.start_byte, 0)]
                if b"\n" not in between.replace(b"\\\n", b""):  # else a line before, which the grammar takes as this
                    own.add(name)
            elif child.type == "heredoc_redirect":
                self.run(child)
            elif child.type not in ("comment", "file_redirect", "herestring_redirect"):
                words += (new := self.words(child))
                self.note(new, child)
        if not words:
            return True
        added = own - self.exports
        self.exports |= own
        status = self.execute(words, f"{self.script.name}, line {self.line(node)}", node.text.decode())
        for name in own:  # which only this command has
            self.variables.pop(name, None)
        self.variables |= {name: before[name] for name in own & before.keys()}
        self.exports -= added
        return status

    def execute(self, words: list[str], where: str, text: str) -> Status:
        """Follows a command as far as it matters here; returns its status, or `text` if that is not known."""
        name, rest = words[0], words[1:]
        if name in self.functions:
            arguments, self.arguments = self.arguments, rest
            self.depth += 1
            try:
                if self.depth > 50:
                    raise RecursionError("a function calls itself")
                self.run(self.functions[name])
            except _ReturnedError:
                pass
            finally:
                self.arguments = arguments
                self.depth -= 1
            return text
        match name:
            case "exit":
                raise _EndedError(where.rpartition(" ")[2])
            case "return":
                raise _ReturnedError
            case "false":
                return False
            case "shift":
                del self.arguments[: int(rest[0]) if rest and rest[0].isdigit() else 1]
            case "cd" if rest:
                self.variables["PWD"] = self.path(rest[-1])
            case "read" | "mapfile" | "readarray" | "getopts":
                self.variables |= {word: _unknown(f"${word}") for word in rest if word.isidentifier()}
            case "eval":
                return self.run_text(" ".join(rest))
            case "echo" | "printf":
                self.printed.append(" ".join(word for word in rest if word not in ("-n", "-e")))
            case "pwd":
                self.printed.append(str(self.variables["PWD"]))
            case "dirname" | "basename":
                self.printed.append(self.of_path(name, [word for word in rest if word != "--"], text))
        if name in SILENT or name in ("echo", "printf", "pwd", "dirname", "basename"):
            return True
        if (index := entry_of(words)) is not None:
            exports = {
                one: said for one in sorted(self.exports) if isinstance(said := self.variables.get(one, ""), str)
            }
            self.found.append(Launch(words[index + 1 :], where, words[index], exports=exports))
            return text
        alone = NO_COMMAND.match(name)
        if self.found and (alone or self.piped) and name not in FILTERS:
            to, lost = f"{'a command of its own' if alone else name} ({where})", NO_COMMAND if alone else SETTING
            self.found[-1].lost.update((_setting_of(word), to) for word in words if lost.match(word))
        if PYTHON.fullmatch(name) and rest[:1] == ["-c"] and (probe := PROBE.fullmatch(rest[-1])):
            return importlib.util.find_spec(probe[1]) is not None  # whether `import NAME` would work
        self.printed.append(_unknown(text))
        for index, word in enumerate(words):
            if " " in word and COMMAND_TEXT.search(word):
                self.follow_text(word, int(where.rpartition(" ")[2]) if where[-1].isdigit() else 1)
            elif index == 0 or words[index - 1] in SCRIPTS:
                self.call(word, words[index + 1 :], own=name in ("source", "."))
        return text

    def follow_text(self, text: str, first_line: int) -> None:
        """Follows commands that another one has as text, such as `bash -c`."""

        def follow(other: "_Shell") -> None:
            other.first_line = first_line
            other.run_text(text)

        self.apart(follow)

    def call(self, word: str, arguments: list[str], *, own: bool) -> None:
        """Follows another script; its variables stay if it is sourced."""
        places = [Path(self.path(word)), self.script.parent / word]
        file = next((one for one in places if one.suffix in (".sh", ".bash", ".env") and one.is_file()), None)
        if UNKNOWN.search(word) or file is None:
            return

        def follow(other: "_Shell") -> None:
            other.script, other.arguments, other.first_line = file, arguments, 1
            other.run_text(file.read_text(encoding="utf-8", errors="replace"))

        other = self.apart(follow)
        if own:
            self.variables = other.variables

    def path(self, word: str) -> str:
        return os.path.normpath(Path(str(self.variables["PWD"])) / word)

    def of_path(self, name: str, words: list[str], text: str) -> str:
        if not words or UNKNOWN.search("".join(words)):
            return _unknown(text)
        folder, _, last = words[0].rstrip("/").rpartition("/")
        return last.removesuffix(words[1] if len(words) > 1 else "") if name == "basename" else folder or "."

    # Tests and numbers

    def test(self, node: Node) -> Status:
        """Returns the truth of what stands in `[ ]` or `[[ ]]`."""
        children, said = node.children, node.text.decode()
        if node.type == "parenthesized_expression":
            return self.test(node.named_children[0])
        if node.type == "unary_expression":
            operator = children[0].text.decode()
            if operator == "!":
                status = self.test(children[1])
                return status if isinstance(status, str) else not status
            value = self.text(children[1])
            if cause := _causes(value):
                return cause
            if operator in ("-n", "-z"):
                return bool(value) is (operator == "-n")
            if operator in ("-f", "-d", "-e", "-s", "-r"):
                kind = {"-f": "is_file", "-d": "is_dir"}.get(operator, "exists")
                return getattr(Path(self.path(value)), kind)() or said  # another machine may have it
            return said
        if node.type != "binary_expression":
            value = self.text(node)
            return _causes(value) or bool(value)
        operator = children[1].text.decode()
        if operator in ("&&", "||", "-a", "-o"):
            decided = operator in ("||", "-o")
            both = [self.test(children[0]), self.test(children[2])]
            if decided in both:
                return decided
            return next((one for one in both if isinstance(one, str)), not decided)
        left, right = self.text(children[0]), self.text(children[2])
        if cause := _causes(left + right):
            return cause
        if operator in ("=", "==", "!="):
            literal = children[2].type in ("string", "raw_string")
            return (left == right if literal else fnmatchcase(left, right)) is (operator != "!=")
        try:
            return NUMBERS[operator](int(left), int(right)) if operator != "=~" else bool(re.search(right, left))
        except (KeyError, ValueError, re.error):
            return said

    def arithmetic(self, nodes: Iterable[Node]) -> str:
        """Returns the value of `$(( ))`, with bash's whole numbers."""
        text = " ".join(self.term(node) for node in nodes)
        if UNKNOWN.search(text):
            return _unknown(_causes(text))
        tokens = ARITHMETIC.findall(text)
        try:
            if "".join(tokens) != "".join(text.split()):
                raise ValueError
            # Only numbers and operators are left, apart from each other, so that there are no powers and shifts.
            return str(int(eval(" ".join(AS_PYTHON.get(token, token) for token in tokens), {"__builtins__": {}})))
        except (SyntaxError, ValueError, ArithmeticError, TypeError):
            return _unknown(f"$(({text}))")

    def term(self, node: Node) -> str:
        if node.type == "variable_name":
            return self.expand(node.text.decode(), quoted=True)
        if node.type in ("simple_expansion", "expansion", "command_substitution") or not node.children:
            return self.text(node)
        return " ".join(self.term(child) for child in node.children)

    # Words

    def words(self, node: Node) -> list[str]:
        """Returns the words that a node gives, without empty ones."""
        return [self.home(word) for word in self.text(node).split(FIELD) if word]

    def text(self, node: Node | None, quoted: bool = False) -> str:
        """Returns a node's text; FIELD is where it falls apart into words."""
        if node is None:
            return ""
        said = node.text.decode().lstrip()
        match node.type:
            case "raw_string":
                return said[1:-1]
            case "string":
                return self.inside(node)
            case "simple_expansion":
                return self.expand(said[1:], quoted)
            case "expansion":
                return self.expand(said[2:-1], quoted)
            case "arithmetic_expansion":
                return self.arithmetic(node.named_children)
            case "command_substitution":
                printed = "\n".join(self.apart(lambda one: one.run_all(node.children)).printed)
                return _unknown(said) if UNKNOWN.search(printed) else _split_words(printed, quoted)
            case "concatenation" | "command_name":
                return "".join(self.text(child, quoted) for child in node.children)
        return re.sub(r"\\\n|\\(.)", r"\1", said)

    def inside(self, node: Node) -> str:
        """Returns what stands in double quotes. Blanks can stand between the grammar's nodes, or begin one."""
        said, end, parts = node.text, 1, []
        for child in node.children[1:-1]:
            raw, start = child.text, child.start_byte - node.start_byte
            parts.append((said[end:start] + raw[: len(raw) - len(raw.lstrip())]).decode())
            plain = child.type == "string_content" or not child.is_named
            parts.append(_unescaped(raw.lstrip().decode()) if plain else self.text(child, True))
            end = child.end_byte - node.start_byte
        return "".join([*parts, said[end:-1].decode()])

    def lookup(self, name: str) -> str | list[str] | None:
        """Returns a parameter's value; None if it is not set."""
        if name in ("@", "*"):
            return self.arguments
        if name == "#":
            return str(len(self.arguments))
        if name == "BASH_SOURCE" or name == "0":
            return str(self.script)
        if name.isdigit():
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else None
        return self.variables.get(name)

    def expand(self, text: str, quoted: bool) -> str:
        """Returns the value of `${text}`."""
        parts = EXPANSION.fullmatch(text)
        if parts is None:
            return _unknown(f"${{{text}}}")
        name, index, operator, rest = parts["name"], parts["index"], parts["operator"] or "", parts["rest"] or ""
        value = self.lookup(name)
        whole = index in ("@", "*") or name in ("@", "*")
        if isinstance(value, list) and not whole:
            place = index or "0"
            if not place.isdigit():
                return _unknown(f"${{{text}}}")
            value = value[int(place)] if int(place) < len(value) else None
        if whole and not operator:
            values = [value] if isinstance(value, str) else value or []
            if parts["length"]:
                return str(len(values))
            if "*" in (index, name):
                return _split_words(" ".join(values), quoted)
            return FIELD.join(values if quoted else [_split_words(one, False) for one in values])
        if isinstance(value, list):
            value = FIELD.join(value) or None
        if operator in ("-", ":-", "=", ":=", "+", ":+"):
            given = bool(value) if operator.startswith(":") else value is not None
            if operator.endswith("+"):
                return self.default(rest, quoted) if given else ""
            if not given:
                value = self.default(rest, quoted)
                value = _unknown(f"${name}") if UNKNOWN.fullmatch(value) else value
                if operator.endswith("="):
                    self.variables[name] = value.replace(FIELD, " ")
                return value
        elif value is None:
            return _unknown(f"${name}")
        elif operator and not operator.endswith("?"):
            value = _unknown(f"${{{text}}}") if UNKNOWN.search(value) else self.changed(value, operator, rest)
        if parts["length"]:
            return str(len(value or ""))
        return _split_words(value or "", quoted)

    def changed(self, value: str, operator: str, rest: str) -> str:
        """Returns a value that an operator cuts, or replaces parts of."""
        if operator in (",,", "^^"):
            return value.lower() if operator == ",," else value.upper()
        if operator[0] == "/":
            old, _, new = (self.default(part, True) for part in rest.partition("/"))
            return value.replace(old, new, -1 if operator == "//" else 1)
        pattern, cuts = self.default(rest, True), range(len(value) + 1)
        front = operator[0] == "#"
        fitting = [cut for cut in cuts if fnmatchcase(value[:cut] if front else value[cut:], pattern)]
        if not fitting:
            return value
        cut = max(fitting) if (operator in ("##", "%")) else min(fitting)
        return value[cut:] if front else value[:cut]

    def default(self, text: str, quoted: bool) -> str:
        """Returns the text of a default. It is parsed again, because the grammar reads quotes in it wrongly."""
        assignment = _parsed(f'x="{text}"' if quoted else f"x=({text}\n)").children[0]
        value = self.value(assignment.child_by_field_name("value"))
        return value if isinstance(value, str) else FIELD.join(value)


def _parsed(text: str) -> Node:
    return Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node


def _as_grammar_reads(text: str) -> tuple[str, list[int]]:
    """Returns a script that the grammar reads as bash reads this one, and the lines that were joined with the next one.

    The grammar ends a word at a backslash before a newline, and at `$name` behind an open bracket, not at `${name}`.
    """
    parts, joined, within, here, place = list[str](), list[int](), [""], "", 0
    while one := LEXEME.search(text, place):
        parts.append(text[place : one.start()])
        kind, said, place, top = one.lastgroup, one[0], one.end(), within[-1]
        plain = top != '"' and (top != "}" or '"' not in within)  # else quotes and comments are text
        before = next((part[-1] for part in reversed(parts) if part), "\n")
        in_word = kind == "comment" and not (before.isspace() or before in ";&|(")  # goes on from the line before
        if (kind in ("raw", "ansi", "comment", "end") and not plain) or in_word:
            said, place = said[0], one.start() + 1
        elif kind == "toggle":
            within = within[:-1] if top == said else [*within, said]
        elif kind == "open" and (plain or said != "("):
            within.append("}" if said == "${" else ")")
        elif kind == "close" and top == said:
            within.pop()
        elif kind == "end":
            here = one["end"]
        elif kind == "line" and here:
            body = re.compile(rf"(?:.*\n)*?\t*{here}$", re.MULTILINE).match(text, place)
            said, place, here = (said + body[0], body.end(), "") if body else (said, place, "")
        elif kind == "join":
            line = text.count("\n", 0, one.start())
            joined, said = [*joined, *range(line, line + said.count("\n"))], ""
        elif kind == "name" and top != '"':
            said = f"${{{one['name']}}}"
        parts.append(said)
    return "".join([*parts, text[place:]]), joined


def _split_words(text: str, quoted: bool) -> str:
    return text if quoted else FIELD.join(text.split())


def _unescaped(text: str) -> str:
    """Returns the text of double quotes."""
    return re.sub(r'\\\n|\\([$`"\\])', r"\1", text)


def _clauses(node: Node) -> list[tuple[list[Node], list[Node]]]:
    """Returns the conditions and bodies of an `if`, its `elif`s and its `else`."""
    parts: tuple[list[Node], list[Node]] = ([], [])
    clauses, into = [parts], parts[0] if node.type != "else_clause" else parts[1]
    for child in node.children:
        if child.type == "then":
            into = parts[1]
        elif child.type in ("elif_clause", "else_clause"):
            clauses += _clauses(child)
        elif child.is_named:
            into.append(child)
    return clauses
