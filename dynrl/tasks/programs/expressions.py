"""Evaluates expressions: names, comprehensions, calls. What may stand in them at all is decided in `reading.py`."""

import ast
import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynrl.tasks.programs.budgets import Meter, Stopped
from dynrl.tasks.programs.functions import CONSUMERS, FUNCTIONS
from dynrl.tasks.programs.methods import METHODS
from dynrl.tasks.programs.operations import binary, compare, item_of, set_item, unary
from dynrl.tasks.programs.values import Iteration, items, kind

Comprehension = ast.ListComp | ast.DictComp | ast.GeneratorExp


class Frame(NamedTuple):
    """Where names stand: those in `local` belong here, whether they are set yet or not."""

    names: dict[str, Any]
    local: frozenset[str] | dict[str, Any]
    outer: "Frame | None"


@dataclass(frozen=True)
class Function:
    """One of the program's own."""

    parameters: tuple[str, ...]
    body: Sequence[ast.stmt]
    local: frozenset[str]


class Expressions(ABC):
    """Evaluates expressions (`value`), and sets what an assignment or a loop sets (`store`)."""

    def __init__(self, meter: Meter):
        self.meter = meter
        names: dict[str, Any] = {}
        self.module = Frame(names, names, None)
        self._targets: dict[Comprehension, frozenset[str]] = {}

    @abstractmethod
    def call(self, function: Function, args: list[Any]) -> Any:
        """Runs a function of the program's own, and returns what it returns."""

    def value(self, node: ast.expr, frame: Frame) -> Any:
        """Returns an expression's value."""
        self.meter.deepen()
        self.meter.spend()
        value = _EXPRESSIONS[type(node)](self, node, frame)
        self.meter.depth -= 1
        return value

    def store(self, target: ast.expr, value: Any, frame: Frame) -> None:
        """Assigns a value to a target, which may be several of them."""
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
        elif isinstance(target, ast.Subscript):
            container, key = self.place(target, frame)
            set_item(self.meter, container, key, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = list(zip(range(len(target.elts) + 1), items(self.meter, value), strict=False))
            if len(parts) != len(target.elts):
                raise ValueError(f"{len(target.elts)} values are expected")
            for part, (_, item) in zip(target.elts, parts, strict=True):
                self.store(part, item, frame)
        else:
            raise Stopped("not_allowed", "an assignment to an attribute")

    def _constant(self, node: ast.Constant, frame: Frame) -> Any:
        if type(node.value) is str:
            self.meter.fits(len(node.value))
        return self.meter.integer(node.value) if type(node.value) is int else node.value

    def name(self, node: ast.Name, frame: Frame) -> Any:
        """Returns what a name stands for; functions are no values."""
        found = self._look_up(node.id, frame)
        if isinstance(found, Function) or callable(found):
            raise Stopped("not_allowed", f"the function {node.id} as a value")
        return found

    def _look_up(self, name: str, frame: Frame) -> Any:
        where: Frame | None = frame
        while where is not None:
            if name in where.local:
                if name not in where.names:
                    raise UnboundLocalError(name)
                return where.names[name]
            where = where.outer
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if hasattr(builtins, name):
            raise Stopped("not_allowed", f"the name {name}")
        raise NameError(name)

    def _bool_op(self, node: ast.BoolOp, frame: Frame) -> Any:
        value = None
        for part in node.values:
            value = self.value(part, frame)
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value

    def _binary(self, node: ast.BinOp, frame: Frame) -> Any:
        left = self.value(node.left, frame)
        return binary(self.meter, type(node.op), left, self.value(node.right, frame))

    def _unary(self, node: ast.UnaryOp, frame: Frame) -> Any:
        return unary(self.meter, type(node.op), self.value(node.operand, frame))

    def _either(self, node: ast.IfExp, frame: Frame) -> Any:
        return self.value(node.body if self.value(node.test, frame) else node.orelse, frame)

    def _compare(self, node: ast.Compare, frame: Frame) -> bool:
        left = self.value(node.left, frame)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.value(comparator, frame)
            if not compare(self.meter, type(op), left, right):
                return False
            left = right
        return True

    def place(self, node: ast.Subscript, frame: Frame) -> tuple[Any, Any]:
        """Returns the container of a subscript, and the index, key or slice."""
        container, at = self.value(node.value, frame), node.slice
        if not isinstance(at, ast.Slice):
            return container, self.value(at, frame)
        return container, slice(*(part and self.value(part, frame) for part in (at.lower, at.upper, at.step)))

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        return item_of(self.meter, *self.place(node, frame))

    def _list(self, node: ast.List, frame: Frame) -> list[Any]:
        return self._values(node.elts, frame)

    def _tuple(self, node: ast.Tuple, frame: Frame) -> tuple[Any, ...]:
        return tuple(self._values(node.elts, frame))

    def _values(self, nodes: Sequence[ast.expr], frame: Frame) -> list[Any]:
        values = []
        for node in nodes:  # a comprehension would be one more of Python's frames at every level
            values.append(self.value(node, frame))
        return values

    def _dict(self, node: ast.Dict, frame: Frame) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            assert key is not None  # the reader refuses **
            at = self.value(key, frame)
            set_item(self.meter, made, at, self.value(value, frame))
        return made

    def _misplaced(self, node: ast.expr, frame: Frame) -> Any:
        what = f"the attribute {node.attr}" if isinstance(node, ast.Attribute) else f"{type(node).__name__} here"
        raise Stopped("not_allowed", what)

    def _comprehend_list(self, node: ast.ListComp, frame: Frame) -> list[Any]:
        self.meter.deepen(len(node.generators))
        made = []
        for inner in self._frames(node, frame):
            made.append(self.value(node.elt, inner))
            self.meter.fits(len(made))
        self.meter.depth -= len(node.generators)
        return made

    def _comprehend_dict(self, node: ast.DictComp, frame: Frame) -> dict[Any, Any]:
        self.meter.deepen(len(node.generators))
        made: dict[Any, Any] = {}
        for inner in self._frames(node, frame):
            key = self.value(node.key, inner)
            set_item(self.meter, made, key, self.value(node.value, inner))
        self.meter.depth -= len(node.generators)
        return made

    def _generated(self, node: ast.GeneratorExp, frame: Frame) -> Iterator[Any]:
        for inner in self._frames(node, frame):
            yield self.value(node.elt, inner)

    def _frames(self, node: Comprehension, frame: Frame) -> Iterator[Frame]:
        """Yields the frame of a comprehension whenever its targets are set for one more element."""
        if node not in self._targets:
            self._targets[node] = stored_names([generator.target for generator in node.generators])
        inner = Frame({}, self._targets[node], frame)
        first = self.value(node.generators[0].iter, frame)
        for _ in self._bound(node.generators, 0, first, inner):
            yield inner

    def _bound(self, generators: list[ast.comprehension], at: int, source: Any, frame: Frame) -> Iterator[None]:
        """Yields whenever the targets of all generators from `at` on are set and their conditions hold."""
        for item in items(self.meter, source):
            self.store(generators[at].target, item, frame)
            if not all(self.value(condition, frame) for condition in generators[at].ifs):
                continue
            if at + 1 == len(generators):
                yield
            else:
                yield from self._bound(generators, at + 1, self.value(generators[at + 1].iter, frame), frame)

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        if isinstance(node.func, ast.Attribute):
            target = self.value(node.func.value, frame)
            method = METHODS.get(type(target), {}).get(node.func.attr)
            if method is None:
                raise Stopped("not_allowed", f"the method {node.func.attr} of {kind(target)}")
            return self._call_own(node, frame, method, [target], node.func.attr == "join")
        assert isinstance(node.func, ast.Name)  # the reader refuses others
        function = self._look_up(node.func.id, frame)
        if isinstance(function, Function):
            if node.keywords:
                raise Stopped("not_allowed", "keywords of a function of the program's own")
            return self.call(function, self._values(node.args, frame))
        if not callable(function):
            raise TypeError(f"{kind(function)} is not callable")
        return self._call_own(node, frame, function, [], node.func.id in CONSUMERS)

    def _call_own(self, node: ast.Call, frame: Frame, call: Callable[..., Any], args: list[Any], consumes: bool) -> Any:
        """Calls one of this package's functions, which take the meter first; some go through a generator at once."""
        given = node.args
        levels = 0
        if consumes and given and isinstance(given[0], ast.GeneratorExp):
            levels = 2 + len(given[0].generators)
            args.append(Iteration(self._generated(given[0], frame)))
            given = given[1:]
        args += self._values(given, frame)
        keywords = {keyword.arg: self.value(keyword.value, frame) for keyword in node.keywords if keyword.arg}
        self.meter.deepen(levels)
        value = call(self.meter, *args, **keywords)
        self.meter.depth -= levels
        return value


def stored_names(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """The names that statements or targets set; what a comprehension sets is its own."""
    found = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif not isinstance(node, Comprehension):
            stack.extend(ast.iter_child_nodes(node))
    return frozenset(found)


_EXPRESSIONS: dict[type[ast.expr], Callable[..., Any]] = {
    ast.Attribute: Expressions._misplaced,  # all but a method that is called
    ast.BinOp: Expressions._binary,
    ast.BoolOp: Expressions._bool_op,
    ast.Call: Expressions._call,
    ast.Compare: Expressions._compare,
    ast.Constant: Expressions._constant,
    ast.Dict: Expressions._dict,
    ast.DictComp: Expressions._comprehend_dict,
    ast.GeneratorExp: Expressions._misplaced,  # all but the argument of a function that goes through it at once
    ast.IfExp: Expressions._either,
    ast.List: Expressions._list,
    ast.ListComp: Expressions._comprehend_list,
    ast.Name: Expressions.name,
    ast.Slice: Expressions._misplaced,  # in a tuple
    ast.Subscript: Expressions._subscript,
    ast.Tuple: Expressions._tuple,
    ast.UnaryOp: Expressions._unary,
}
