# SPDX-License-Identifier: Apache-2.0
import contextlib

import flax
import jax
import pytest

from tessera.analysis.source_lines import StackFrame, short, user_line
from tessera.jax_compat.equation_lines import PACKAGE, is_library_code

JAX = StackFrame("/venv/lib/python3.12/site-packages/jax/_src/lax.py", 9)
FLAX = StackFrame("/venv/lib/python3.12/site-packages/flax/nnx/linear.py", 8)
MACHINERY = StackFrame(str(PACKAGE / "graph" / "rewriting.py"), 7)
MODEL = StackFrame(str(PACKAGE / "models" / "gemma3.py"), 6)
USER = StackFrame("/home/me/train.py", 5, "step")


def test_the_line_is_the_innermost_one_that_the_user_wrote():
    outer = StackFrame("/home/me/main.py", 1)
    assert user_line([JAX, FLAX, MACHINERY, USER, outer]) == "/home/me/train.py:5"


def test_tesseras_models_are_user_code():
    assert user_line([JAX, MODEL, MACHINERY, USER]) == f"{MODEL.file}:6"


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/tessera/train.py",
        "/home/me/tessera/graph/train.py",
        "/home/me/jax/ops/train.py",
        "/home/me/site-packages/train.py",
        "/home/me/.venv/lib/python3.13/site-packages/mine/jax/train.py",
        "/home/me/.venv/lib/python3.13/site-packages/jax_mine/train.py",
        f"{PACKAGE}/graphics.py",
        f"{PACKAGE.parent}/graph/train.py",
        "/home/Jörg Ö/a b/train.py",
        "train.py",
    ],
)
def test_a_users_file_is_no_machinery_wherever_it_lies(path):
    assert not is_library_code(path)


@pytest.mark.parametrize(
    "path",
    [
        JAX.file,
        "/home/me/jax/.venv/lib/python3.13/site-packages/optax/_src/alias.py",
        "/usr/lib/python3/dist-packages/jax/_src/lax.py",
        jax.__file__,
        flax.__file__,
        contextlib.__file__,
        f"{PACKAGE}/graph/tracer/tracer.py",
        f"{PACKAGE}/jax_compat/jaxprs.py",
    ],
)
def test_libraries_and_python_itself_are_machinery(path):
    assert is_library_code(path)


def test_a_library_outside_of_site_packages_is_machinery(monkeypatch):
    monkeypatch.setattr(
        "tessera.jax_compat.equation_lines._elsewhere", lambda: ["/opt/src/jax"]
    )
    is_library_code.cache_clear()
    assert is_library_code("/opt/src/jax/_src/lax.py")
    assert not is_library_code("/opt/src/jaxtrain/train.py")


def test_a_stack_of_machinery_alone_shows_its_innermost_line():
    assert user_line([JAX, MACHINERY]) == str(JAX)


def test_no_stack_has_no_line():
    assert user_line([]) == ""


def test_a_file_in_the_working_folder_is_shown_relative_to_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short(f"{tmp_path}/a/b/c/train.py:3") == "a/b/c/train.py:3"
    assert short("/other/a/b/train.py:3") == "b/train.py:3"
    assert short("train.py:3") == "train.py:3"
