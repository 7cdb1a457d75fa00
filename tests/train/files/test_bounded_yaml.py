# SPDX-License-Identifier: Apache-2.0
"""YAML of others is plain values, or a ValueError in bounded time and memory."""

import ast
from pathlib import Path

import pytest

from tessera.train.checkpoints.choose_checkpoint import changed_settings
from tessera.train.config.config_schema import settings_of_text
from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.report.run_files import read_run

LEVELS = "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
EXPANDING = f"a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]\n{LEVELS}"
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "expanding": EXPANDING,
    "merged": MERGED,
    "recursive list": "a: &a [*a]",
    "recursive mapping": "&a {b: *a}",
    "deep": "a: " + "[" * 2000,
    "deep blocks": "- " * 2000,
    "an object": "!!python/object/apply:os.getcwd []",
    "a date": "a: 2001-99-99",
    "a timestamp": "!!timestamp x",
    "a boolean": "!!bool x",
    "digits": f"a: {'9' * 5000}",
    "a key": "{[]: 1}",
    "control characters": "a: \0",
    "surrogates": "a: \ud800",
    "half": "a: [1",
    "long": "#" * 2**20 + "#",
}


def test_aliases_stand_for_values():
    text = "a: &a {x: 1, y: [2]}\nb: *a\nc: {<<: *a, x: 3}\n"
    a = {"x": 1, "y": [2]}
    assert parse_yaml(text) == {"a": a, "b": a, "c": {**a, "x": 3}}
    assert parse_yaml("") is None


@pytest.mark.slow(reason="brackets are scanned one by one")
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_an_error(text, tmp_path):
    with pytest.raises(ValueError):  # noqa: PT011 - one message for each
        parse_yaml(text)
    with pytest.raises(ValueError):  # noqa: PT011
        settings_of_text(text)
    (line,) = changed_settings(text, "a: 1")
    assert line == "the configuration in the checkpoint is malformed"
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogatepass"))
    run = read_run(tmp_path)
    assert not run.settings
    assert run.problems[0].startswith("config.yaml: ")


@pytest.mark.parametrize("text", ["[1]", "model: []", "{optimizer: 1, model: {}}", ""])
def test_what_is_no_configuration_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011
        settings_of_text(text)


@pytest.mark.slow(reason="it reads every module")
def test_no_other_module_parses_yaml_of_others():
    package = Path(__file__).parents[3] / "tessera"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "yaml" in (text := path.read_text()) or "OmegaConf" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("yaml.load", "yaml.safe_load", "OmegaConf.load")
    }
    assert found == {
        "train/files/bounded_yaml.py",
        "train/models/named_models.py",  # a file of this package, here and below
        "train/config/setting_hints.py",
        "train/config/command_line.py",  # what this run composed, also below
        "train/trackers/tracking.py",
    }
