# SPDX-License-Identifier: Apache-2.0
"""Batches of completions: which prompts, rewards and steps they are of."""

from functools import partial

import numpy as np
import pytest

from tessera.errors import EmptyDataError
from tessera.train.data.cursor import Cursor
from tessera.train.loop.position import Position
from tessera.train.loop.rollout_batches import RolloutBatches
from tessera.train.loop.run_summary import rows_read
from tessera.train.rollouts.completions import RolloutStopped
from tests.train.loop.post_training_runs import (
    SEPARATOR,
    ScriptedRewards,
    ScriptedSampler,
    digits,
    lines_of,
    policy_run,
    train_policy,
    write_prompts,
)
from tests.train.rollouts.completion_server import serving, sglang


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "sums.jsonl")


def of_number(number, prompt):
    """One to four bytes, the last a separator in every second row."""
    del prompt
    ids = [48 + number % 10, 65, 66, 67][: 1 + number % 4]
    return [*ids, SEPARATOR] if number % 2 else ids


class Loop:
    """Takes batches as the training loop does."""

    def __init__(self, run, samples=None, *, score=digits, write=of_number):
        self.corpus = run.load_data()
        self.rewards, self.sampler = ScriptedRewards(score), ScriptedSampler(write)
        self.phases = []
        self.source = RolloutBatches(
            *(run, self.corpus, self.rewards, self.corpus.columns),
            *(lambda *phase: self.phases.append(phase), samples),
        )
        vars(vars(self.source)["_writer"])["_sampler"] = self.sampler
        state = type("State", (), {"params": None, "reference": None})()
        self.at, self.drained = Position(0, state, Cursor.start(self.corpus)), 0
        self.batches = self.source.batches(lambda: self.at, self.drain)

    def drain(self):
        self.drained += 1

    def step(self):
        given = next(self.batches)
        step, state = self.at.step + 1, self.at.state
        self.at = Position(step, state, given.cursor, given.rollout)
        batch = {name: np.asarray(array) for name, array in given.batch.items()}
        return {n: a.reshape(-1, a.shape[-1]) for n, a in batch.items()}, given


def texts(batch):
    """The prompts, which follow a token that begins each text."""
    return [bytes(row[1:5].tolist()).decode() for row in batch["tokens"]]


def test_a_step_has_whole_groups_in_the_order_of_the_data(prompts):
    loop = Loop(policy_run(prompts))
    expected = [prompt.content for prompt in loop.corpus.take(0, 6)]
    seen = []
    for step in range(3):
        batch, given = loop.step()
        assert given.cursor.rows == 2 * (step + 1)
        seen += texts(batch)[::4]
        assert [len(set(texts(batch)[i : i + 4])) for i in (0, 4)] == [1, 1]
    assert seen == expected
    given_prompts, completions, columns = loop.rewards.seen[0]
    assert given_prompts == [expected[0]] * 4 + [expected[1]] * 4
    assert completions[:4] == ["0", "1A", "2AB", "3ABC"]  # no stop token
    answers = [prompt.columns["answer"] for prompt in loop.corpus.take(0, 2)]
    assert columns.pop("completion_ids")[:2] == [[48], [49, 65, SEPARATOR]]
    assert columns == {"answer": [answers[0]] * 4 + [answers[1]] * 4}


def test_keys_are_of_prompts_and_their_completions_whatever_a_step_takes(prompts):
    few, many = (
        Loop(policy_run(prompts)),
        Loop(policy_run(prompts, global_batch_size=24)),
    )
    for _ in range(3):
        few.step()
    many.step()
    keys = [key for keys in few.sampler.keys for key in keys]
    assert keys == many.sampler.keys[0]
    assert len({tuple(key) for key in keys}) == 24
    other = Loop(policy_run(prompts, seed=1))
    other.step()
    assert not {*map(tuple, other.sampler.keys[0])} & {*map(tuple, keys)}


def test_passes_take_the_same_rows_again_and_sample_nothing(prompts):
    run = policy_run(prompts, grpo={"steps_per_rollout": 2, "passes": 2})
    vars(run)["score_policy"] = None  # what ``old`` is comes with a compiled model
    loop = Loop(run)
    steps = [loop.step() for _ in range(8)]
    for name in ("tokens", "advantages", "weights", "sampled"):
        rows = [batch[name] for batch, _ in steps]
        for first, again in ((0, 2), (1, 3), (4, 6), (5, 7)):
            np.testing.assert_array_equal(rows[first], rows[again])
    assert texts(steps[0][0]) != texts(steps[1][0])
    assert [given.cursor.rows for _, given in steps] == [4] * 4 + [8] * 4
    assert [bool(given.numbers) for _, given in steps] == ([True] + [False] * 3) * 2
    assert (len(loop.sampler.keys), loop.drained) == (2, 2)
    phases = ["rollout", "reward", "step"]
    assert loop.phases == [(name, step) for step in (1, 5) for name in phases]


def test_a_missing_reward_is_neither_learned_nor_counted(prompts):
    scores = iter([0.0, np.nan, 1.0, 0.5] + [np.nan] * 4)
    loop = Loop(policy_run(prompts), score=lambda text: next(scores))
    batch, given = loop.step()
    learned = (batch["weights"] > 0).any(axis=1)
    assert learned.tolist() == [True, False, True, True] + [False] * 4
    assert all(np.isfinite(array).all() for array in batch.values())
    assert given.numbers["reward"] == pytest.approx(0.5)
    assert given.numbers["reward/scripted"] == pytest.approx(0.5)
    assert given.numbers["reward_missing"] == 5 / 8
    assert given.numbers["groups_without_variance"] == 0.5


def test_without_any_reward_there_is_nothing_to_learn(prompts, caplog):
    batch, given = Loop(policy_run(prompts), score=lambda text: np.nan).step()
    assert "step 1: no completion has a reward" in caplog.text
    assert not batch["weights"].any()
    assert not batch["advantages"].any()
    assert np.isnan(given.numbers["reward"])
    assert np.isnan(given.numbers["reward_std"])
    assert given.numbers["reward_missing"] == 1


def test_a_group_without_variance_has_no_advantage_and_a_run_says_so_once(
    prompts, caplog
):
    loop = Loop(policy_run(prompts), score=lambda text: 0.7)
    batch, given = loop.step()
    loop.step()
    said = "the rewards of each group are equal: nothing to learn"
    assert caplog.messages == ["step 1: a note", f"step 1: {said}"]
    assert not batch["advantages"].any()
    assert (batch["weights"][:, 0] > 0).all()
    assert given.numbers["groups_without_variance"] == 1


@pytest.mark.parametrize("rule", ["learn", "mask"])
def test_completions_that_are_cut_are_learned_or_masked(prompts, rule):
    scores = map(float, range(8))
    run = policy_run(prompts, grpo={"truncated": rule})
    batch, given = Loop(run, score=lambda text: next(scores)).step()
    learned = (batch["weights"] > 0).any(axis=1).tolist()
    assert learned == ([True] * 8 if rule == "learn" else [False, True] * 4)
    assert given.numbers["truncated_fraction"] == 0.5


def test_a_completion_that_is_a_stop_token_alone_is_learned(prompts):
    scores = map(float, range(8))
    loop = Loop(
        policy_run(prompts),
        score=lambda text: next(scores),
        write=lambda number, prompt: [SEPARATOR],
    )
    batch, given = loop.step()
    assert loop.rewards.seen[0][1] == [""] * 8
    assert (batch["targets"] == SEPARATOR).sum(axis=1).tolist() == [1] * 8
    assert (batch["targets"] != -100).sum() == 8
    assert given.numbers["completion_length"] == 1


@pytest.mark.slow(reason="it compiles a sampler and a validation")
def test_validation_writes_one_completion_of_each_prompt_and_learns_none(prompts):
    loop = Loop(policy_run(prompts))
    of_validation = loop.corpus.take_validation()
    means = [loop.source.validate(step, loop.at.state, lambda: True) for step in (1, 2)]
    assert means[0] == means[1]
    assert [*means[0]["prompts"]][:2] == ["reward", "reward/scripted"]
    assert loop.sampler.keys[0] == loop.sampler.keys[1]
    assert loop.rewards.seen[0][0] == [prompt.content for prompt in of_validation]
    assert loop.source.validate(3, loop.at.state, lambda: False) is None


def test_a_rollout_that_is_stopped_leaves_the_run_where_it_was(prompts):
    loop = Loop(policy_run(prompts))
    stopped = loop.source.batches(lambda: loop.at, loop.drain, lambda: False)
    with pytest.raises(RolloutStopped):
        next(stopped)
    assert loop.source.validate(1, loop.at.state, lambda: False) is None
    assert loop.at.rollout is None
    first, _ = loop.step()
    again, _ = Loop(policy_run(prompts)).step()
    np.testing.assert_array_equal(first["tokens"], again["tokens"])


def test_samples_say_what_was_written_and_what_it_was_worth(prompts, tmp_path):
    file, scores = tmp_path / "samples.jsonl", iter([np.nan, *range(7)])
    loop = Loop(policy_run(prompts), file, score=lambda text: next(scores))
    batch, _ = loop.step()
    lines = lines_of(file)
    assert [line["reward"] for line in lines] == [None, 0, 1, 2, 3, 4, 5, 6]
    assert lines[1]["completion"] == "1A"
    assert [line["ended"] for line in lines] == [False, True] * 4
    assert [line["tokens"] for line in lines] == [1, 3, 3, 5] * 2
    np.testing.assert_allclose(
        [line["advantage"] for line in lines], batch["advantages"][:, 0]
    )
    assert [line["prompt"] for line in lines[::4]] == texts(batch)[::4]


def test_prompts_have_the_room_that_completions_leave(prompts):
    short = partial(policy_run, prompts, sequence_length=8)
    loop = Loop(short(grpo={"max_completion": 4}), write=lambda *_: [48] * 4)
    batch, _ = loop.step()
    assert (batch["targets"] != -100).sum(axis=1).tolist() == [4] * 8
    with pytest.raises(EmptyDataError, match="40 of 40 prompts have more than 4"):
        short(grpo={"max_completion": 5}).load_data()


def test_a_run_reads_a_prompt_for_each_group(prompts):
    run = policy_run(prompts, steps=9, grpo={"steps_per_rollout": 2, "passes": 2})
    assert rows_read(run) == 3 * 16 // 4


def test_a_clip_range_has_nothing_to_do_where_a_rollout_is_used_once(prompts):
    note = "clip_high changes nothing: each rollout is one step, of ratio 1"
    assert note in policy_run(prompts, grpo={"clip_high": 0.3}).layout_notes()
    again = policy_run(prompts, grpo={"clip_high": 0.3, "passes": 2})
    assert note not in again.layout_notes()


# --- servers


def codes(text):
    return sum(map(ord, text))


@pytest.mark.full
def test_a_server_samples_with_the_weights_of_the_run(prompts, tmp_path):
    """Those of each rollout, also of the first one after a resume."""

    def loaded(name, *steps):
        with serving() as server:
            server.answer = sglang
            given = {"server": server.url, "server_model": "tiny"}
            given["server_weights"] = f"sglang:{tmp_path / 'policy'}"
            for number in steps:
                run = policy_run(prompts, grpo=given, steps=number)
                train_policy(run, tmp_path / name, "auto", score=codes)
        return [files["model.safetensors"] for _, files in server.loaded]

    whole = loaded("whole", 3)
    assert len({*whole}) == 4  # three steps, and the last validation
    assert [*dict.fromkeys(loaded("parts", 2, 3))] == [*dict.fromkeys(whole)]


def test_a_server_that_gets_no_weights_is_warned_of(prompts):
    grpo = {"server": "http://localhost:9/v1", "server_weights": None}
    text = "all completions are of these"
    assert text in " ".join(policy_run(prompts, grpo=grpo).warnings())
    grpo["server_weights"] = "sglang:/policy"
    assert text not in " ".join(policy_run(prompts, grpo=grpo).warnings())
