"""Writes random programs of the language that `dynrl.tasks.programs` runs, for comparing it with Python."""

import random
import re

KINDS = ("int", "bool", "str", "list", "tuple", "dict")
CALLS = {  # functions and methods by what they give; {kind} is an expression of that kind, {any} of any one
    "int": (
        "len({seq})", "sum({list})", "sum({list}, {int})", "min({list})", "max({int}, {int})", "abs({int})",
        "ord({str})", "int({str})", "int({bool})", "pow({int}, {small})", "pow({int}, {small}, {int})",
        "{list}.index({int})", "{list}.count({int})", "{str}.count({str})", "{str}.find({str})", "{str}.index({str})",
        "{tuple}.count({int})", "{dict}.get({int}, {int})", "max({list}, default={int})", "sum({int} for a in {seq})",
        "min({int} for a in {seq})", "{list}.pop()", "{list}.pop({small})", "{dict}.pop({int}, 7)",
        "{dict}.setdefault({int}, {int})", "g({small})", "h({list})", "int({str}, 2)", "len(str({any}))",
        "divmod({int}, {int})[{bool}]",
    ),
    "bool": (
        "any({list})", "all({seq})", "bool({any})", "{str}.isdigit()", "{str}.isalpha()", "{str}.islower()",
        "{str}.startswith({str})", "{str}.endswith({str})", "any({bool} for a in {seq} if {bool})",
        "{int} in range({int})", "all({int} // (a - 1) for a in {list})", "{any} is None",
        "({int}, {int}) in {dict}.items()", "{int} in {dict}.values()", "{any} in [{any}, {any}]", "{str} in {str}",
    ),
    "str": (
        "str({any})", "repr({any})", "chr(97 + {small})", "{str}.upper()", "{str}.title()", "{str}.strip()",
        "{str}.replace({str}, {str})", "{str}.replace({str}, {str}, {small})", "{str}.join({list})",
        "{str}.zfill({small})", "{str}.join(str(a) for a in {seq})", "{str}.join(reversed({str}))",
        "{str}.center({small}, 'x')", "min({str})", "{str}.rjust({small})", "{str}.swapcase()",
        "{str}.removeprefix({str})",
    ),
    "list": (
        "sorted({seq})", "sorted({list}, reverse={bool})", "list({seq})", "list(range({small}))",
        "list(reversed({list}))", "list(enumerate({seq}, {int}))", "list(zip({seq}, {seq}))", "{str}.split({str})",
        "{str}.split()", "{list}.copy()", "list({dict}.items())", "sorted({dict}.values())",
        "list(range({int}, {int}, {int}))[:9]", "list({str})", "list(enumerate(zip({list}, {list})))",
        "sum([{list}, {list}], [])", "sorted({int} for a in {list})", "{str}.rsplit({str}, {small})",
        "list({dict}.keys())",
    ),
    "tuple": (
        "tuple({seq})", "divmod({int}, {int})", "tuple({int} for a in {list})", "min({list}, {list}) and ({int},)",
        "{dict}.popitem()",
    ),
    "dict": (
        "dict({dict})", "dict(zip({list}, {list}))", "dict(enumerate({str}))", "{dict}.copy()",
        "dict((a, {int}) for a in {list})",
    ),
}  # fmt: skip
STATEMENTS = (
    "{list}.append({any})", "{list}.extend({seq})", "{list}.insert({int}, {any})", "{list}.sort()", "{list}.reverse()",
    "{list}.remove({int})", "{dict}.update({dict})", "{dict}.clear()", "pass",
)  # fmt: skip


class Writer:
    """Writes one program: functions g and h, and f, whose body is random. Some of what it writes raises."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.names = {kind: [f"{kind}{i}" for i in range(2)] for kind in KINDS}
        self.in_loop = False

    def program(self) -> str:
        lines = ["def g(n):", "    return 1 if n < 2 else g(n - 1) + g(n - 2)"]
        lines += ["def h(xs):", "    if not xs:", "        return 0", "    return len(xs) + h(xs[1:])"]
        parameters = ", ".join(name for names in self.names.values() for name in names)
        lines += [f"def f({parameters}):", *self.block(1, 3)]
        return "\n".join(
            [*lines, f"    return ({', '.join(name for names in self.names.values() for name in names)},)"]
        )

    def call(self) -> str:
        return f"f({', '.join(self.literal(kind) for kind in KINDS for _ in range(2))})"

    def literal(self, kind: str) -> str:
        pick = self.rng.choice
        if kind == "list":
            return f"[{', '.join(self.literal(pick(('int', 'int', 'int', 'str'))) for _ in range(pick((0, 2, 3))))}]"
        if kind == "tuple":
            return pick(("()", "(1,)", "(2, 'b')", "(3, (4, None))"))
        if kind == "dict":
            return pick(("{}", "{1: 2}", "{3: 1, 0: 'a'}", "{'k': [1], (1, 2): 5}"))
        return pick(
            {"int": ("0", "1", "2", "-3", "7", "10"), "bool": ("True", "False"), "str": ("''", "'a'", "'b a'", "'12'")}[
                kind
            ]
        )

    def value(self, kind: str, depth: int) -> str:
        """An expression that is mostly of the kind."""
        rng = self.rng
        if kind == "any" or rng.random() < 0.03:
            kind = rng.choice(KINDS)
        if kind == "seq":
            kind = rng.choice(("list", "list", "tuple", "str"))
        if kind == "small":
            return rng.choice(("0", "1", "2", "3", "5"))
        if depth <= 0 or rng.random() < 0.2:
            return self.literal(kind) if rng.random() < 0.4 else rng.choice(self.names[kind])
        if rng.random() < 0.35:
            return self.filled(rng.choice(CALLS[kind]), depth)
        return self.filled(rng.choice(self.operators(kind)), depth)

    def operators(self, kind: str) -> tuple[str, ...]:
        same = f"{{{kind}}}"
        common = (f"({same} if {{bool}} else {same})", f"({same} or {same})", f"({same} and {same})")
        number = (
            "({int} + {int})", "({int} - {int})", "({int} * {int})", "({int} // {int})", "({int} % {int})", "(-{int})",
            "({int} ** {small})", "({int} << {small})", "({int} >> {small})", "({int} & {int})", "({int} ^ {int})",
            "(~{int})", "{list}[{int}]", "{tuple}[{small}]", "{dict}[{int}]", "(+{bool})",
        )  # fmt: skip
        truth = (
            "(not {any})", "({int} < {int})", "({int} <= {int} != {int})", "({str} < {str})", "({any} == {any})",
            "({list} < {list})", "({int} in {list})", "({int} not in {dict})", "({any} != {any})", "({bool} ^ {bool})",
        )  # fmt: skip
        text = ("({str} + {str})", "({str} * {small})", "{str}[{int}]", "{str}[{int}:{int}]", "{str}[::{int}]")
        many = (
            "({list} + {list})", "({list} * {small})", "{list}[{int}:]", "{list}[::{int}]", "[{int} for a in {seq}]",
            "[a for a in {list} if {bool}]", "[{any}, {any}]", "[(a, b) for a in {list} for b in {str}]",
        )  # fmt: skip
        other = ("({any}, {any})", "({tuple} + {tuple})", "{tuple}[:{int}]", "({tuple} * {small})")
        table = ("$({int}: {any}, {str}: {any})$", "$(a: {int} for a in {seq})$", "({dict} | {dict})")
        return common + {"int": number, "bool": truth, "str": text, "list": many, "tuple": other, "dict": table}[kind]

    def filled(self, pattern: str, depth: int) -> str:
        """The pattern with an expression for each kind in it; $( and )$ are the braces of a dict."""
        text = re.sub(r"\{(\w+)\}", lambda found: self.value(found[1], depth - 1), pattern)
        return text.replace("$(", "{").replace(")$", "}")

    def block(self, level: int, depth: int) -> list[str]:
        return [line for _ in range(self.rng.randint(1, 3)) for line in self.statement(level, depth)]

    def statement(self, level: int, depth: int) -> list[str]:
        rng, pad = self.rng, "    " * level
        kind = rng.choice(KINDS)
        name = rng.choice(self.names[kind])
        choice = rng.randrange(12 if depth else 8)
        if choice < 3:
            return [f"{pad}{name} = {self.value(kind, 3)}"]
        if choice == 3:
            op = rng.choice(
                {"int": ("+", "-", "*", "//", "%", "&", "|"), "str": "+*", "list": "+*", "dict": "|"}.get(kind, "+")
            )
            right = "small" if op == "*" else "seq" if kind == "list" else kind
            return [f"{pad}{name} {op}= {self.value(right, 2)}"]
        if choice == 4:
            container = rng.choice((*self.names["list"], *self.names["dict"]))
            at = rng.choice((self.value("int", 1), f"{self.value('int', 1)}:{self.value('small', 1)}"))
            return [f"{pad}{container}[{at}] {rng.choice(('=', '=', '+='))} {self.value('any', 2)}"]
        if choice == 5:
            return [f"{pad}{self.filled(rng.choice(STATEMENTS), 2)}"]
        if choice == 6:
            first, second = rng.choice(self.names["int"]), rng.choice(self.names["str"])
            return [f"{pad}{first}, {second} = {self.value('int', 2)}, {self.value('str', 2)}"]
        if choice == 7:
            leave = rng.choice(("break", "continue")) if self.in_loop else f"return {self.value('any', 2)}"
            return [f"{pad}if {self.value('bool', 2)}:", f"{pad}    {leave}"]
        return self.compound(level, depth, choice)

    def compound(self, level: int, depth: int, choice: int) -> list[str]:
        pad = "    " * level
        if choice < 10:
            lines = [f"{pad}if {self.value('bool', 2)}:", *self.block(level + 1, depth - 1)]
            return lines + ([f"{pad}else:", *self.block(level + 1, depth - 1)] if choice == 9 else [])
        outer, self.in_loop = self.in_loop, True
        if choice == 10:
            target, source = self.rng.choice((
                ("int0", "{list}"), ("int1, str1", "enumerate({str})"), ("int0", "range({small})"),
                ("(int0, list0)", "{dict}.items()"), ("int0, int1", "zip({list}, {list})"),
            ))  # fmt: skip
            lines = [f"{pad}for {target} in {self.filled(source, 2)}:", *self.block(level + 1, depth - 1)]
        else:
            lines = [f"{pad}while len(list1) < 4 and {self.value('bool', 2)}:", f"{pad}    list1.append(0)"]
            lines += self.block(level + 1, depth - 1)
        self.in_loop = outer
        return lines + ([f"{pad}else:", *self.block(level + 1, depth - 1)] if self.rng.random() < 0.3 else [])
