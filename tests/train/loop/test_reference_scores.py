# SPDX-License-Identifier: Apache-2.0
"""Numbers of a reference model follow their rows, and are those of the first weights.

Here the reference model says of a target 1000 times its token, and its position.
"""

import dataclasses
import json
from itertools import islice
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import (
    CheckpointMismatchError,
    DataChangedError,
    SettingConflictError,
    SettingValueError,
)
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import metadata_of
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data.cursor import Cursor
from tessera.train.data.data_config import DataConfig, SourceConfig
from tessera.train.data.record_rows import PreferenceRows
from tessera.train.loop.build_run import Run
from tessera.train.loop.reference_scores import (
    FILE,
    read_scores,
    scored_data,
    write_scores,
)
from tests.train.config.command_lines import composed
from tests.train.loop.post_training_runs import (
    ONE,
    pairs_run,
    preference_run,
    write_pairs,
)

STATE = SimpleNamespace(params=1.0, reference=None, step=0)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 50)


def spoken(batch):
    """What the reference model of these tests says."""
    values = 1000.0 * batch["targets"] + batch["positions"]
    return np.where(batch["targets"] == -100, 0, values).astype(np.float32)


def with_model(run: Run) -> Run:
    """A run whose reference model needs no compilation."""

    def score(params, batch):
        host = {name: np.asarray(array) for name, array in batch.items()}
        return jnp.asarray(spoken(host)) * params

    vars(run)["score_reference"] = score
    return run


def scored(run, corpus, should_continue=lambda: True):
    given = with_model(run), corpus, STATE, None, should_continue
    return scored_data(*given, lambda: None)


def check_batches(batches, count):
    rows = 0
    for batch in islice(batches, count):
        np.testing.assert_array_equal(batch["reference"], spoken(batch))
        assert batch["reference"].dtype == np.float32
        rows += (batch["targets"] != -100).any(axis=1).sum()
    batches.close()
    return rows


@pytest.mark.parametrize("share", [(0, 1), (1, 2)])
def test_numbers_follow_their_row_in_every_pass_and_process(pairs, share):
    run = pairs_run(pairs, "precomputed")
    corpus = run.load_data()
    full = scored(run, corpus)
    num_rows = len(corpus.sources[0].train_rows)
    assert num_rows % run.rows_per_step
    for start in (0, 7):
        batches = full.train(4, *share, start, microbatches=2)
        assert check_batches(batches, num_rows) == num_rows * 4 // share[1]
    validation = full.validation(4, *share)
    # The last batch has rows of padding.
    assert (
        check_batches(validation, None)
        == len(full.sources[0].validation_rows) // (share[1])
    )
    assert "reference" not in next(corpus.train(4))
    assert full.order == corpus.order


@pytest.mark.parametrize("reference", ["copy", "precomputed"])
def test_an_evaluation_reads_no_row_that_was_not_scored(pairs, reference):
    run = pairs_run(pairs, reference, validation_sequences=3)
    corpus = run.load_data()
    full = scored(run, corpus)
    (source,) = full.sources
    assert ("reference" in source.train_rows[0]) == (reference == "precomputed")
    assert check_batches(full.validation(2, limit=3), None) == 3


def test_a_run_that_is_told_to_stop_keeps_no_numbers(pairs):
    run = pairs_run(pairs, "precomputed")
    answers = iter([True, False])
    assert scored(run, run.load_data(), lambda: next(answers)) is None


@pytest.fixture
def kept(pairs, tmp_path):
    """The rows of a run, whose numbers are in the folder of a checkpoint."""
    run = pairs_run(pairs, "precomputed")
    full = scored(run, run.load_data())
    write_scores(tmp_path, run, full)
    return run, full, tmp_path


def test_numbers_are_read_as_they_were_written(kept):
    run, full, folder = kept
    read = read_scores(folder, run, run.load_data())
    for here, there in zip(read.sources, full.sources, strict=True):
        for rows, others in (
            (here.train_rows, there.train_rows),
            (here.validation_rows, there.validation_rows),
        ):
            found = rows.arrays["reference"]
            assert found.any()
            np.testing.assert_array_equal(found, others.arrays["reference"])


def test_a_checkpoint_without_numbers_is_refused_and_nothing_is_scored(kept):
    run, _, folder = kept
    (folder / FILE).unlink()
    with pytest.raises(CheckpointMismatchError, match=r"preference\.reference=copy"):
        read_scores(folder, run, run.load_data())


@pytest.mark.parametrize(
    "settings", [{"sequence_length": 32}, {"data": {"validation_fraction": 0.2}}]
)
def test_other_rows_are_refused(kept, settings):
    run, _, folder = kept
    other = pairs_run(run.config.data.path, "precomputed", **settings)
    with pytest.raises(DataChangedError, match="train_rows of preferences"):
        read_scores(folder, other, other.load_data())


def test_another_answer_is_refused_also_where_all_sizes_are_equal(kept, tmp_path):
    run, _, folder = kept
    with open(run.config.data.path) as file:
        lines = file.read().splitlines()
    record = json.loads(lines[3])
    digit = str((int(record["chosen"][-1]) + 1) % 10)
    record["chosen"] = record["chosen"][:-1] + digit
    lines[3] = json.dumps(record)
    path = tmp_path / "others.jsonl"
    path.write_text("\n".join(lines) + "\n")
    other = pairs_run(str(path), "precomputed")
    with pytest.raises(DataChangedError, match="scored other rows"):
        read_scores(folder, other, other.load_data())


def test_other_packing_of_the_same_text_is_refused(kept, monkeypatch):
    run, _, folder = kept
    other = pairs_run(run.config.data.path, "precomputed")
    monkeypatch.setattr(
        "tessera.train.data.conversation_rows._best_fit",
        lambda lengths, most: np.arange(lengths.size)[::-1],
    )
    corpus = other.load_data()
    rows = corpus.sources[0].train_rows
    assert isinstance(rows, PreferenceRows)
    with pytest.raises(DataChangedError):
        read_scores(folder, other, corpus)


def test_an_evaluation_alone_needs_the_numbers_of_what_it_reads(kept):
    run, _, folder = kept
    alone = pairs_run(run.config.data.path, "precomputed", eval_only=True)
    corpus = alone.load_data()
    for full in (read_scores(folder, alone, corpus), scored(alone, corpus)):
        (source,) = full.sources
        assert source.validation_rows.arrays
        assert not source.train_rows.arrays


def test_numbers_follow_the_rows_of_each_source_of_a_mixture(pairs, tmp_path):
    other = write_pairs(tmp_path / "others.jsonl", 9)
    sources = {"a": SourceConfig(pairs), "b": SourceConfig(other, weight=2)}
    data = {"path": "", "sources": sources, "validation_fraction": 0.4}
    run = pairs_run("", "precomputed", data=data)
    full = scored(run, run.load_data())
    check_batches(full.train(4), 40)
    for number in range(2):
        assert check_batches(full.validation(4, source=number), None)
    write_scores(tmp_path, run, full)
    # By the names of the sources, in whichever order they are given.
    data["sources"] = {"b": sources["b"], "a": sources["a"]}
    turned = pairs_run("", "precomputed", data=data)
    check_batches(read_scores(tmp_path, turned, turned.load_data()).train(4), 40)
    # Two sources that have changed names have each other's rows.
    data["sources"] = {"b": sources["a"], "a": sources["b"]}
    swapped = pairs_run("", "precomputed", data=data)
    with pytest.raises(DataChangedError, match="train_rows of b"):
        read_scores(tmp_path, swapped, swapped.load_data())


def test_rows_of_a_plain_stream_have_numbers_too():
    run = preference_run("dpo", ONE, preference={"reference": "precomputed"})
    run = Run(
        dataclasses.replace(
            run.config, data=dataclasses.replace(run.config.data, validation_fraction=0)
        ),
        run.mesh,
    )
    assert isinstance(run.config.data, DataConfig)
    corpus = run.load_data()
    full = scored(run, corpus)
    check_batches(full.train(4), 70)
    assert [*full.validation(4)] == []


LINE = "recipe=preference", "data=preferences", "data.path=pairs.jsonl"


def test_a_run_with_a_copy_is_told_what_its_checkpoint_was_made_with():
    def made(reference):
        found = composed(*LINE, f"preference.reference={reference}")
        return found, Run(found.config, mesh_of_shape(((1,), ("fsdp",))))

    (saved, run), (_, other) = made("precomputed"), made("copy")
    metadata = metadata_of(run, 1, Cursor(4, {}), saved.text)
    with pytest.raises(CheckpointMismatchError) as caught:
        Restoration(metadata, other).check()
    assert caught.value.fix.startswith("preference.reference=precomputed, if its run")


def test_completions_cannot_be_scored_before_they_are_written():
    with pytest.raises(SettingValueError, match=r"grpo\.reference") as caught:
        composed("recipe=grpo", "grpo.reference=precomputed", "grpo.kl_coefficient=1")
    assert "auto, copy or adapters_off" in str(caught.value)


def test_losses_without_a_reference_do_not_take_the_setting():
    with pytest.raises(SettingConflictError, match=r"preference\.reference"):
        composed(*LINE, "preference.loss=orpo", "preference.reference=precomputed")
