# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run say of themselves, compared: they have to say the same.

JAX compares nothing. Two processes with another learning rate, or another version of
the code, exchange numbers without a word, and the weights that they believe to share
drift apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tessera.errors import RanksDifferError, TesseraError
from tessera.untrusted import printable

# Section, then name, then value: {"versions": {"jax": "0.10.2"}}.
Facts: TypeAlias = Mapping[str, Mapping[str, str]]

_LINES_SHOWN: Final = 24
_LONGEST_VALUE: Final = 120


@dataclass(frozen=True)
class Difference:
    """One thing that ranks say differently.

    Attributes:
      section: Which kind of thing: ``"configuration"``.
      name: ``"training.seed"``.
      values: What was said, with the ranks that said so; None where it is not there.
    """

    section: str
    name: str
    values: tuple[tuple[str | None, tuple[int, ...]], ...]

    def __str__(self) -> str:
        said = "; ".join(
            f"{_shown(value)} on {listed(ranks)}" for value, ranks in self.values
        )
        return f"{_shown(self.section)}: {_shown(self.name)} is {said}"


def differences(facts: Mapping[int, Facts]) -> list[Difference]:
    """Everything that is not said by all ranks alike, in the order of rank 0's facts.

    Args:
      facts: What each rank says.

    Example:
      >>> one, two = {"versions": {"jax": "0.10.2"}}, {"versions": {"jax": "0.12.0"}}
      >>> print(*differences({0: one, 1: two, 2: one}))
      versions: jax is 0.10.2 on ranks 0, 2; 0.12.0 on rank 1
    """
    names = {
        (section, name): None
        for rank in sorted(facts)
        for section, named in facts[rank].items()
        for name in named
    }
    found: list[Difference] = []
    for section, name in names:
        said: dict[str | None, list[int]] = {}
        for rank in sorted(facts):
            value = facts[rank].get(section, {}).get(name)
            said.setdefault(value, []).append(rank)
        if len(said) > 1:
            values = tuple((value, tuple(ranks)) for value, ranks in said.items())
            found.append(Difference(section, name, values))
    return found


# For each section, what it means that it differs, and what to do.
_MEANINGS: Final = {
    "devices": (
        "Devices are not homogeneous",
        "use devices of one kind, and as many for each rank",
    ),
    "versions": (
        "the ranks run different versions",
        "install the same versions everywhere: make them from one set of constraints",
    ),
    "configuration": (
        "the ranks have different configurations",
        "start all of them with the same files and arguments",
    ),
    "code": (
        "the ranks run different code",
        "bring all machines to the same commit, without changes of their own",
    ),
    "step": (
        "the ranks compiled different steps",
        "look for what differs in their environments, such as JAX_* and XLA_FLAGS, and "
        "for code that depends on the rank",
    ),
}


def difference_error(found: Sequence[Difference]) -> TesseraError:
    """T707 for what ranks say differently; at least one thing.

    Args:
      found: From ``differences``.
    """
    sections = dict.fromkeys(difference.section for difference in found)
    meanings = [
        _MEANINGS.get(name, (f"the ranks differ: {_shown(name)}", "make them the same"))
        for name in sections
    ]
    return RanksDifferError(
        ", and ".join(what for what, _ in meanings),
        got="\n".join(shown(found)),
        fix="\n".join(fix for _, fix in meanings),
    )


def shown(found: Sequence[Difference]) -> list[str]:
    """A line for each difference, as many as a person reads."""
    lines = [str(difference) for difference in found[:_LINES_SHOWN]]
    if more := len(found) - len(lines):
        lines.append(f"and {more} more")
    return lines


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of them shortened.

    Example:
      >>> listed([3]), listed([0, 1, 2, 3, 6]), listed([1, 2])
      ('rank 3', 'ranks 0-3, 6', 'ranks 1, 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    ]
    return f"ranks {', '.join(parts)}"


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return printable(value, longest=_LONGEST_VALUE) or "empty"
