# SPDX-License-Identifier: Apache-2.0
"""Print the test files and folders that mirror what a change touches, a line each.

The change is what came since the tag ``green``, or in the last eight hours of commits
where there is none. Test files that changed come first; then, for each changed module
of ``tessera/``, the tests of the same path, or of the nearest folder that has tests,
and those of benchmarks.

    python .ci/touched_tests.py [REPOSITORY]
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def changed_files(root: Path) -> list[str]:
    """Files that changed since the last green commit, as far as it is known."""
    base = git(root, "rev-parse", "--verify", "--quiet", "green").strip()
    if not base:
        newest = int(git(root, "log", "-1", "--format=%ct") or 0)
        before = f"--before={newest - 8 * 3600}"
        base = git(root, "rev-list", "-1", before, "HEAD").strip()
    # Without an older commit everything is new.
    return git(root, "diff", "--name-only", base or EMPTY_TREE, "HEAD").splitlines()


EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def tests_of(root: Path, file: str) -> Path | None:
    """The tests of a changed file, relative to the repository; None if it has none."""
    path = Path(file)
    if path.parts[0] == "tests":
        if path.name.startswith("test_"):
            return path if (root / path).exists() else None
        # What tests of a folder share; at the root it is all of them.
        shared = len(path.parts) > 2 and (root / path.parent).is_dir()
        return path.parent if shared else None
    if path.suffix != ".py":
        return None
    if path.parts[0] == "benchmarks":
        return Path("tests/benchmarks")
    if path.parts[0] != "tessera":
        return None
    mirrored = Path("tests", *path.parts[1:])
    module = mirrored.with_name(f"test_{path.name}")
    if (root / module).exists():
        return module
    folder = mirrored.parent
    # Of a module at the root there is nothing nearer than all tests.
    return folder if folder != Path("tests") and (root / folder).is_dir() else None


def touched_tests(root: Path, files: Iterable[str]) -> list[Path]:
    """Tests of changed files, those that changed first, none inside of another."""
    found = [path for file in files if (path := tests_of(root, file)) is not None]
    found.sort(key=lambda path: path.suffix != ".py")
    unique = list(dict.fromkeys(found))
    return [path for path in unique if not set(path.parents) & set(unique)]


if __name__ == "__main__":
    repository = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    print(*touched_tests(repository, changed_files(repository)), sep="\n")
