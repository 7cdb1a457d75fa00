# SPDX-License-Identifier: Apache-2.0
"""Several sources: proportions, epochs, resumption, validation and settings."""

import dataclasses
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import EmptyDataError, SettingConflictError, SettingValueError
from tessera.train.config.command_line import compose
from tessera.train.data import DataConfig, load
from tessera.train.data.data_config import SourceConfig
from tests.train.data.chat_folders import turns, write_folder

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources of 40 rows of ``a``, 9 rows of ``b`` and 100 rows of ``c``."""
    folder = tmp_path_factory.mktemp("text")
    for name, rows in (("a", 40), ("b", 9), ("c", 100)):
        (folder / f"{name}.txt").write_text(name * 4 * rows)
    return folder


def corpus(folder, weights, *, validation_fraction=0.0, seed=0):
    sources = {n: SourceConfig(str(folder / f"{n}.txt"), w) for n, w in weights.items()}
    config = DataConfig(
        name="mixture", sources=sources, validation_fraction=validation_fraction
    )
    return load(config, sequence_length=4, seed=seed, vocab_size=257)


def names_of(made, batch_size, steps, **arguments):
    """From which source the rows of the next batches are."""
    batches = made.train(batch_size, **arguments)
    taken = [b["tokens"][:, -1] for b in islice(batches, steps)]
    batches.close()
    return [bytes(row.tolist()).decode() for row in taken]


@pytest.mark.full
@pytest.mark.parametrize(
    "weights",
    [
        (1, 1, 1),
        (0.7, 0.2, 0.1),
        pytest.param((3, 1, 2), marks=pytest.mark.full),
        pytest.param((50, 1, 9), marks=pytest.mark.full),
    ],
)
def test_weights_are_the_fractions_of_rows(folder, weights):
    made = corpus(folder, dict(zip("abc", weights, strict=True)))
    rows = "".join(names_of(made, 6, 200))
    for name, weight in zip("abc", weights, strict=True):
        assert rows.count(name) / len(rows) == pytest.approx(
            weight / sum(weights), rel=0.02, abs=0.002
        )


def test_any_part_of_the_order_has_the_proportions(folder):
    rows = "".join(names_of(corpus(folder, {"a": 1, "c": 3}), 4, 100))
    for begin in range(0, 400, 8):
        assert rows[begin : begin + 8].count("a") in (1, 2, 3)


def test_a_source_repeats_whole_epochs_in_new_orders(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100, 201)))
    (tmp_path / "b.txt").write_text("b" * 1000)
    made = corpus(tmp_path, {"a": 1, "b": 1})
    batches = islice(made.train(10), 20)
    rows = [row for batch in batches for row in batch["tokens"].tolist()]
    own = [row[-1] for row in rows if row[-1] != ord("b")]
    epochs = [own[begin : begin + 25] for begin in range(0, 100, 25)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_mixture_resumes_on_another_number_of_processes(folder, processes):
    weights = {"a": 2, "b": 1, "c": 5}
    whole = "".join(names_of(corpus(folder, weights), 6, 60))
    made = corpus(folder, weights)
    parts = [
        names_of(made, 12, 5, process_index=p, process_count=processes, start_row=42)
        for p in range(processes)
    ]
    resumed = "".join("".join(step) for step in zip(*parts, strict=True))
    assert resumed == whole[42 : 42 + 60]


def test_the_order_names_weights_seed_and_text(folder):
    orders = [
        corpus(folder, {"a": 1, "c": 1}).order,
        corpus(folder, {"a": 1, "c": 1.0001}).order,
        corpus(folder, {"a": 1, "c": 1}, seed=1).order,
        corpus(folder, {"c": 1, "a": 1}).order,
    ]
    first, weights, seed, swapped = orders
    assert first == corpus(folder, {"a": 2, "c": 2}).order
    assert {key for key in first if first[key] != weights[key]} == {"shuffle"}
    assert {key for key in first if first[key] != seed[key]} == {"seed", "shuffle"}
    assert first["text"] != swapped["text"]


def test_each_source_is_validated_by_itself(folder):
    made = corpus(folder, {"a": 1, "c": 3}, validation_fraction=0.1)
    for number, name in enumerate("ac"):
        batches = list(made.validation(4, source=number))
        tokens = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in batches])
        assert set(tokens.tolist()) <= {ord(name), 256}


def test_the_log_names_sources_and_epochs(folder):
    made = corpus(folder, {"a": 1, "c": 3})
    assert made.describe_epochs(400) == "2.5 epochs of a, 3 epochs of c"
    for name in "ac":
        assert f"data        text at '{folder}/{name}.txt'\n" in made.describe()


def test_one_source_gives_the_rows_of_data_text(folder):
    path = str(folder / "c.txt")
    config = DataConfig(name="text", path=path, validation_fraction=0)
    text = load(config, sequence_length=4, seed=0, vocab_size=257)
    one = corpus(folder, {"c": 7})
    assert one.order == text.order
    for left, right in zip(
        islice(one.train(5), 50), islice(text.train(5), 50), strict=True
    ):
        for name, values in left.items():
            np.testing.assert_array_equal(values, right[name])


def test_a_source_without_a_row_is_refused(folder, tmp_path):
    (tmp_path / "a.txt").write_text("aa")
    (tmp_path / "b.txt").write_text("b" * 99)
    with pytest.raises(EmptyDataError, match="source 'a' is smaller than one row"):
        corpus(tmp_path, {"a": 1, "b": 1}).train(2)


def test_texts_and_conversations_are_encoded_each_in_its_way(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "model").mkdir()
    tokenizer = write_folder(tmp_path / "model", "gemma", marked=True)
    (tmp_path / "a.txt").write_text("hello all " * 50)
    line = json.dumps({"messages": turns("hello", "all hello")}) + "\n"
    (tmp_path / "b.jsonl").write_text(line * 20)
    sources = {
        "text": SourceConfig(str(tmp_path / "a.txt")),
        "chat": SourceConfig(
            str(tmp_path / "b.jsonl"), messages_key="messages", loss_on="answers"
        ),
    }
    config = DataConfig(
        name="mixture",
        sources=sources,
        tokenizer=str(tokenizer),
        validation_fraction=0,
    )
    made = load(config, sequence_length=48, seed=0, vocab_size=2**20)
    text, chat = (source.train_rows for source in made.sources)
    assert text.stream.is_separated
    assert not chat.stream.is_separated
    assert text[0]["targets"].min() >= 0
    targets = np.concatenate([chat[i]["targets"] for i in range(len(chat))])
    learned = made.tokenizer.decode(targets[targets != -100])
    assert learned.split("\n") == [*["all hello"] * 20, ""]


def pairs_of(folder, weights, **keys):
    """Pairs of whose answers the last letters are the name of their source."""
    for name in weights:
        lines = [
            {"prompt": f"{n}?", "chosen": f"y{n % 10}{name}", "rejected": f"n{name}"}
            for n in range(20)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if name in keys:
            text = text.replace("prompt", keys[name]["prompt_key"])
        (folder / f"{name}.jsonl").write_text(text)
    return DataConfig(
        name="preferences",
        sources={
            name: SourceConfig(
                str(folder / f"{name}.jsonl"), weight, **keys.get(name, {})
            )
            for name, weight in weights.items()
        },
        validation_fraction=0.2,
    )


def test_pairs_are_mixed_by_weights_and_each_source_has_its_keys(tmp_path):
    config = pairs_of(tmp_path, {"a": 1, "b": 3}, b={"prompt_key": "question"})
    made = load(config, sequence_length=16, seed=0, vocab_size=257)
    assert [source.name for source in made.sources] == ["a", "b"]
    rows = [row for batch in islice(made.train(4), 40) for row in batch["targets"]]
    # Both answers of a pair end with the name of their source.
    letters = [
        {chr(t) for t in row.tolist() if t in (ord("a"), ord("b"))} for row in rows
    ]
    assert all(len(each) == 1 for each in letters)
    share = sum(each == {"b"} for each in letters) / len(letters)
    assert share == pytest.approx(0.75, abs=0.02)
    alone = load(
        dataclasses.replace(config, sources={}, path=str(tmp_path / "a.jsonl")),
        sequence_length=16,
        seed=0,
        vocab_size=257,
    )
    (rows,), (others, _) = (
        [source.validation_rows for source in each.sources] for each in (alone, made)
    )
    assert len(rows) == len(others) > 0
    for left, right in zip(rows, others, strict=True):
        np.testing.assert_array_equal(left["tokens"], right["tokens"])
        np.testing.assert_array_equal(left["targets"], right["targets"])


# --- settings


def composed(*overrides):
    return compose(["data=mixture", *overrides], CONFIGS).config.data


def test_sources_are_given_on_the_command_line():
    data = composed("data.sources={web: {path: w.jsonl, weight: 3}, b: {path: x}}")
    assert data.sources == {
        "web": SourceConfig("w.jsonl", 3.0),
        "b": SourceConfig("x"),
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "data=mixture needs data.sources"),
        (["data.sources={a: {weight: 2}}"], r"needs data\.sources\.a\.path"),
        (["data.sources={a: {path: x, weight: 0}}"], r"data\.sources\.a\.weight"),
        (["data.sources={a: {path: x, format: csv}}"], r"data\.sources\.a\.format"),
        (["data.sources={a/b: {path: x}}"], "'a/b'"),
        (["data.sources={a: {path: x}}", "data.path=y"], r"data\.path has no effect"),
        (["data=text", "data.path=x", "data.sources={a: {path: x}}"], r"data\.sources"),
    ],
)
def test_wrong_sources_are_refused(overrides, message):
    with pytest.raises((SettingValueError, SettingConflictError), match=message):
        composed(*overrides)


PAIRS = "recipe=preference", "data=preferences"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sources={a: {weight: 2}}"], r"needs data\.sources\.a\.path"),
        (["data.sources={a: {path: x, text_key: t}}"], r"data\.sources\.a\.text_key"),
        (["data.sources={a: {path: x}}", "data.path=y"], r"data\.path has no effect"),
        (["data.sources={a: {path: x}}", "data.chosen_key=y"], r"data\.chosen_key"),
        (["data=mixture", "data.sources={a: {path: x, chosen_key: t}}"], "chosen_key"),
        (["data=mixture", "data.sources={a: {path: x}}"], "write data=preferences"),
        (["recipe=grpo", "data=prompts", "data.sources={a: {path: x}}"], "sources"),
    ],
)
def test_sources_of_pairs_have_settings_of_pairs_alone(overrides, message):
    with pytest.raises((SettingValueError, SettingConflictError), match=message):
        compose([*PAIRS, *overrides], CONFIGS)


def test_pairs_of_several_files_are_given_on_the_command_line():
    sources = "{a: {path: x, weight: 3}, b: {path: y, prompt_key: q}}"
    data = compose([*PAIRS, f"data.sources={sources}"], CONFIGS).config.data
    assert data.sources["a"] == SourceConfig("x", 3.0)
    own = data.sources["b"].alone(data)
    assert (own.name, own.path, own.prompt_key) == ("preferences", "y", "q")
