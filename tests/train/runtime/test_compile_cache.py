# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled programs: made private, and refused where it is not."""

import os
import stat

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tessera.errors import CompileCacheError
from tessera.train.runtime.compile_cache import make_compile_cache, open_compile_cache


@pytest.fixture(autouse=True)
def _jax_as_before():
    before = chosen()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "compiled"
    path.mkdir(mode=0o700)
    return path


def chosen():
    return jax.config.values["jax_compilation_cache_dir"]


def refusal(path) -> CompileCacheError:
    before = chosen()
    with pytest.raises(CompileCacheError) as caught:
        open_compile_cache(str(path))
    assert chosen() == before
    return caught.value


def test_a_folder_is_made_for_the_user_alone(tmp_path):
    path = tmp_path / "a" / "compiled"
    open_compile_cache(str(path))
    assert not path.parent.exists()  # what is wrong elsewhere is told first
    make_compile_cache()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert chosen() == str(path)
    open_compile_cache(str(path))  # again, as the next run does


def test_without_one_jax_is_left_as_it_is():
    jax.config.update("jax_compilation_cache_dir", None)
    open_compile_cache(None)
    assert chosen() is None


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o755, "others may look into it: its mode is 755"),
        (0o770, "others may write it: its mode is 770"),
        (0o701, "others may look into it: its mode is 701"),
        (0o777, "others may write it: its mode is 777"),
    ],
)
def test_a_folder_of_others_too_is_refused(folder, mode, said):
    folder.chmod(mode)
    assert str(refusal(folder)) == (
        f"[T709] the folder of compiled programs is not yours alone: {folder}\n"
        f"  got: {said}\n"
        f"  fix: chmod 700 {folder}\n"
        "  fix: or take another: runtime.compile_cache=<folder>\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T709.html"
    )


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    got = f"it belongs to user {user}, and this is user {user + 1}"
    assert refusal(folder).got == got


def test_a_folder_that_anyone_may_exchange_is_refused(folder):
    folder.parent.chmod(0o777)
    assert refusal(folder).got == (
        f"everyone may put another one in its place: {folder.parent} is writable"
    )
    folder.parent.chmod(0o1777)  # as /tmp
    open_compile_cache(str(folder))
    assert chosen() == str(folder)


def test_a_link_is_judged_by_where_it_leads(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    open_compile_cache(str(link))
    assert chosen() == str(folder)
    folder.chmod(0o750)
    refusal(link)


@pytest.mark.parametrize("name", ["file", "file/below", "a\0b", "n" * 300, "link"])
def test_a_folder_that_cannot_be_is_said(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("link")
    error = refusal(tmp_path / name)
    assert error.what == "the folder of compiled programs cannot be made"
    assert error.got.startswith(repr(f"{tmp_path}/{name}") + ": ")


def test_the_folder_that_jax_was_given_is_looked_at_as_well(folder):
    jax.config.update("jax_compilation_cache_dir", str(folder))
    open_compile_cache(None)
    assert chosen() == str(folder)
    folder.chmod(0o755)
    with pytest.raises(CompileCacheError, match="not yours alone"):
        open_compile_cache(None)


def test_what_is_no_folder_is_left_to_jax():
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/compiled")
    open_compile_cache(None)
    assert chosen() == "gs://bucket/compiled"
