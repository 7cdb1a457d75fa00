# SPDX-License-Identifier: Apache-2.0
"""Config: their limits, and which source takes which."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tessera.errors import SettingConflictError, SettingValueError
from tessera.train.data.data_config import (
    SOURCES,
    DataConfig,
    SyntheticConfig,
    check,
)

CONFIGS = Path(__file__).parents[3] / "configs" / "data"


def refusal(*, synthetic=None, **settings) -> str:
    made_up = SyntheticConfig(**(synthetic or {}))
    with pytest.raises((SettingValueError, SettingConflictError)) as caught:
        check(DataConfig(**settings, synthetic=made_up))
    return str(caught.value)


def test_an_unknown_name_lists_the_known():
    assert refusal(name="stdlb") == (
        "[T502] data.name does not take this value\n"
        "  got: data.name=stdlb\n"
        "  fix: did you mean 'stdlib'? use stdlib, text, mixture, synthetic, "
        "preferences or prompts\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html"
    )


@pytest.mark.parametrize(
    ("settings", "name", "legal"),
    [
        ({"validation_fraction": 1.1}, "validation_fraction", "from 0 to 1"),
        ({"validation_fraction": float("nan")}, "validation_fraction", "from 0 to 1"),
        ({"prefetch": -1}, "prefetch", "from 0 to 1024"),
        ({"prefetch": 10**9}, "prefetch", "from 0 to 1024"),
        ({"synthetic": {"tokens": 10**14}}, "synthetic.tokens", "to 1000000000"),
        ({"synthetic": {"tokens": 0}}, "synthetic.tokens", "from 1 to 1000000000"),
        ({"synthetic": {"noise": 1.5}}, "synthetic.noise", "from 0 to 1"),
        (
            {"synthetic": {"vocab_size": 1}},
            "synthetic.vocab_size",
            "from 2 to 2147483647",
        ),
    ],
)
def test_a_value_out_of_range_says_the_range(settings, name, legal):
    message = refusal(name="synthetic", **settings)
    assert message.startswith(f"[T502] data.{name} does not take this value\n")
    assert f"{legal}\n  docs" in message


def test_text_needs_a_path():
    assert refusal(name="text") == (
        "[T502] data=text needs data.path\n"
        "  got: data.path is empty\n"
        "  fix: add data.path=<a file, a folder or a glob>\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html"
    )


def test_a_setting_that_would_be_ignored_is_refused():
    assert refusal(path="books") == (
        "[T507] data.path has no effect in this run\n"
        "  got: data.path=books; data.name=stdlib\n"
        "  fix: leave it out, or change data.name\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T507.html"
    )
    assert "data.format has no effect" in refusal(format="jsonl")
    assert "data.text_key has no effect" in refusal(text_key="body")
    whole = refusal(name="text", path="a", format="text", text_key="body")
    assert "data.text_key=body; data.format=text\n" in whole
    tokenizer = refusal(name="synthetic", tokenizer="x.json")
    assert "data.tokenizer=x.json; data.name=synthetic\n" in tokenizer
    synthetic = refusal(synthetic={"noise": 0.0})
    assert "data.synthetic has no effect" in synthetic


@pytest.mark.parametrize("name", ["preferences", "prompts"])
def test_records_have_keys_of_their_own(name):
    check(DataConfig(name=name, path="a", prompt_key=""))
    for setting in ({"messages_key": "chat"}, {"text_key": "a"}, {"format": "text"}):
        message = refusal(name=name, path="a", **setting)
        assert f"data.{next(iter(setting))} has no effect in this run" in message
        assert f"data.name={name}, whose text or messages data.prompt_key" in message
    assert "data.prompt_key has no effect" in refusal(prompt_key="q")
    assert "data.chosen_key has no effect" in refusal(name="prompts", chosen_key="q")


def test_all_mistakes_are_told_at_once():
    assert refusal(path="books", prefetch=-1) == (
        "[T502] 2 things in the configuration cannot be used\n"
        "  got: 1. [T502] data.prefetch does not take this value: data.prefetch=-1\n"
        "  got: 2. [T507] data.path has no effect in this run: data.path=books; "
        "data.name=stdlib\n"
        "  fix: 1. use a number from 0 to 1024\n"
        "  fix: 2. leave it out, or change data.name\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html"
    )


def test_the_settings_can_be_overridden_as_a_structured_config():
    config = OmegaConf.merge(
        OmegaConf.structured(DataConfig),
        OmegaConf.from_dotlist(["name=synthetic", "synthetic.noise=0.5", "prefetch=0"]),
    )
    assert OmegaConf.to_object(config) == DataConfig(
        name="synthetic", prefetch=0, synthetic=SyntheticConfig(noise=0.5)
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_shows_the_defaults_of_its_source(name):
    path = CONFIGS / f"{name}.yaml"
    config = OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(path))
    assert OmegaConf.to_object(config) == DataConfig(name=name)
    assert f"#   python run_training.py data={name}" in path.read_text()
