import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from etils import epath

from dynrl.config import WarmStartConfig
from dynrl.models import sharding
from dynrl.models.decoder import init_params
from dynrl.models.policy import completion_logprobs
from dynrl.models.tokenizer import CharTokenizer
from dynrl.training.warm_start import cache_key, cached_warm_start, encode_batch, warm_start
from dynrl.types import Task

TOKENIZER = CharTokenizer("0123456789")


def task_at(index):
    return Task(-1, "copy", f"{index % 7}{index % 5}", str(index % 7))


def random_params(config, mesh):
    params = init_params(config.model, TOKENIZER.vocab_size, jax.random.key(0))
    return jax.tree.map(sharding.place, params, sharding.param_shardings(params, mesh))


def answer_logp(params, config):
    batch = encode_batch([task_at(i) for i in range(35)], TOKENIZER, 5, 6)
    logp, _ = jax.jit(partial(completion_logprobs, config=config.model))(params, batch)
    return float(np.where(batch.mask_PGT, logp, 0).sum() / batch.mask_PGT.sum())


def small(tiny_config, **overrides):
    options = {"model__num_layers": 1, "warm_start__num_steps": 30, "warm_start__batch_size": 32} | overrides
    return tiny_config(**options)


def test_batches_are_encoded():
    tasks = [Task(-1, "s", "120", "9"), Task(-1, "s", "7", "1234")]
    batch = encode_batch(tasks, TOKENIZER, 3, 5)
    # Digit d is token d + 2; the stop token 1 ends an answer and is trained on.
    assert batch.prompt_PL.tolist() == [[3, 4, 2], [0, 0, 9]]
    assert batch.prompt_length_P.tolist() == [3, 1]
    assert batch.tokens_PGT.tolist() == [[[11, 1, 0, 0, 0]], [[3, 4, 5, 6, 1]]]
    assert batch.mask_PGT.tolist() == [[[True] * 2 + [False] * 3], [[True] * 5]]


def test_demonstrations_stand_in_the_answers_place_and_what_others_say_is_not_trained_on():
    shown = [["12", True], ["345", False], ["6", True]]
    tasks = [Task(-1, "s", "0", "9", metadata={"demonstration": shown}), Task(-1, "s", "0", "9", metadata={"x": 1})]
    batch = encode_batch(tasks, TOKENIZER, 1, 8)
    assert batch.tokens_PGT.tolist() == [[[3, 4, 5, 6, 7, 8, 1, 0]], [[11, 1, 0, 0, 0, 0, 0, 0]]]
    assert batch.mask_PGT[0, 0].tolist() == [True, True, False, False, False, True, True, False]
    assert batch.mask_PGT[1, 0].tolist() == [True] * 2 + [False] * 6
    with pytest.raises(ValueError, match="task '0' -> '9' of source s has 1 prompt and 7 answer"):
        encode_batch(tasks, TOKENIZER, 1, 6)


@pytest.mark.parametrize("shown", ["12", [], 3, [["1"]], [["1", 1]], [[1, True]], ["12"], {"1": True}])
def test_a_demonstration_that_is_none_is_named(shown):
    task = Task(-1, "s", "7", "9", metadata={"demonstration": shown})
    with pytest.raises(ValueError, match=r"task '7' of source s: .*demonstration must be a list of \[text, trained\]"):
        encode_batch([task], TOKENIZER, 1, 6)


@pytest.mark.parametrize(
    ("prompt", "answer", "counts"),
    [("1234", "5", "4 prompt and 2 answer"), ("1", "55555", "1 prompt and 6 answer"), ("", "5", "0 prompt")],
)
def test_a_task_that_does_not_fit_is_named(prompt, answer, counts):
    tasks = [Task(-1, "s", "1", "1"), Task(-1, "s", prompt, answer)]
    with pytest.raises(ValueError, match=f"task '{prompt}' -> '{answer}' of source s has {counts}"):
        encode_batch(tasks, TOKENIZER, 3, 5)


def test_the_stage_learns_and_its_cache_is_exact(tiny_config, mesh1, tmp_path):
    config = small(tiny_config)
    log, calls = [], []

    def make(params):
        calls.append(1)
        return warm_start(params, config, TOKENIZER, task_at, mesh1, lambda step, loss: log.append((step, loss)))

    before = answer_logp(random_params(config, mesh1), config)
    directory = epath.Path(tmp_path) / "warm" / "key"
    trained, cached = cached_warm_start(random_params(config, mesh1), directory, make)
    assert not cached
    assert [step for step, _ in log] == [20, 30]  # every 20 steps, and the last
    assert log[0][1] > log[1][1]
    assert answer_logp(trained, config) > before + 0.5
    again, cached = cached_warm_start(random_params(config, mesh1), directory, make)
    assert cached
    assert len(calls) == 1
    jax.tree.map(np.testing.assert_array_equal, again, trained)
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, trained)
    # Trained anew, without a cache: the same numbers, so a cached stage changes no row.
    anew, cached = cached_warm_start(random_params(config, mesh1), None, make)
    assert not cached
    jax.tree.map(np.testing.assert_array_equal, anew, trained)


def test_the_cache_serves_another_mesh(tiny_config, mesh1, mesh222, tmp_path):
    config = small(tiny_config)
    directory = epath.Path(tmp_path) / "key"
    stored, _ = cached_warm_start(random_params(config, mesh1), directory, lambda p: jax.tree.map(lambda x: x + 1, p))
    like = random_params(config, mesh222)
    got, cached = cached_warm_start(like, directory, lambda p: pytest.fail("trained again"))
    assert cached
    jax.tree.map(np.testing.assert_array_equal, got, stored)
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, like)


def one_array(mesh):
    return {"w": sharding.place(np.arange(4.0, dtype=np.float32), sharding.replicated(mesh))}


def test_a_run_that_is_writing_the_same_entry_is_left_alone(mesh1, tmp_path):
    theirs = tmp_path / "key.orbax-checkpoint-tmp"  # what orbax would take for the rest of an earlier attempt
    theirs.mkdir()
    (theirs / "half").write_text("of it")
    _, cached = cached_warm_start(one_array(mesh1), epath.Path(tmp_path / "key"), lambda p: p)
    assert not cached
    assert (theirs / "half").read_text() == "of it"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key", theirs.name]
    got, cached = cached_warm_start(one_array(mesh1), epath.Path(tmp_path / "key"), lambda p: pytest.fail("trained"))
    assert cached
    np.testing.assert_array_equal(got["w"], np.arange(4.0))


def test_a_cache_that_cannot_be_written_costs_a_warning(mesh1, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"file/cache/key: NotADirectoryError"):
        got, cached = cached_warm_start(one_array(mesh1), epath.Path(tmp_path / "file/cache/key"), lambda p: p)
    assert not cached
    np.testing.assert_array_equal(got["w"], np.arange(4.0))


def test_a_damaged_cache_entry_is_named(mesh1, tmp_path):
    directory = epath.Path(tmp_path / "key")
    cached_warm_start(one_array(mesh1), directory, lambda p: p)
    for path in directory.iterdir():
        path.rmtree() if path.is_dir() else path.unlink()
    with pytest.raises(RuntimeError, match=f"{directory} cannot be read: .*\n.*trains it again"):
        cached_warm_start(one_array(mesh1), directory, lambda p: pytest.fail("trained again"))


def test_a_stage_without_ramp(tiny_config, mesh1):
    config = small(tiny_config, warm_start__num_steps=1, warm_start__warmup_steps=0)
    start = random_params(config, mesh1)
    before = np.asarray(start["embedding"]).copy()
    trained = warm_start(start, config, TOKENIZER, task_at, mesh1, lambda step, loss: None)
    assert (np.abs(np.asarray(trained["embedding"]) - before) > 1e-4).any()


def test_the_key_covers_what_determines_the_weights(tiny_config):
    source, excluded = {"name": "s", "kwargs": {"sha256": "1"}}, "e"

    def key(config, source=source, excluded=excluded, tokenizer="t"):
        return cache_key(config, source, excluded, tokenizer)

    base = key(tiny_config())
    assert key(tiny_config()) == base
    matters = [
        {"model__width": 32}, {"model__activation": "relu"}, {"model__dtype": "bfloat16"}, {"seed": 1},
        {"warm_start__num_steps": 61}, {"warm_start__batch_size": 32}, {"warm_start__learning_rate": 1e-3},
        {"warm_start__warmup_steps": 3}, {"tasks__max_prompt_tokens": 6}, {"sampler__max_completion_tokens": 7},
    ]  # fmt: skip
    keys = [key(tiny_config(**change)) for change in matters]
    keys += [base, key(tiny_config(), tokenizer="other"), key(tiny_config(), excluded="other tasks")]
    keys.append(key(tiny_config(), {"name": "s", "kwargs": {"sha256": "2"}}))  # the same file, changed
    assert len(set(keys)) == len(matters) + 4
    # What only changes the reinforcement learning after it, or where it runs, does not.
    other = [
        {"mesh__fsdp": 2}, {"mesh__tensor": 2}, {"num_steps": 7}, {"num_prompts_per_step": 16},
        {"train__learning_rate": 1e-5}, {"loss__estimator": "rloo"}, {"sampler__num_slots": 64},
        {"evaluation__every_steps": 3}, {"checkpoint__every_steps": 5}, {"reward__num_workers": 2},
    ]  # fmt: skip
    assert {key(tiny_config(**change)) for change in other} == {base}


def test_every_field_of_the_stage_has_been_thought_of():
    # A new field must be added to the lists above.
    assert {f.name for f in dataclasses.fields(WarmStartConfig)} == {
        "num_steps", "batch_size", "learning_rate", "warmup_steps", "cache",
    }  # fmt: skip
