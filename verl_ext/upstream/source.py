"""A package as its source files tell of it, without importing it: what is defined where, with which parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None  # None: a variable, or foreign


class Source:
    """The package whose files lie in `folder`, called by the folder's name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax; None where there is no such module."""
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
        """What a dotted name stands for, through re-exports and base classes.

        Raises:
            LookupError: which part of it is missing.
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
        """The longest module in a dotted name, and what is asked for in it."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if self.tree(module := ".".join(parts[:end])) is not None:
                return module, parts[end:]
        raise LookupError(f"{parts[0]} is missing")

    def _top(self, module: str, name: str) -> tuple[str, Definition]:
        """(module that defines it, definition) of a name at the top of a module."""
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
        """Of a class or the classes that it is built on, as far as they are of this package."""
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
    """`self, batch, metrics`, of a function, or of a class's `__init__` without its self."""
    if isinstance(definition, ast.ClassDef):
        inits = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        return parameters(inits[0]).partition(", ")[2] if inits else ""
    if definition is None:
        return ""
    every = definition.args
    starred = [f"*{one.arg}" for one in (every.vararg,) if one] or ["*"] * bool(every.kwonlyargs)
    named = [one.arg for one in (*every.posonlyargs, *every.args)]
    return ", ".join(
        [*named, *starred, *(one.arg for one in every.kwonlyargs), *(f"**{o.arg}" for o in [every.kwarg] if o)]
    )


def mentioned(definition: "Definition | ast.Module") -> set[str]:
    """Names, attributes and strings in the body of a function or a class."""
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
    """Those that may run when the module or the class is made, the last one first: it is what a name stands for."""
    for node in reversed(body):
        blocks = [getattr(node, part, []) for part in ("finalbody", "orelse", "body")]
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in [*blocks, *(handler.body for handler in getattr(node, "handlers", []))]:
                yield from _statements(block)
        yield node


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
