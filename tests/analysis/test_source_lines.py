# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import tessera
from tessera.analysis.source_lines import Frame, short, user_line

PACKAGE = Path(tessera.__file__).parent
JAX = Frame("/venv/lib/python3.12/site-packages/jax/_src/lax.py", 9)
FLAX = Frame("/venv/lib/python3.12/site-packages/flax/nnx/linear.py", 8)
MACHINERY = Frame(str(PACKAGE / "graph" / "rewriting.py"), 7)
MODEL = Frame(str(PACKAGE / "models" / "gemma3.py"), 6)
USER = Frame("/home/me/train.py", 5, "step")


def test_the_line_is_the_innermost_one_that_the_user_wrote():
    outer = Frame("/home/me/main.py", 1)
    assert user_line([JAX, FLAX, MACHINERY, USER, outer]) == "/home/me/train.py:5"


def test_tesseras_models_are_user_code():
    assert user_line([JAX, MODEL, MACHINERY, USER]) == f"{MODEL.file}:6"


def test_a_stack_of_machinery_alone_shows_its_innermost_line():
    assert user_line([JAX, MACHINERY]) == str(JAX)


def test_no_stack_has_no_line():
    assert user_line([]) == ""


def test_a_file_in_the_working_folder_is_shown_relative_to_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short(f"{tmp_path}/a/b/c/train.py:3") == "a/b/c/train.py:3"
    assert short("/other/a/b/train.py:3") == "b/train.py:3"
    assert short("train.py:3") == "train.py:3"
