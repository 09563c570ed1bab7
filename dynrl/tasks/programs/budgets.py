"""What a program may spend, and how it ends when it would spend more."""

from dataclasses import dataclass, fields

# How a program can end other than with a value.
REFUSALS = (
    "too_long",  # the source
    "bad_characters",  # the source holds others than printable ASCII, tabs and line feeds
    "syntax_error",
    "not_allowed",  # something of Python's that is not in the language, or gives a value that is not
    "nested_too_deep",  # the source, or a value in a value
    "too_many_steps",
    "too_large",  # an integer, string or container
    "recursion_too_deep",
    "raised",  # an error of the program's own, as Python raises it
)
MAX_NESTING = 30  # of the source's tree, and of values: Python's own recursion stays far away

_MOST = {
    "max_source_chars": 4_000,  # Python's parser and this package recurse over the source
    "max_steps": 1_000_000,  # seconds
    "max_depth": 200,  # two or three frames each, of the thousand that Python allows
    "max_length": 100_000,
    "max_int_bits": 4_096,  # below the 4,300 digits at which Python refuses to read or write an integer
}


@dataclass(frozen=True)
class Budgets:
    """Bounds of one run.

    Attributes:
      max_source_chars: characters of the program, and of the call.
      max_steps: statements and expressions evaluated; an element or character that an operation makes or passes over
        counts as one as well, so that steps bound time and memory alike.
      max_depth: evaluations within one another, through calls too: a recursive function takes three or more for each
        of its calls.
      max_length: elements of a container, characters of a string.
      max_int_bits: of an integer.

    Raises:
      ValueError: naming what is out of range.
    """

    max_source_chars: int = 2_000
    max_steps: int = 20_000
    max_depth: int = 200
    max_length: int = 2_000
    max_int_bits: int = 512

    def __post_init__(self):
        for field in fields(self):
            value, most = getattr(self, field.name), _MOST[field.name]
            if not 1 <= value <= most:
                raise ValueError(f"{field.name} must lie in 1 to {most}, got {value}")


class Stopped(Exception):
    """The run ends here.

    Args:
      refused: why, one of REFUSALS.
      detail: what it was, for people.
    """

    def __init__(self, refused: str, detail: str = ""):
        super().__init__(refused, detail)
        self.refused = refused
        self.detail = detail


class Meter:
    """Counts what a run spends. Every method raises Stopped where a budget is exceeded."""

    __slots__ = ("budgets", "depth", "steps")

    def __init__(self, budgets: Budgets):
        self.budgets = budgets
        self.steps = 0
        self.depth = 0

    def spend(self, steps: int = 1) -> None:
        """Counts steps."""
        self.steps += steps
        if self.steps > self.budgets.max_steps:
            raise Stopped("too_many_steps", f"more than {self.budgets.max_steps}")

    def deepen(self, levels: int = 1) -> None:
        """Counts evaluations that contain what comes next; who is done with it takes them from `depth` again.

        Where anything is raised, the run is over: nothing in the language catches.
        """
        self.depth += levels
        if self.depth > self.budgets.max_depth:
            raise Stopped("recursion_too_deep", f"more than {self.budgets.max_depth} evaluations within one another")

    def fits(self, length: int) -> None:
        """Checks the length of a string or container, before it is made where it may be huge."""
        if length > self.budgets.max_length:
            raise Stopped("too_large", f"a length above {self.budgets.max_length}")

    def made(self, length: int) -> None:
        """Checks a length, and counts so many steps."""
        self.fits(length)
        self.spend(length)

    def integer(self, value: int) -> int:
        """Checks an integer, and returns it."""
        self.bits(value.bit_length())
        return value

    def bits(self, num_bits: int) -> None:
        """Checks the size of an integer, before it is made where it may be huge."""
        if num_bits > self.budgets.max_int_bits:
            raise Stopped("too_large", f"an integer of more than {self.budgets.max_int_bits} bits")
