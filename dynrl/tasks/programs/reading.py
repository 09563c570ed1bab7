"""Reads the source of a program, and refuses what is not in the language before anything runs.

Python's parser recurses in C, so brackets are counted before it sees a text: beyond the bound nobody can say what
happens on which machine.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence

from dynrl.tasks.programs.budgets import MAX_NESTING, Stopped

_NODES = frozenset({
    ast.Module, ast.Expression, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign,
    ast.For, ast.While, ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue,
    ast.BoolOp, ast.And, ast.Or, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.keyword, ast.Attribute,
    ast.Constant, ast.Name, ast.Subscript, ast.Slice, ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp,
    ast.GeneratorExp, ast.comprehension, ast.Load, ast.Store,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift, ast.BitOr, ast.BitXor,
    ast.BitAnd, ast.Invert, ast.Not, ast.UAdd, ast.USub,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot, ast.In, ast.NotIn,
})  # fmt: skip
_KEYWORDS = frozenset({"default", "reverse", "start"})  # of calls
_MAX_FORS = 3  # of one comprehension
_MAX_LOOPS = 16  # within one another; Python's own compiler refuses 21

_CHARACTERS = re.compile(r"[\n\t\x20-\x7e]*")
# What brackets can hide in, as Python's tokenizer sees it, and the brackets.
_TOKEN = re.compile(
    r"""\#[^\n]*
    |(?P<prefix>(?:\b\w+)?)(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")
    |(?P<opening>[(\[{])
    |(?P<closing>[)\]}])""",
    re.VERBOSE | re.DOTALL,
)
_FORMATTED = frozenset({"f", "fr", "rf", "t", "tr", "rt"})


def read_program(source: str, max_chars: int) -> ast.Module:
    """Returns the tree of a program's statements; none for an empty source.

    Raises:
      Stopped: saying what is refused; a program that Python itself would not compile is a `syntax_error`.
    """
    tree = _parsed(source, max_chars, "exec")
    assert isinstance(tree, ast.Module)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            _check_block(node.body, in_function=True)
        else:
            _check_block([node], in_function=False)
    return tree


def read_expression(source: str, max_chars: int) -> ast.expr:
    """Returns the tree of one expression. Raises Stopped as `read_program`."""
    tree = _parsed(source, max_chars, "eval")
    assert isinstance(tree, ast.Expression)
    return tree.body


def is_literal(node: ast.expr) -> bool:
    """Whether an expression is a value written out: it calls nothing and reads no name."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return all(map(is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(key is not None and is_literal(key) for key in node.keys) and all(map(is_literal, node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.USub, ast.UAdd)) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant)


def _parsed(source: str, max_chars: int, mode: str) -> ast.AST:
    if len(source) > max_chars:
        raise Stopped("too_long", f"{len(source)} characters, more than {max_chars}")
    _check_characters(source)
    try:
        with warnings.catch_warnings():  # of escapes and of literals that touch a word
            warnings.simplefilter("ignore")
            tree = ast.parse(source, mode=mode)
    except (SyntaxError, ValueError) as error:
        raise Stopped("syntax_error", type(error).__name__) from error
    except (MemoryError, RecursionError) as error:
        raise Stopped("nested_too_deep", "the source") from error
    for node in _nodes(tree):
        _check_node(node)
    return tree


def _check_characters(source: str) -> None:
    valid = _CHARACTERS.match(source)
    assert valid
    if valid.end() < len(source):
        raise Stopped("bad_characters", f"{source[valid.end()]!a} at position {valid.end()}")
    depth = 0
    for token in _TOKEN.finditer(source):
        if token["prefix"] and token["prefix"].lower() in _FORMATTED:
            raise Stopped("not_allowed", "a formatted string")
        depth += (token["opening"] is not None) - (token["closing"] is not None)
        if depth > MAX_NESTING:
            raise Stopped("nested_too_deep", f"more than {MAX_NESTING} brackets within one another")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below the root; raises Stopped where the tree is too deep."""
    stack = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_NESTING:
            raise Stopped("nested_too_deep", f"a tree of more than {MAX_NESTING} levels")
        yield node
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))


def _check_node(node: ast.AST) -> None:
    if type(node) not in _NODES:
        raise Stopped("not_allowed", type(node).__name__)
    check = _CHECKS.get(type(node))
    problem = check(node) if check else ""
    if problem:
        raise Stopped("not_allowed", problem)


def _check_block(body: Sequence[ast.stmt], *, in_function: bool, num_loops: int = 0) -> None:
    """Checks what depends on where a statement stands; the tree's depth is bounded already."""
    if num_loops > _MAX_LOOPS:
        raise Stopped("nested_too_deep", f"more than {_MAX_LOOPS} loops within one another")
    for node in body:
        if isinstance(node, ast.FunctionDef):
            raise Stopped("not_allowed", "a function defined within a statement")
        if isinstance(node, ast.Return) and not in_function:
            raise Stopped("syntax_error", "return outside a function")
        if isinstance(node, (ast.Break, ast.Continue)) and not num_loops:
            raise Stopped("syntax_error", f"{type(node).__name__.lower()} outside a loop")
        if isinstance(node, (ast.For, ast.While, ast.If)):
            inner = num_loops + (not isinstance(node, ast.If))
            _check_block(node.body, in_function=in_function, num_loops=inner)
            _check_block(node.orelse, in_function=in_function, num_loops=num_loops)


# Each returns what is wrong with a node, or "".


def _function(node: ast.FunctionDef) -> str:
    a = node.args
    names = [arg.arg for arg in a.args]
    if len(set(names)) < len(names):
        raise Stopped("syntax_error", "two parameters of one name")
    if a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or a.defaults:
        return "parameters other than plain ones"
    annotated = node.returns or any(arg.annotation for arg in a.args) or getattr(node, "type_params", None)
    return "a decorator" if node.decorator_list else "an annotation" if annotated else _identifier(node.name)


def _constant(node: ast.Constant) -> str:
    value = node.value
    if isinstance(value, str):
        return "" if value.isascii() else "a string beyond ASCII"
    return "" if value is None or type(value) in (bool, int) else f"a {type(value).__name__}"


def _call(node: ast.Call) -> str:
    if not isinstance(node.func, (ast.Name, ast.Attribute)):
        return "a call of what an expression gives"
    others = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
    if node.args and isinstance(node.args[0], ast.GeneratorExp) and not all(map(is_literal, others)):
        return "a generator beside arguments that are no literals"
    return ""


def _keyword(node: ast.keyword) -> str:
    return "" if node.arg in _KEYWORDS else f"the keyword {node.arg or '**'}"


def _comprehended(node: ast.ListComp | ast.DictComp | ast.GeneratorExp) -> str:
    if len(node.generators) > _MAX_FORS:
        return f"a comprehension with more than {_MAX_FORS} for"
    return "an asynchronous comprehension" if any(each.is_async for each in node.generators) else ""


def _compare(node: ast.Compare) -> str:
    operands = [node.left, *node.comparators]
    for left, op, right in zip(operands, node.ops, node.comparators, strict=False):
        one = any(isinstance(x, ast.Constant) and (x.value is None or type(x.value) is bool) for x in (left, right))
        if isinstance(op, (ast.Is, ast.IsNot)) and not one:
            return "is, other than with None, True or False"
    return ""


def _identifier(name: str) -> str:
    return f"the name {name}" if name.startswith("__") else ""


_CHECKS = {
    ast.FunctionDef: _function,
    ast.arg: lambda node: _identifier(node.arg),
    ast.Name: lambda node: _identifier(node.id),
    ast.Constant: _constant,
    ast.Call: _call,
    ast.keyword: _keyword,
    ast.Compare: _compare,
    ast.ListComp: _comprehended,
    ast.DictComp: _comprehended,
    ast.GeneratorExp: _comprehended,
    ast.Dict: lambda node: "** in a dict" if None in node.keys else "",
}
