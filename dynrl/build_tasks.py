"""From a configuration to its tasks: where they come from, who judges them, and how they are written as tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from dynrl.config import ConfigError, RunConfig
from dynrl.models.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from dynrl.tasks.base import TaskSource
from dynrl.tasks.environments import Environment
from dynrl.tasks.generators import make_generator
from dynrl.tasks.generators.base import TaskGenerator
from dynrl.tasks.proposal_kinds.source import ProposerTasks
from dynrl.tasks.proposals import Proposals
from dynrl.tasks.rewards import find_environment
from dynrl.tasks.selectors import Selection, make_selector
from dynrl.tasks.self_propose import Rewards, SelfPropose
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import FrozenTasks, TaskStore, make_frozen

T = TypeVar("T")


@dataclass
class Tasks:
    """Where tasks come from, the training tasks, the evaluation tasks, and who judges them."""

    source: TaskSource
    proposer: ProposerTasks | None  # writes the prompts that ask the policy for tasks
    store: TaskStore
    frozen: FrozenTasks
    verifiers: dict[str, str]  # by source name
    tokenizer: Tokenizer
    padding_frac: float  # of the evaluation prompts, at max_prompt_tokens


def make_tasks(config: RunConfig) -> Tasks:
    """Training and evaluation tasks, which share no prompt.

    Without an evaluation source of their own, evaluation tasks are drawn from the training source by another seed, or
    are the first ones of a finite source.
    """
    t, e = config.tasks, config.evaluation
    if e.source_kwargs and not e.source:
        raise ConfigError(f"config.evaluation.source_kwargs: {e.source_kwargs!r}, but evaluation.source is empty")
    source = named("tasks.source", make_source, t.source, **t.source_kwargs)
    other = named("evaluation.source", make_source, e.source, **e.source_kwargs) if e.source else source
    frozen = named("evaluation.num_tasks", make_frozen, other, e.seed, e.num_tasks)
    source = named("tasks.source", source.without, frozen.hashes)
    num_tasks = t.num_tasks if source.num_tasks is None else min(t.num_tasks, source.num_tasks)
    if num_tasks < config.num_prompts_per_step:
        raise ConfigError(
            f"config.tasks.num_tasks: {num_tasks} training tasks are less than one step's num_prompts_per_step = "
            f"{config.num_prompts_per_step}"
        )
    store = named("tasks.source", TaskStore, source, config.seed, num_tasks, frozen.hashes)
    p = config.self_propose
    proposer = named("self_propose.kind", ProposerTasks, p.kind, p.kind_kwargs) if p.kind else None
    sources = [source, other] if proposer is None else [source, other, proposer]
    tokenizer = make_tokenizer(config.model.tokenizer, *sources)
    for each in {source.name: source, **({proposer.name: proposer} if proposer else {})}.values():
        check_lengths(config, each)
    lengths = [len(named("evaluation.source", tokenizer.encode, x.prompt)) for x in frozen.get(range(len(frozen)))]
    if max(lengths) > t.max_prompt_tokens:
        raise ConfigError(
            f"config.tasks.max_prompt_tokens: {t.max_prompt_tokens} is too few for the evaluation tasks: the longest "
            f"prompt has {max(lengths)} tokens"
        )
    padding = 1 - sum(lengths) / (len(lengths) * t.max_prompt_tokens)
    return Tasks(source, proposer, store, frozen, choose_verifiers(config, *sources), tokenizer, padding)


def make_selection(config: RunConfig) -> Selection:
    """Which tasks to spend rollouts on: the selector, the floor share beside it, and what was appended."""
    t = config.tasks
    selector = named("tasks.selector", make_selector, t.selector, seed=config.seed, **t.selector_kwargs)
    floor_share = 0.0 if getattr(selector, "is_base_distribution", False) else t.floor_share
    new_first = t.new_first or bool(config.self_propose.kind)  # whose verdicts wait for what becomes of the new ones
    return Selection(selector, config.seed, floor_share=floor_share, new_first=new_first)


def find_generator(config: RunConfig) -> Callable[[], TaskGenerator] | None:
    """What makes the generator, if there is to be one."""
    g = config.generation
    if not g.generator:
        return None
    return partial(named, "generation.generator", partial(make_generator, g.generator, **g.generator_kwargs))


def make_proposals(config: RunConfig, tasks: "Tasks", deduplicate: Literal["appended", "all", "none"]) -> Proposals:
    """What reads proposals: a generator's, or the policy's own."""
    return Proposals(
        tasks.store,
        tasks.verifiers,
        lambda prompt: len(tasks.tokenizer.encode(prompt)),
        config.tasks.max_prompt_tokens,
        deduplicate,
        tasks.frozen.hashes,
    )


def make_self_propose(config: RunConfig, tasks: "Tasks") -> SelfPropose | None:
    """The policy's own proposals, if there are to be any."""
    c = config.self_propose
    if tasks.proposer is None:
        return None
    return SelfPropose(
        tasks.proposer,
        config.seed,
        tasks.store,
        make_proposals(config, tasks, c.deduplicate),
        groups_per_step=c.groups_per_step,
        rewards=Rewards(c.invalid_reward, c.uniform_reward),
        max_wait_steps=c.max_wait_steps,
    )


def check_lengths(config: RunConfig, source: TaskSource) -> None:
    """Raises ConfigError where prompts or answers cannot fit: a character takes one token, or several as bytes.

    The references of a finite source may be rationales, which only a warm start has to learn word for word.
    """
    prompt = source.max_prompt_chars if config.tasks.long_prompts == "error" else None
    written = source.num_tasks is None or config.warm_start.num_steps > 0
    answer = source.max_answer_chars + 1 if written and source.max_answer_chars is not None else None
    for key, needed, have in (
        ("tasks.max_prompt_tokens", prompt, config.tasks.max_prompt_tokens),
        ("sampler.max_completion_tokens", answer, config.sampler.max_completion_tokens),
    ):
        if needed is not None and have < needed:
            raise ConfigError(f"config.{key}: {have} is too few for source {source.name}, which needs {needed}")


def choose_verifiers(config: RunConfig, *sources: TaskSource) -> dict[str, str]:
    """The verifier of each task source."""
    defaults: dict[str, str] = {}
    for name, verifier in (item for source in sources for item in source.verifiers.items()):
        if defaults.setdefault(name, verifier) != verifier and config.reward.verifier == "default":
            raise ConfigError(
                f"config.evaluation.source: tasks of source {name!r} are judged by {verifier!r} there and by "
                f"{defaults[name]!r} in training: name one reward.verifier, or name their source apart"
            )
    unknown = [name for name in config.reward.verifiers if name not in defaults]
    if unknown and not config.generation.generator:  # which may bring tasks of other sources
        raise ConfigError(
            f"config.reward.verifiers: no task has the source {unknown[0]!r}; there are {sorted(defaults)}"
        )
    one, proposals = config.reward.verifier, "self_propose/"  # which only their own verifier can read
    keeps = {name for name in defaults if one == "default" or name.startswith(proposals)}
    chosen = {name: default if name in keeps else one for name, default in defaults.items()}
    return chosen | dict(config.reward.verifiers)


def find_environments(verifiers: Mapping[str, str]) -> dict[str, type[Environment]]:
    """The environments among the verifiers, by source."""
    found = {source: named("reward.verifier", find_environment, name) for source, name in verifiers.items()}
    return {source: environment for source, environment in found.items() if environment is not None}


def max_observation_tokens(
    config: RunConfig, environments: Mapping[str, type[Environment]], tokenizer: Tokenizer
) -> int:
    """Room for what an environment may say at once, within a completion that the policy goes on with; 0 without any."""
    if not environments:
        return 0
    per_char = 4 if isinstance(tokenizer, ByteTokenizer) else 1
    longest = max(e.max_observation_chars for e in environments.values()) * per_char
    room = config.sampler.max_completion_tokens - 2  # a turn before it and one after
    if room < 1:
        raise ConfigError(
            f"config.sampler.max_completion_tokens: {config.sampler.max_completion_tokens} leaves no room for a turn, "
            "an observation and another turn: at least 3"
        )
    return min(longest, room)


def make_tokenizer(kind: str, *sources: TaskSource) -> Tokenizer:
    """A tokenizer for what the sources write: their characters where all declare them, or bytes."""
    alphabets = [s.alphabet for s in sources if s.alphabet is not None]
    if kind == "byte" or (kind == "auto" and len(alphabets) < len(sources)):
        return ByteTokenizer()
    if len(alphabets) < len(sources):
        missing = next(s.name for s in sources if s.alphabet is None)
        raise ConfigError(
            f"config.model.tokenizer: 'char' needs an alphabet, which source {missing} does not declare; 'byte' needs "
            "none"
        )
    return CharTokenizer(frozenset().union(*alphabets))


def named(key: str, make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What `make` makes; its ValueError, TypeError or ImportError becomes a ConfigError that names the key."""
    try:
        return make(*args, **kwargs)
    except ConfigError:
        raise
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"config.{key}: {error}") from error
