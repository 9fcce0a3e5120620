"""Follows a function of verl or an engine through its source, as far as settings decide, to the error that it raises.

Nothing is executed. What the settings do not decide is UNKNOWN, and so is all that is made of it; what follows an
undecided return is not followed. So each error found is raised if the function comes to it: each assert is judged as
if those before it held.
"""

import ast
import builtins
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

Method = ast.FunctionDef | ast.AsyncFunctionDef
DEEPEST = 8  # methods that call each other


class Facts(dict[str, Any]):
    """The known attributes of an object."""


@dataclass(frozen=True)
class Refusal:
    """An error that a method would raise, or a warning that it would log.

    Attributes:
        method: where that is.
        said: its text, with "..." for what is not known.
        settings: those that its conditions read.
        mends: a setting and the value with which the last condition would be another one; None if it shows none.
    """

    method: str
    said: str
    settings: tuple[str, ...]
    stops: bool = True
    mends: tuple[str, Any] | None = None


class _Unknown:
    def __repr__(self) -> str:
        return "..."


UNKNOWN = _Unknown()
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
PURE = {name: getattr(builtins, name) for name in ("abs", "bool", "float", "int", "len", "max", "min", "set", "str")}
TYPES = {name: getattr(builtins, name) for name in ("bool", "float", "int", "list", "str", "tuple")}
SAME = ("omega_conf_to_dataclass",)  # functions that return what they are given
WARNS = ("warn", "warning")
CHANGING = ("append", "clear", "extend", "insert", "pop", "remove", "setdefault", "sort", "update")
OF_TEXT = ("endswith", "lower", "lstrip", "rstrip", "split", "startswith", "strip", "upper")


def refused_by(
    classes: Iterable[ast.ClassDef],
    called: Sequence[str],
    attributes: Mapping[str, Any],
    settings: Mapping[str, str],
    imported: Callable[[str], Method | None] = lambda name: None,
) -> list[Refusal]:
    """Returns the errors that methods would raise which are called one after the other.

    Args:
        classes: the class and its bases, the class first.
        called: the methods.
        attributes: the known attributes of `self` and arguments of the method, by name.
        settings: the settings whose values these are, by name; "" for the whole config.
        imported: returns a function of another file that the methods call by this name; None if it is not known.
    """
    methods: dict[str, list[Method]] = {}
    for node in (node for one in classes for node in one.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            methods.setdefault(node.name, []).append(node)
    places: dict[str, str | None] = {**settings, **{f"self.{name}": one for name, one in settings.items()}}
    reader = _Reader(methods, Facts(attributes), places, imported)
    with suppress(StopError):
        for method in called if methods else ():
            reader.call(method, 0)
    return reader.found


class StopError(Exception):
    """Nothing after this is reached."""


class ReturnError(Exception):
    """A method has returned, or may have."""


@dataclass
class _Reader:
    """One class whose methods are followed.

    Attributes:
        methods: name -> its definitions in the class and in its bases.
        settings: the setting that a name has, or an attribute of `self`.
        written: setting -> the value that a method has given it.
        conditions: what had to be true, or false, to come here.
    """

    methods: Mapping[str, list[Method]]
    this: Facts
    settings: dict[str, str | None]
    imported: Callable[[str], Method | None]
    found: list[Refusal] = field(default_factory=list)
    conditions: list[tuple[ast.expr, bool]] = field(default_factory=list)
    stack: list[tuple[str, int]] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)

    def call(self, method: str, base: int, given: ast.Call | None = None) -> None:
        """Follows a method of the class, or of its base with this number.

        Args:
            given: the call; without one, arguments have the values of the attributes with their names.
        """
        if len(self.stack) == DEEPEST:
            raise StopError
        node, outer = self.methods[method][base], (self.names, self.settings, self.conditions)
        names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs) if each.arg != "self"]
        values: dict[str, Any] = {name: self.this.get(name, UNKNOWN) for name in names}
        if given is not None:
            passed = dict(zip(names, given.args, strict=False)) | {each.arg: each.value for each in given.keywords}
            values = {name: self.value(passed[name]) if name in passed else UNKNOWN for name in names}
            places = {name: self.setting(passed[name]) if name in passed else None for name in names}
            self.settings = {name: one for name, one in self.settings.items() if name.startswith("self.")} | places
        self.names, self.conditions = {"self": self.this} | values, [*self.conditions]
        self.stack.append((method, base))
        try:
            self.block(node.body)
        except ReturnError:
            pass
        finally:
            of_self = {name: one for name, one in self.settings.items() if name.startswith("self.")}
            self.names, self.settings, self.conditions = outer[0], outer[1] | of_self, outer[2]
            self.stack.pop()

    def block(self, statements: Iterable[ast.stmt], condition: tuple[ast.expr, bool] | None = None) -> None:
        self.conditions += [condition] if condition else []
        for statement in statements:
            self.statement(statement)
        self.conditions = self.conditions[:-1] if condition else self.conditions

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.store(target, self.value(value), self.setting(value))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.store(target, self.value(value), self.setting(value))
            case ast.If(test=test, body=body, orelse=orelse):
                truth = self.truth(test)
                if truth is UNKNOWN:
                    self.skip(node)
                else:
                    self.block(body if truth else orelse, (test, truth))
            case ast.Assert(test=test, msg=said):
                if self.truth(test) is False:
                    self.refuse(
                        self.value(said) if said else f"assert {ast.unparse(test)}", [test], mends=self.mend(test, True)
                    )
            case ast.Raise(exc=error):
                said = error.args[0] if isinstance(error, ast.Call) and error.args else None
                mends = self.mend(self.conditions[-1][0], not self.conditions[-1][1]) if self.conditions else None
                self.refuse(self.value(said) if said else ast.unparse(node), [], mends=mends)
                raise StopError
            case ast.Return():
                raise ReturnError
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.names[name] = UNKNOWN
            case ast.With(body=body) | ast.Try(body=body, handlers=[]):
                self.block(body)
            case ast.Expr(value=value):
                self.value(value)
            case _:
                self.skip(node)

    def refuse(
        self, said: Any, conditions: list[ast.expr], stops: bool = True, mends: tuple[str, Any] | None = None
    ) -> None:
        tests = [*(test for test, _ in self.conditions), *conditions]
        nodes = (each for test in tests for each in ast.walk(test))
        read = dict.fromkeys(filter(None, (self.setting(each) for each in nodes if isinstance(each, ast.expr))))
        settings = tuple(one for one in read if not any(other.startswith(f"{one}.") for other in read))
        self.found.append(Refusal(self.stack[-1][0], str(said), settings, stops, mends))

    def mend(self, test: ast.expr, wanted: bool) -> tuple[str, Any] | None:
        """Returns a setting and the value with which a test is true, or false, if it compares that one with a value."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.mend(operand, not wanted)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                setting, bound = self.setting(left), self.value(right)
                if not setting or not isinstance(bound, bool | int | str):
                    return None
                if isinstance(op, (ast.Eq, ast.GtE) if wanted else (ast.NotEq, ast.Lt)):
                    return setting, bound
                if isinstance(op, ast.Gt if wanted else ast.LtE) and isinstance(bound, int):
                    return setting, bound + 1
            case _ if isinstance(self.value(test), bool) and (setting := self.setting(test)):
                return setting, wanted
        return None

    def lacking(self, function: str, given: Sequence[ast.expr]) -> None:
        """Refuses null settings that a function of another file needs, in a branch that another setting has opened.

        It needs an argument without a default, an annotation or a test of it.
        """
        nulls = {index: one for index, one in enumerate(given) if self.setting(one) and self.value(one) is None}
        branch, truth = self.conditions[-1] if self.conditions else (None, False)
        if not nulls or not truth or branch is None or self.setting(branch) is None:
            return
        if (called := self.imported(function)) is None:
            return
        tests: list[ast.AST] = [
            each for each in ast.walk(called) if isinstance(each, ast.Compare | ast.BoolOp | ast.UnaryOp)
        ]
        tests += [each.test for each in ast.walk(called) if isinstance(each, ast.If | ast.IfExp | ast.Assert)]
        tested = {each.id for test in tests for each in ast.walk(test) if isinstance(each, ast.Name)}
        for index, one in enumerate(called.args.args[: len(called.args.args) - len(called.args.defaults)]):
            if index in nulls and not one.annotation and one.arg not in tested:
                said = f"{function} needs {ast.unparse(nulls[index]).rpartition('.')[2]}"
                self.refuse(said, [branch, nulls[index]])

    def skip(self, node: ast.AST) -> None:
        """Forgets what a statement may change, or if it may return what all of its method may change."""
        method, base = self.stack[-1]
        may_return = any(isinstance(each, ast.Return) for each in ast.walk(node))
        for each in ast.walk(self.methods[method][base] if may_return else node):
            if isinstance(each, ast.Name | ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
                self.store(each, UNKNOWN, None)
        if may_return:
            raise ReturnError

    def store(self, target: ast.expr, value: Any, setting: str | None) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name], self.settings[name] = value, setting
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self.this[name], self.settings[f"self.{name}"] = value, setting
            case ast.Attribute() | ast.Subscript() if (place := self.setting(target)) is not None:
                self.written[place] = value
            case ast.Subscript(value=ast.Name(id=name)):
                self.names[name] = UNKNOWN
            case ast.Tuple(elts=targets):
                for one in targets:
                    self.store(one, UNKNOWN, None)

    def setting(self, node: ast.expr) -> str | None:
        """Returns the setting that an expression reads, such as `self.config.actor.strategy`; "" for a whole config."""
        match node:
            case ast.Name(id=name):
                return self.settings.get(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.settings.get(f"self.{name}")
            case (
                ast.Attribute(value=owner, attr=name) | ast.Subscript(value=owner, slice=ast.Constant(value=str(name)))
            ):
                above = self.setting(owner)
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(name)), *_]):
                above = self.setting(owner)
            case ast.BoolOp(op=ast.Or(), values=[first, *_]):  # a setting, or what stands for it
                return self.setting(first)
            case _:
                return None
        return above if above is None else f"{above}.{name}".lstrip(".")

    def truth(self, node: ast.expr) -> Any:
        """Returns whether an expression is true; one operand of `or` or `and` may decide it."""
        if isinstance(node, ast.BoolOp):
            truths, deciding = [self.truth(value) for value in node.values], isinstance(node.op, ast.Or)
            return deciding if deciding in truths else UNKNOWN if UNKNOWN in truths else not deciding
        value = self.value(node)
        return value if value is UNKNOWN else bool(value)

    def value(self, node: ast.expr) -> Any:
        """Returns the value of an expression."""
        if self.written and (place := self.setting(node)) in self.written:
            return self.written[place]
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.names.get(name, UNKNOWN)
            case ast.Attribute(value=owner, attr=name):
                return member(self.value(owner), name)
            case ast.Subscript(value=owner, slice=key):
                return member(self.value(owner), self.value(key))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self.truth(operand)
                return truth if truth is UNKNOWN else not truth
            case ast.BoolOp(op=op, values=values):
                return self.first(values, isinstance(op, ast.Or))
            case ast.BinOp(left=left, op=op, right=right):
                return self.apply(OPERATORS.get(type(op)), left, right)
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = zip([left, *others[:-1]], ops, others, strict=True)
                results = [self.apply(OPERATORS[type(op)], one, other) for one, op, other in pairs]
                return False if False in results else UNKNOWN if UNKNOWN in results else True
            case ast.IfExp(test=test, body=body, orelse=orelse):
                truth = self.truth(test)
                return truth if truth is UNKNOWN else self.value(body if truth else orelse)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                values = [self.value(element) for element in elements]
                return UNKNOWN if UNKNOWN in values else values
            case ast.Set(elts=elements):
                return self.apply(lambda *values: set(values), *elements)
            case ast.JoinedStr(values=parts):
                return "".join(_written(self.value(part)) for part in parts)
            case ast.FormattedValue(value=part):
                return self.value(part)
            case ast.Call():
                return self.called(node)
        return UNKNOWN

    def first(self, nodes: Iterable[ast.expr], is_true: bool) -> Any:
        """Returns what `or` gives, the first operand that is true or the last one; `and`, the first that is false."""
        value = None
        for value in map(self.value, nodes):
            if value is UNKNOWN or bool(value) is is_true:
                break
        return value

    def apply(self, function: Callable[..., Any] | None, *nodes: ast.expr) -> Any:
        """Returns a function's value; UNKNOWN if an argument is, or the function does not take them."""
        values = [self.value(node) for node in nodes]
        if function is None or any(value is UNKNOWN for value in values):
            return UNKNOWN
        try:
            return function(*values)
        except Exception:
            return UNKNOWN

    def called(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name):
            self.lacking(node.func.id, node.args)
        match node:
            case ast.Call(func=ast.Name(id=name), args=[one, *_]) if name in SAME:
                return self.value(one)
            case ast.Call(func=ast.Attribute(attr=name), args=[said, *values]) if name in WARNS and self.conditions:
                text, of = self.value(said), tuple(map(self.value, values))
                if of and isinstance(text, str):
                    text = re.sub("%[ds]", "{}", text).format(*of) if text.count("%") == len(of) else text
                self.refuse(text, [], False)
            case ast.Call(func=ast.Name(id=name), args=args) if name in PURE and name not in self.names:
                return self.apply(PURE[name], *args)
            case ast.Call(func=ast.Name(id="isinstance"), args=[one, ast.Name(id=name)]) if name in TYPES:
                return self.apply(lambda value: isinstance(value, TYPES[name]), one)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                return member(self.value(owner), name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="OmegaConf"), attr="select"), args=[owner, key]):
                return self.apply(OmegaConf.select, owner, key)
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[key, *default]):
                absent = self.value(default[0]) if default else None
                return member(self.value(owner), self.value(key), absent)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)) if name in self.methods:
                self.call(name, 0, node)
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name)):
                base = self.stack[-1][1] + 1
                if name == self.stack[-1][0] and base < len(self.methods[name]):
                    self.call(name, base, node)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=changes)) if changes in CHANGING:
                self.names[name] = UNKNOWN
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=args) if name in OF_TEXT:
                text = self.value(owner)
                return self.apply(getattr(text, name), *args) if isinstance(text, str) else UNKNOWN
        return UNKNOWN


def member(owner: Any, name: Any, absent: Any = UNKNOWN) -> Any:
    """Returns an attribute or an entry; `absent` if a mapping lacks it, UNKNOWN if that is not known."""
    if isinstance(owner, Facts):
        return as_verl_has_it(owner.get(name, UNKNOWN))
    try:
        if OmegaConf.is_dict(owner) or isinstance(owner, Mapping):
            return as_verl_has_it(owner.get(name, absent))
        return owner[name] if isinstance(owner, list | tuple | str) and isinstance(name, int) else UNKNOWN
    except (OmegaConfBaseException, IndexError):
        return UNKNOWN


def as_verl_has_it(value: Any) -> Any:
    """Returns a list of a config as the list that verl makes of it."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value


def _written(value: Any) -> str:
    return ", ".join(map(str, sorted(value, key=str))) if isinstance(value, set) else str(value)
