# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a rank (versions, code, devices), and their comparison across ranks.

JAX compares nothing. Two processes with different learning rates, or different versions
of the code, exchange numbers without a warning, and the weights that they believe to
share drift apart.

No fingerprint needs JAX's backend, which may start only after the rendezvous.
"""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, TypeAlias

from tessera.errors import RanksDifferError, TesseraError, printable
from tessera.train.runtime.accelerators import assign_devices, find_accelerators
from tessera.train.runtime.cluster import Cluster

# Section -> name -> value: {"versions": {"jax": "0.10.2"}}.
Fingerprint: TypeAlias = Mapping[str, Mapping[str, str]]

# The libraries that determine the compiled program and the data.
_LIBRARIES: Final = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "tessera-spmd")
_PACKAGE: Final = Path(__file__).parents[2]
_MAX_LINES: Final = 24
_MAX_VALUE: Final = 120
# Section -> what a difference in it means, and what to do.
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
        "start all of them with the same files and arguments; where names of the Hub "
        "have other commits, write the commit: <organization>/<name>@<commit>",
    ),
    "code": (
        "the ranks run different code",
        "bring all machines to the same commit, without changes of their own",
    ),
    "modules": (
        "the ranks import different modules",
        "bring the module of the model, and what it imports, to all machines alike",
    ),
    "data": (
        "the ranks read different data",
        "bring the same files of text and of the tokenizer to all machines; each looks "
        "up relative paths in its own current folder",
    ),
    "step": (
        "the ranks compiled different steps",
        "look for what differs in their environments, such as JAX_* and XLA_FLAGS, and "
        "for code that depends on the rank",
    ),
}


def version_fingerprint() -> dict[str, str]:
    """The versions of Python and of the libraries that a program depends on."""
    return {"python": platform.python_version(), **installed(_LIBRARIES)}


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """The versions of the libraries that are installed."""
    versions: dict[str, str] = {}
    for name in libraries:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def code_fingerprint() -> dict[str, str]:
    """A hash of each file of Tessera, and of the program that runs.

    Twelve hex digits of its SHA-256: enough to tell two files apart, and to name those
    that differ.
    """
    files = {
        str(path.relative_to(_PACKAGE.parent)): path for path in _PACKAGE.rglob("*.py")
    }
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    # pip writes a script such as bin/tessera with the path of its environment inside.
    if program and Path(program).parent != Path(sysconfig.get_path("scripts")):
        files[Path(program).name] = Path(program)
    return _file_hashes(files)


def module_fingerprint(names: Iterable[str]) -> dict[str, str]:
    """A hash of the files of modules, and of what they import from their own folders.

    Args:
      names: Modules of the user, which were imported; a part after ``:`` is left out.
    """
    named = {name.partition(":")[0].partition(".")[0] for name in names}
    installed_in = {sysconfig.get_path(name) for name in ("stdlib", "purelib")}
    files = {
        name: Path(file)
        for name, module in sys.modules.copy().items()
        if (file := getattr(module, "__file__", None)) and name != "__main__"
    }
    folders = {
        str(_import_folder(name, path))
        for name, path in files.items()
        if name.partition(".")[0] in named
    }
    own = {
        name: path
        for name, path in files.items()
        if name.partition(".")[0] in named
        or str(_import_folder(name, path)) in folders - installed_in
    }
    return _file_hashes(own)


def _import_folder(name: str, path: Path) -> Path:
    """The folder of ``sys.path`` that a module is below."""
    depth = name.count(".") + (path.stem == "__init__")
    return path.parents[min(depth, len(path.parents) - 1)]


def _file_hashes(files: Mapping[str, Path]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for name, path in sorted(files.items()):
        try:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        except OSError:
            continue  # another process is changing the installation
    return hashes


def device_fingerprint(
    cluster: Cluster, platform_name: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """The kinds of this rank's devices, and how many.

    Args:
      cluster: The rank.
      platform_name: ``"cpu"`` means that no accelerator is used.
      environ: The environment variables.
    """
    visible = find_accelerators(environ)
    if platform_name == "cpu" or not visible:
        return {"kind": f"CPU, {platform.machine()}"}
    indices = assign_devices(cluster.local_rank, cluster.local_size, len(visible))
    own = visible if indices is None else [visible[index] for index in indices]
    return {"kind": " and ".join(sorted(set(own))), "count": str(len(own))}


def differences(fingerprints: Mapping[int, Fingerprint]) -> list[tuple[str, str]]:
    """All entries that differ between ranks, in the order of rank 0's fingerprint.

    Args:
      fingerprints: The fingerprint of each rank.

    Returns:
      The section of each entry, and a text: its name, and each value with the ranks
      that have it.

    Example:
      >>> one, two = {"versions": {"jax": "0.10.2"}}, {"versions": {"jax": "0.12.0"}}
      >>> differences({0: one, 1: two, 2: one})
      [('versions', 'versions: jax is 0.10.2 on ranks 0, 2; 0.12.0 on rank 1')]
    """
    entries = {
        (section, name): None
        for rank in sorted(fingerprints)
        for section, values in fingerprints[rank].items()
        for name in values
    }
    result: list[tuple[str, str]] = []
    for section, name in entries:
        ranks: dict[str | None, list[int]] = {}
        for rank in sorted(fingerprints):
            value = fingerprints[rank].get(section, {}).get(name)
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(
                f"{_shown(value)} on {format_ranks(group)}"
                for value, group in ranks.items()
            )
            text = f"{_shown(section)}: {_shown(name)} is {values}"
            result.append((section, text))
    return result


def difference_error(found: Sequence[tuple[str, str]]) -> TesseraError:
    """T707 for at least one difference.

    Args:
      found: From ``differences``.
    """
    meanings = [
        _MEANINGS.get(name, (f"the ranks differ: {_shown(name)}", "make them the same"))
        for name in dict.fromkeys(section for section, _ in found)
    ]
    return RanksDifferError(
        ", and ".join(what for what, _ in meanings),
        got="\n".join(format_differences(found)),
        fix="\n".join(fix for _, fix in meanings),
    )


def format_differences(found: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each difference, and the number of those left out."""
    lines = [text for _, text in found[:_MAX_LINES]]
    if more := len(found) - len(lines):
        lines.append(f"and {more} more")
    return lines


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, with consecutive ones as ranges.

    Example:
      >>> format_ranks([3]), format_ranks([0, 1, 2, 3, 6]), format_ranks([1, 2])
      ('rank 3', 'ranks 0-3, 6', 'ranks 1, 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = [
        f"{each[0]}-{each[-1]}" if len(each) > 2 else ", ".join(map(str, each))
        for each in ranges
    ]
    return f"ranks {', '.join(parts)}"


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return printable(value, longest=_MAX_VALUE) or "empty"
