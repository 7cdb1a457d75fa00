# SPDX-License-Identifier: Apache-2.0
"""Parses YAML of files that anyone may have changed, in bounded time and memory.

Nine lines of aliases, each a list of ten of the line before, are a billion values.
"""

from typing import Any, Final

import yaml

_MOST_VALUES: Final = 50_000
_LONGEST: Final = 2**20


def parse_yaml(text: str) -> Any:
    """Parse YAML that consists of plain values.

    Raises:
      ValueError: It is not YAML, nests deeper than Python's parser can follow, contains
        itself, is longer than 1 MiB, or has more than 50,000 values where every alias
        counts as what it stands for.

    Example:
      >>> parse_yaml("[&a {step: 3}, *a]")
      [{'step': 3}, {'step': 3}]
    """
    if len(text) > _LONGEST:
        raise ValueError(f"{len(text):,} characters of YAML, of {_LONGEST:,}")
    try:
        return yaml.load(text, _BoundedLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # The constructors of numbers and dates raise what Python's raise.
    except Exception as error:
        raise ValueError(str(error).splitlines()[0] or type(error).__name__) from error


class _BoundedLoader(yaml.SafeLoader):
    """Counts values as it reads them, before any is constructed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self._num_values
        node: Any = super().compose_node(parent, index)
        if is_alias:
            if id(node) not in self._sizes:
                raise ValueError("an alias stands for what contains it")
            self._num_values += self._sizes[id(node)]
        else:
            self._num_values += 1
            self._sizes[id(node)] = self._num_values - before
        if self._num_values > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES:,} values")
        return node
