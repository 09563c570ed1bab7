"""Texts that a hostile, or an untaught, policy might write in place of a program."""

import random

from random_programs import Writer

# Expressions and programs; TOUCHED stands for the path of a file that nothing may make.
CRAFTED = [
    "while True: pass", "while 1:\n    x = 1", "for x in range(10**18): pass", "9**9**9", "9**9**9**9", "1<<10**9",
    "1<<1<<99", "'a'*10**9", "[[0]*10**6]*10**6", "(0,)*10**10", "['a'*1999]*1999", "str(9**500)", "int('9'*10**6)",
    "int('1'*1999)", "'%1000000000d'%1", "'{:1000000000}'.format(1)", "f'{1:1000000000}'", "f'{9**9**9}'",
    "f'{(((((((((1)))))))))}'", "'a'.center(10**9)", "'a'.zfill(10**9)", "'a'.ljust(10**9)", "'\\t'.expandtabs(10**9)",
    "'a'.join(['a'*999]*1999)", "'a'.replace('','a'*999).replace('','a'*999)", "sorted(range(10**9))",
    "list(range(10**12))", "sum(range(10**12))", "tuple(range(10**9))", "max(range(10**9))",
    "10**9 in list(range(10**10))", "'a' in range(10**18)", "range(10**999)", "len(range(10**999))",
    "[x for a in range(999) for b in range(999) for x in range(999)]",
    "[[[[[0 for a in range(99)] for b in range(99)] for c in range(99)] for d in range(99)] for e in range(99)]",
    "{x: {y: {z: 0 for z in range(99)} for y in range(99)} for x in range(99)}", "any(x < 0 for x in range(10**12))",
    "x = 2\nwhile x: x *= x", "x = 'a'\nwhile x: x += x", "x = [1]\nwhile x: x += x",
    "x = [1]\nfor y in x: x.append(y)", "x = []\nx.append(x)\nx", "x = []\nx.append(x)\nstr(x)",
    "x = []\nx.append(x)\nx == [x]", "x = {}\nx[0] = x\nrepr(x)", "x = []\nx += [x, x]\nsorted([x, x])",
    "x = ()\nfor i in range(9999): x = (x,)\n{x: 1}", "x = []\nfor i in range(9999): x = [x]\nx",
    "x = [0]\nfor i in range(99): x = [x, x]\nx", "x = zip([1])\nfor i in range(9999): x = zip(x)\nlist(x)",
    "x = enumerate([1])\nfor i in range(9999): x = enumerate(x)\nfor y in x: pass",
    "d = {}\nfor i in range(10**9): d[i] = d", "d = {}\nfor i in range(9999): d[i*(2**61-1)] = i",
    "d = {}\nfor i in range(9999): d[(i*(2**61-1),)] = i", "d = {}\nfor k in d: d[k] = 1", "def f(): f()\nf()",
    "def f(n): return f(n-1)+f(n-1)\nf(99)", "def f(n): return [f(n) for x in [1]]\nf(1)",
    "def f(n): return sum(f(n) for x in [1])\nf(1)", "def f(a, b): return f(b, f(a, b))\nf(1, 2)",
    "def f(f): return f\nf(f)", "import os", "import os; os.system('touch TOUCHED')",
    "__import__('os').system('touch TOUCHED')", "open('TOUCHED', 'w')", "exec(\"open('TOUCHED', 'w')\")",
    "eval('9**9**9')", "compile('1', '', 'eval')", "globals()", "vars()", "getattr(1, 'real')",
    "().__class__.__bases__[0].__subclasses__()", "''.__class__.__mro__", "'{0.__class__}'.format(1)",
    "[].append.__self__", "(lambda: 1)()", "lambda f: f(f)", "(lambda f: f(f))(lambda f: f(f))",
    "(x for x in [1]).gi_frame", "(yield 1)", "await x", "[y := 1, y**2]", "print(*[1])", "f(**{})",
    "@f\ndef f(): pass", "class A: pass", "with open('TOUCHED', 'w') as f: pass", "del x", "global x",
    "try:\n    9**9**9\nexcept: pass", "raise SystemExit", "exit()", "quit()", "breakpoint()", "help()", "input()",
    "assert 0, open('TOUCHED', 'w')", "match 1:\n    case _: pass", "type('A', (), {})", "x: open('TOUCHED', 'w') = 1",
    "def f(x=open('TOUCHED', 'w')): pass", "def f() -> open('TOUCHED', 'w'): pass", "len = 5\nlen([1])",
    "sum = sum\nsum([1])", "sorted = []\nsorted.append(1)\nsorted", "[].sort(key=len)", "sorted([3, 'a'])", "{[]: 1}",
    "{{}: 1}", "[1][10**99]", "[1][::0]", "'a'[10**99]", "5()", "5[5]", "5.x", "-'a'", "~[]", "1/0", "1//0", "1%0",
    "0**-1", "2**-1", "1.5e308*10", "1j**1j", "1e999", "b'a'*10**9", "...", "None.x", "True = 1", "__debug__",
    "__name__", "__builtins__", "__class__", "self", "\\", "`ls`", "$(ls)", "(" * 5_000, "(" * 29 + ")" * 29,
    "(" * 900 + "1" + ")" * 900, "[" * 100_000, "{" * 1_999, "({[" * 600, "f(" * 28 + "1:1" + ")" * 28,
    "{1:" * 29 + "for" + "}" * 29, "(*a," * 29 + ")" * 29, "-" * 1_999 + "1", "not " * 499 + "1", "2**" * 600 + "2",
    "1+" * 999 + "1", "1 if 1 else " * 160 + "1", "a." * 999 + "a", "a[0]" + "[0]" * 480, "lambda:" * 280 + "1",
    "x=" * 900 + "1", "1<" * 900 + "1", "1," * 999, "if 1:\n 1\n" + "elif 1:\n 1\n" * 180,
    "".join(" " * i + "if 1:\n" for i in range(60)) + " " * 60 + "1", "for a in b:\n " * 5 + "pass",
    "".join(" " * i + "while 1:\n" for i in range(25)) + " " * 25 + "1", "'" * 1_999, "'''" * 666, '"' * 1_999,
    "'\\" * 999, "\\\n" * 999, "#" * 1_999, "\n" * 1_999, "\t" * 1_999, ";" * 1_999, "1;" * 999, ":" * 1_999,
    "@" * 999, "a" * 1_999, "9" * 1_999, "0x" + "f" * 1_997, "1_" * 999, "0" * 1_999, "9" * 1_000_000, "a" * 5_000_000,
    "\0", "1\0", "\0" * 1_000, "'\0'", "\ud800", "'\ud800'", "'\\ud800'", "'\\N{PILE OF POO}'",
    "\N{FULLWIDTH LATIN SMALL LETTER E}val('1')", "\N{MATHEMATICAL BOLD SMALL E}", "\N{LATIN SMALL LIGATURE FI}",
    "\N{ARABIC-INDIC DIGIT ONE}+1", "\u202e1", "\ufeff1", "\x1b[2J", "\x0c1", "1\r\n2", "\x85", "\u2028",
    "# -*- coding: utf-7 -*-\n1", "# type: ignore\n1", "#!/bin/sh", "<answer>1</answer>", "```python\n1\n```", "```",
    "```python\n```", "```\n" * 500, "",
]  # fmt: skip

# What makes the kinds run a program: its last line calls f.
PROPOSALS = [
    "def f(x):\n    while True:\n        x += 1\nf(1)", "def f(x):\n    return f(x)\nf(1)",
    "def f(x):\n    return x * 10**9\nf('a')", "def f(x):\n    return open('TOUCHED', 'w')\nf(1)",
    "def f(x):\n    x.append(x)\n    return x\nf([])", "def f(x):\n    return f\nf(1)",
    "def f(x):\n    return zip(x)\nf([1])", "def f(x):\n    return range(x)\nf(9)",
    "def f(x):\n    return x.keys()\nf({1: 2})", "def f(x):\n    return 'a' * 2000\nf(1)",
    "def f(x):\n    return [[0] * x] * x\nf(1000)", "def f(x):\n    return 9**x**x\nf(9)",
    "def f(x):\n    '''TOUCHED\n```\nWhat does'''\nf(1)", "def f(x):\n    return x\nf(open('TOUCHED', 'w'))",
    "def f(x):\n    pass\nf(f(1))", "def f(x):\n    return x\nf(1) + f(2)", "def f(x):\n    return x\nf(1)(2)", "f(1)",
    "def g(x): pass\ng(1)", "x = 1\ndef f(y): return x\nf(1)", "1+2*3", "9*9*9*9", "12//0", "12**12", "(1+2)*3",
    "1" * 50, "3142", "0" * 11, "1 2", "-1", "+1+1", "1-", "1=1", "1+1=2", ">>>", "===",
]  # fmt: skip


def hostile_texts(count: int, seed: int, touched: str) -> list[str]:
    """All of the above, then bytes, mutated programs and mixtures of pieces.

    Args:
      count: how many; at least those above.
      seed: of those that are random.
      touched: the path that none of them may make.
    """
    rng = random.Random(seed)
    programs = [f"{writer.program()}\n{writer.call()}" for writer in (Writer(rng) for _ in range(40))]
    known = [*CRAFTED, *PROPOSALS]
    texts = list(known)
    while len(texts) < count:
        which = rng.randrange(4)
        if which == 0:
            texts.append(rng.randbytes(rng.randint(1, 200)).decode("utf-8", "surrogateescape"))
        elif which == 1:
            texts.append("".join(chr(rng.randrange(32, 127)) for _ in range(rng.randint(1, 200))))
        elif which == 2:
            texts.append(_mutated(rng, rng.choice(programs)))
        else:
            pieces = [rng.choice(known)[: rng.randint(1, 60)] for _ in range(rng.randint(2, 6))]
            texts.append(rng.choice(("", "\n", " ", "(", " + ", "\n    ")).join(pieces))
    return [text.replace("TOUCHED", touched) for text in texts]


def _mutated(rng: random.Random, program: str) -> str:
    """The program with a few pieces cut out, doubled, moved or overwritten."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(program))
        piece = program[start : start + rng.randint(1, 30)]
        at = rng.randrange(len(program))
        action = rng.randrange(4)
        if action == 0:
            program = program.replace(piece, "", 1) or "x"
        elif action == 1:
            program = program[:at] + piece * rng.randint(1, 3) + program[at:]
        elif action == 2:
            program = (
                program[:at]
                + rng.choice(("999999999", "**", "*", "(", "[", "'", "\n", "while 1:", "f", "range"))
                + program[at:]
            )
        else:
            program = program[:at] + piece + program[at + len(piece) :]
    return program
