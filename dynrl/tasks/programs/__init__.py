"""Runs small programs that nobody trusts: a part of Python, interpreted, with budgets that are counts.

The program's tree is walked; nothing is compiled or handed to Python's own `eval`, and no attribute of a value is ever
looked up by a name from the program. What is not on the white lists of this package is refused by name. Every budget
is a count (`budgets.py`), never a time, so that a program ends the same way on every machine and after a restart. What
runs to its end gives what Python gives.

The language: integers, booleans, ASCII strings, None, lists, tuples, dicts and ranges; expressions, comprehensions,
assignments, `if`, `for`, `while`, functions defined at the top, and the functions and methods of `functions.py` and
`methods.py`. There is nothing in it whose outcome depends on a hash seed, on an address or on a version of Unicode:
neither floats nor sets.

Why not a package: asteval and simpleeval bound some operations but neither the steps of a program nor its memory,
RestrictedPython compiles for Python's `exec` without bounds, the bindings of Starlark offer none, and pydantic-monty's
are seconds and bytes.
"""
