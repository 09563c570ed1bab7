"""Runs programs: their statements, and the door to them (`run_program`)."""

import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dynrl.tasks.programs.budgets import Budgets, Meter, Stopped
from dynrl.tasks.programs.expressions import Expressions, Frame, Function, stored_names
from dynrl.tasks.programs.operations import augmented, item_of, set_item
from dynrl.tasks.programs.reading import read_expression, read_program
from dynrl.tasks.programs.values import items, survey

# What a program's own errors are in Python; `except` is not in the language, so they end it.
_RAISED = (ArithmeticError, LookupError, NameError, RuntimeError, TypeError, ValueError)


class Ran(NamedTuple):
    """How a run ended.

    Attributes:
      value: what the call gave: integers, strings, lists and so on, finite; None where it was refused.
      refused: "" where there is a value, else one of `budgets.REFUSALS`.
      detail: what was refused, for people; of an error that was raised, the name of its type.
      num_steps: spent until then.
    """

    value: Any
    refused: str
    detail: str
    num_steps: int


def run_program(program: str, call: str, budgets: Budgets | None = None) -> Ran:
    """Runs a program's statements, and then evaluates an expression, which may call its functions.

    Args:
      program: the statements; may be empty.
      call: the expression.
      budgets: of both together; None for those of `Budgets()`.

    Returns:
      The expression's value, or why there is none. Whatever the texts are, nothing is raised.
    """
    meter = Meter(budgets or Budgets())
    max_chars = meter.budgets.max_source_chars
    try:
        module, expression = read_program(program, max_chars), read_expression(call, max_chars)
        walker = _Walker(meter)
        walker.run(module.body, walker.module)
        value = walker.value(expression, walker.module)
        survey(meter, value)
        return Ran(value, "", "", meter.steps)
    except Stopped as stopped:
        return Ran(None, stopped.refused, stopped.detail, meter.steps)
    except RecursionError:  # the caller itself had come near Python's limit
        return Ran(None, "recursion_too_deep", "the interpreter's own", meter.steps)
    except _RAISED as error:
        return Ran(None, "raised", type(error).__name__, meter.steps)


class _Jump(NamedTuple):
    """How a statement ends that does not go on with the next one: by one of those below, or with what it returns."""

    value: Any = None


_BREAK, _CONTINUE = _Jump(), _Jump()


class _Walker(Expressions):
    """Runs statements."""

    def call(self, function: Function, args: list[Any]) -> Any:
        """Runs a function's body in a frame of its own."""
        if len(args) != len(function.parameters):
            raise TypeError(f"{len(args)} arguments for {len(function.parameters)} parameters")
        names = dict(zip(function.parameters, args, strict=True))
        jump = self.run(function.body, Frame(names, function.local, self.module))
        return None if jump is None else jump.value

    def run(self, body: Sequence[ast.stmt], frame: Frame) -> _Jump | None:
        """Runs statements up to the first one that jumps; returns its jump."""
        self.meter.deepen()
        for statement in body:
            self.meter.spend()
            jump = _STATEMENTS[type(statement)](self, statement, frame)
            if jump is not None:
                self.meter.depth -= 1
                return jump
        self.meter.depth -= 1
        return None

    def _assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self.value(node.value, frame)
        for target in node.targets:
            self.store(target, value, frame)

    def _augment(self, node: ast.AugAssign, frame: Frame) -> None:
        if isinstance(node.target, ast.Subscript):
            container, key = self.place(node.target, frame)
            old = item_of(self.meter, container, key)
            new = augmented(self.meter, type(node.op), old, self.value(node.value, frame))
            set_item(self.meter, container, key, new)
        elif isinstance(node.target, ast.Name):
            old = self.name(node.target, frame)
            new = augmented(self.meter, type(node.op), old, self.value(node.value, frame))
            frame.names[node.target.id] = new
        else:
            raise Stopped("not_allowed", "an assignment to an attribute")

    def _if(self, node: ast.If, frame: Frame) -> _Jump | None:
        return self.run(node.body if self.value(node.test, frame) else node.orelse, frame)

    def _for(self, node: ast.For, frame: Frame) -> _Jump | None:
        for item in items(self.meter, self.value(node.iter, frame)):
            self.store(node.target, item, frame)
            jump = self.run(node.body, frame)
            if jump is not None and jump is not _CONTINUE:
                return None if jump is _BREAK else jump
        return self.run(node.orelse, frame)

    def _while(self, node: ast.While, frame: Frame) -> _Jump | None:
        while self.value(node.test, frame):
            jump = self.run(node.body, frame)
            if jump is not None and jump is not _CONTINUE:
                return None if jump is _BREAK else jump
        return self.run(node.orelse, frame)

    def _define(self, node: ast.FunctionDef, frame: Frame) -> None:
        parameters = tuple(arg.arg for arg in node.args.args)
        frame.names[node.name] = Function(parameters, node.body, stored_names(node.body).union(parameters))

    def _return(self, node: ast.Return, frame: Frame) -> _Jump:
        return _Jump(None if node.value is None else self.value(node.value, frame))

    def _expression(self, node: ast.Expr, frame: Frame) -> None:
        self.value(node.value, frame)


_STATEMENTS: dict[type[ast.stmt], Callable[..., _Jump | None]] = {
    ast.Assign: _Walker._assign,
    ast.AugAssign: _Walker._augment,
    ast.Break: lambda walker, node, frame: _BREAK,
    ast.Continue: lambda walker, node, frame: _CONTINUE,
    ast.Expr: _Walker._expression,
    ast.For: _Walker._for,
    ast.FunctionDef: _Walker._define,
    ast.If: _Walker._if,
    ast.Pass: lambda walker, node, frame: None,
    ast.Return: _Walker._return,
    ast.While: _Walker._while,
}
