# SPDX-License-Identifier: Apache-2.0
"""``tessera explain T201``: print the page of an error.

A wheel has the pages of ``docs/errors`` as data; a checkout's are read in place. JAX is
not imported.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

from tessera.errors.base import SITE
from tessera.errors.settings import UnknownSettingError

_PACKAGE: Final = Path(__file__).parents[1]
_LINK: Final = re.compile(r"\]\(([^):]+)\.md([^)]*)\)")


def main(arguments: Sequence[str]) -> int:
    """Print the page of the code in ``arguments``, or list all codes."""
    parser = argparse.ArgumentParser(
        prog="tessera explain", description="Print the page of an error."
    )
    parser.add_argument("code", nargs="?", help="such as T201; none lists all codes")
    code: str | None = parser.parse_args(arguments).code
    try:
        sys.stdout.write(_list_of_codes() if code is None else explain(code))
    except UnknownSettingError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def explain(code: str) -> str:
    """The page of an error, in Markdown, with links to the documentation's site.

    Raises:
      UnknownSettingError: T501, there is no error with this code.

    Example:
      >>> print(explain("T201").splitlines()[0])
      # T201: a dim does not divide
    """
    pages = _pages()
    page = pages.get(code.strip("[]").upper())
    if page is None:
        raise UnknownSettingError(
            f"there is no error {code!r}", fix="'tessera explain' lists all codes"
        )
    return _LINK.sub(
        lambda link: f"]({urljoin(f'{SITE}/errors/', link[1])}.html{link[2]})",
        page.read_text(encoding="utf-8"),
    )


def _list_of_codes() -> str:
    texts = (path.read_text(encoding="utf-8") for path in _pages().values())
    return "".join(text.partition("\n")[0].removeprefix("# ") + "\n" for text in texts)


def _pages() -> dict[str, Path]:
    installed = _PACKAGE / "errors/pages"
    folder = installed if installed.is_dir() else _PACKAGE.parent / "docs/errors"
    return {path.stem: path for path in sorted(folder.glob("T*.md"))}
