"""Compares our hooks with the installed versions, and with the sources of any version of verl, without importing it.

The needs are in `changes.py`, which explains them. Equal parameters do not prove that they mean the same; the tests of
docs/upstream.md do.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet

from verl_ext.base.changes import Change, Hook

PACKAGE = Path(__file__).parents[1]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None  # None: a variable, or foreign


def unmet(need: str, verl: "Source") -> str:
    """Returns what a verl lacks for a need; "" if it lacks nothing."""
    wanted, _, names = need.partition(": ")
    name, called, listed = wanted.rstrip(")").partition("(")
    try:
        found = verl.find(name)
    except LookupError as error:
        return str(error)
    if called:
        given = parameters(found)
        fits = f"{given}, ".startswith(listed.removesuffix("...")) if listed.endswith("...") else given == listed
        if not fits:
            return f"{name} takes ({given}), not ({listed})"
    if names:
        body = mentioned(found if found is not None else verl.tree(name))
        if missing := [one for one in names.split(", ") if one not in body]:
            return f"{name} no longer names {', '.join(missing)}"
    return ""


def imports(folder: Path = PACKAGE) -> Iterator[Hook]:
    """Yields what each of our files imports from verl, as needs."""
    for file in sorted(folder.rglob("*.py")):
        needs = [
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl"
            for alias in node.names
        ]
        if needs:
            name = file.relative_to(folder).as_posix()
            yield Hook(name=f"imports of {name}", file=name, needs=tuple(needs))


def broken(verl: "Source", hooks: Iterable[Hook]) -> dict[str, list[str]]:
    """Returns hook -> what it needs and this verl lacks; {} if every hook finds what it needs."""
    found = {hook.name: dict.fromkeys(unmet(need, verl) for need in hook.needs) for hook in hooks}
    return {name: list(filter(None, lacks)) for name, lacks in found.items() if any(lacks)}


def written_for_others(changes: Iterable[Change], versions: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Returns (distribution, versions that it should have) -> the changes that were written for these, of the installed
    distributions that have another version."""
    found: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        for distribution, wanted in change.versions.items():
            version = versions.get(distribution)
            if version is not None and not SpecifierSet(wanted).contains(version, prereleases=True):
                found.setdefault((distribution, wanted), []).append(change.name)
    return found


def source_of(path: Path) -> "Source":
    """Returns the source from the path of a checkout of verl's repository, of the package, or of its `__init__.py`."""
    package = path.resolve().parent if path.suffix == ".py" else path.resolve()
    return Source(package / "verl" if (package / "verl" / "__init__.py").is_file() else package)


class Source:
    """The definitions in a package's source files, with their parameters; nothing is imported.

    Args:
        folder: the package's folder, which has the package's name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Returns a module's syntax tree; None if there is no such module."""
        if module not in self._trees:
            self._trees[module] = self._parsed(module)
        return self._trees[module]

    def _parsed(self, module: str) -> ast.Module | None:
        package, *parts = module.split(".")
        if package != self.folder.name:
            return None
        place = self.folder.joinpath(*parts)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, name: str) -> Definition:
        """Returns the definition that a dotted name stands for, through re-exports and base classes.

        Raises:
            LookupError: a part of the name is missing; the message names it.
        """
        asked, path = self._split(name)
        module, found = asked, None
        for index, part in enumerate(path):
            where = ".".join([asked, *path[:index]])
            if index and not isinstance(found, ast.ClassDef):
                raise LookupError(f"{where} is no class")
            try:
                module, found = self._top(module, part) if index == 0 else self._member(module, found, part)
            except LookupError:
                raise LookupError(f"{where}.{part} is missing") from None
        return found

    def _split(self, name: str) -> tuple[str, list[str]]:
        """Returns the longest module in a dotted name, and the rest of the name."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if self.tree(module := ".".join(parts[:end])) is not None:
                return module, parts[end:]
        raise LookupError(f"{parts[0]} is missing")

    def _top(self, module: str, name: str) -> tuple[str, Definition]:
        """Returns (module that defines it, definition) of a name at the top of a module."""
        tree = self.tree(module)
        if tree is None:
            raise LookupError(module)
        for node in _statements(tree.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
                return module, None
            if isinstance(node, ast.Import) and any(name == (a.asname or a.name.split(".")[0]) for a in node.names):
                return module, None
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        try:
                            return self._top(origin, name)
                        except LookupError:
                            continue
                    if name == (alias.asname or alias.name):
                        return self._imported(origin, alias.name)
        if self.tree(f"{module}.{name}") is not None:
            return f"{module}.{name}", None
        raise LookupError(name)

    def _imported(self, origin: str, name: str) -> tuple[str, Definition]:
        if origin.split(".")[0] != self.folder.name:
            return origin, None
        return self._top(origin, name)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.folder.joinpath(*module.split(".")[1:]).is_dir()
        parts = module.split(".")
        above = parts[: len(parts) - node.level + package]
        return ".".join([*above, node.module] if node.module else above)

    def _member(self, module: str, owner: Definition, name: str) -> tuple[str, Definition]:
        """Returns (module, definition) of a class's member, its own or that of a base class in this package."""
        assert isinstance(owner, ast.ClassDef)
        for node in _statements(owner.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
                return module, None
        for base in owner.bases:
            try:
                where, found = self._top(module, ast.unparse(base).split(".")[0])
                if isinstance(found, ast.ClassDef):
                    return self._member(where, found, name)
            except LookupError:
                continue
        raise LookupError(name)


def parameters(definition: Definition) -> str:
    """Returns `self, batch, metrics` of a function, or the parameters of a class's `__init__` without its self."""
    if isinstance(definition, ast.ClassDef):
        inits = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        return parameters(inits[0]).partition(", ")[2] if inits else ""
    if definition is None:
        return ""
    every = definition.args
    names = [one.arg for one in (*every.posonlyargs, *every.args)]
    if every.vararg:
        names.append(f"*{every.vararg.arg}")
    elif every.kwonlyargs:
        names.append("*")
    names += [one.arg for one in every.kwonlyargs]
    if every.kwarg:
        names.append(f"**{every.kwarg.arg}")
    return ", ".join(names)


def mentioned(definition: "Definition | ast.Module") -> set[str]:
    """Returns the names, attributes and strings in the body of a function or a class."""
    nodes = ast.walk(definition) if definition is not None else ()
    found = set()
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.add(text)
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that may run when the module or class is made, the last one first: it defines a name."""
    for node in reversed(body):
        blocks = [getattr(node, part, []) for part in ("finalbody", "orelse", "body")]
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in [*blocks, *(handler.body for handler in getattr(node, "handlers", []))]:
                yield from _statements(block)
        yield node


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
