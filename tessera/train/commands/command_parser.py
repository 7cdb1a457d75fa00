# SPDX-License-Identifier: Apache-2.0
"""The command line of a subcommand, whose mistakes show how it is written."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import NoReturn

from tessera.errors import SettingValueError, UnknownSettingError


class CommandParser(ArgumentParser):
    """A parser whose mistakes are coded, with the examples of the description.

    Args:
      prog: The subcommand, such as ``tessera export``.
      description: The docstring of its module; lines that begin with ``prog`` are
        examples.
    """

    def __init__(self, prog: str, description: str | None) -> None:
        layout = RawDescriptionHelpFormatter
        super().__init__(
            prog, description=description, formatter_class=layout, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """T501 for an option that does not exist, T502 for other mistakes."""
        lines = (self.description or "").splitlines()
        examples = [line for line in lines if line.startswith(self.prog)]
        is_unknown = message.startswith("unrecognized arguments: ")
        raise (UnknownSettingError if is_unknown else SettingValueError)(
            f"the command line of {self.prog} is wrong",
            got=message,
            fix="\n".join([*examples, f"{self.prog} --help lists the options"]),
        )
