"""The structure that the design promises: who may import whom, and that no key and no module is dead."""

import ast
import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

from dynrl.config import RunConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dynrl"

# The controller's own modules.
PLAIN = {f"rollout.{name}" for name in ("ledger", "events", "schedules", "keep_rate", "state", "budgets")}
# What each part may import of dynrl; a prefix allows everything below it.
ALLOWED = {
    "types": set(),
    "validation": {"config"},  # for its type only
    "config": {"validation"},
    "compile_counter": set(),
    "interrupt": set(),
    "journal": set(),
    "watchdog": set(),
    "results": {"metrics"},
    "workdir": set(),
    "metrics": set(),
    "progress": {"metrics"},
    "core": {"core", "types"},
    "models": {"models", "core", "types", "config"},
    "sampling": {"sampling", "models", "types", "config"},
    "tasks": {"tasks", "types"},
    "rollout.ledger": set(),
    "rollout.events": {"rollout.ledger", "types"},
    "rollout.schedules": {"rollout.schedules", "rollout.ledger", "tasks.sources", "types", "config"},
    "rollout.keep_rate": {"rollout.ledger", "types"},
    **{f"rollout.{name}": {*PLAIN, "types", "config"} for name in ("state", "budgets", "controller")},
    "rollout.answers": {"types"},
    "rollout.turns": {"rollout.answers", "journal", "sampling", "models", "tasks", "types"},
    "rollout": {"rollout", "models", "core", "tasks", "types", "config", "metrics", "journal"},
    "training": {"training", "models", "core", "types", "config"},
    "evaluation": {"rollout", "tasks", "metrics", "types", "config"},
    "generation": {"rollout.side_rollouts", "tasks", "models", "journal", "metrics", "results", "types", "config"},
    "build_tasks": {"tasks", "models", "config", "types"},
    "build_rollout": {"build_tasks", "rollout", "config", "validation"},
    "build_sampler": {"build_tasks", "sampling", "models", "training", "config"},
    "build": {
        "build_rollout",
        "build_sampler",
        "build_tasks",
        "core",
        "rollout",
        "sampling",
        "models",
        "tasks",
        "training",
        "compile_counter",
        "config",
        "types",
    },
    "bookkeeping": {"build", "generation", "rollout", "training", "metrics", "progress", "config"},
    "loop": {
        "build",
        "bookkeeping",
        "evaluation",
        "generation",
        "rollout",
        "models.sharding",
        "tasks.self_propose",
        "tasks.verifiers",
        "interrupt",
        "journal",
        "watchdog",
        "results",
        "workdir",
        "metrics",
        "config",
        "types",
    },
    "__init__": {"loop", "core", "models", "rollout", "sampling", "tasks", "training"},
}
# Plain Python, so that the controller can be simulated and verifier workers start without JAX.
NO_JAX = [
    "types",
    "config",
    "validation",
    *sorted(PLAIN),
    "rollout.controller",
    "tasks",
]


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "dynrl":
                yield from (f"dynrl.{alias.name}" for alias in node.names)
            else:
                yield node.module


def rule(name):
    part = name
    while part not in ALLOWED:
        assert "." in part, f"{name} is new: say above what it may import"
        part = part.rpartition(".")[0]
    return ALLOWED[part]


def test_dependency_direction():
    wrong = []
    for name, tree in modules():
        for target in imports(tree):
            if target.startswith("dynrl."):
                target = target.removeprefix("dynrl.")
                if not any(target == a or target.startswith(a + ".") for a in rule(name)):
                    wrong.append(f"{name} imports {target}")
    assert not wrong


def test_plain_parts_import_no_jax():
    for name, tree in modules():
        if any(name == p or name.startswith(p + ".") for p in NO_JAX):
            assert not [t for t in imports(tree) if t.split(".")[0] in ("jax", "flax", "optax")], name
    code = "import sys, dynrl, dynrl.rollout.controller, dynrl.tasks.verifiers; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_config_key_is_read():
    read = {n.attr for _, tree in modules() for n in ast.walk(tree) if isinstance(n, ast.Attribute)}

    def keys(cls):
        for field in dataclasses.fields(cls):
            hint = typing.get_type_hints(cls)[field.name]
            yield field.name
            if dataclasses.is_dataclass(hint):
                yield from keys(hint)

    assert [k for k in keys(RunConfig) if k not in read] == []


def test_no_catch_all_module():
    assert not list(PACKAGE.rglob("utils.py"))
