# SPDX-License-Identifier: Apache-2.0
"""Which files of a data set of the Hub are read, by its card or by a glob.

The card is the YAML at the head of ``README.md``, as ``push_to_hub`` writes it:

    configs:
    - config_name: default
      data_files:
      - {split: train, path: data/train-*}
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from tessera.errors import DataNotFoundError, printable
from tessera.train.data.file_ranges import decompressed_name
from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.files.hub import CARD_FILES, HubName

_CARD: Final = "README.md"
_SUFFIXES: Final = (".jsonl", ".ndjson", ".parquet")
_MOST_SHOWN: Final = 12


def download_files(
    path: str, split: str | None, subset: str | None
) -> tuple[Path, list[Path]]:
    """The folder of a data set, and the files in it that are read.

    Nothing is inferred from the names of files. Without a card that has splits, a data
    set has to have one file, or the files are named.

    Args:
      path: ``hf://datasets/<repository>[@<revision>][/<glob>]``.
      split: ``data.split``.
      subset: ``data.subset``.

    Raises:
      DataNotFoundError: [T601] the data set has no such split, subset or files.
      HubError: [T719] the Hub does not give it.
    """
    name = HubName.parse(path)
    assert name is not None
    name = name.pin()
    listed = name.list_files()
    if name.files:
        globs = [name.files]
    else:
        globs = _globs_of_split(name, split, subset) or [_only_file(name, listed)]
    chosen = [file for file in listed if any(_is_in(file, glob) for glob in globs)]
    if not chosen:
        raise _no_files(name, f"no file is {' or '.join(globs)}", listed)
    # Its patterns are of fnmatch: a bracket in a name is none.
    exact = [file.replace("[", "[[]") for file in chosen]
    folder = name.download(exact, shows=True)
    return folder, [folder / file for file in chosen]


def _only_file(name: HubName, listed: list[str]) -> str:
    """The file of a data set whose card says nothing about files."""
    files = [file for file in listed if _has_suffix(file)]
    if len(files) != 1:
        raise _no_files(name, f"{_CARD} does not say which files are of a split", files)
    return files[0]


def _globs_of_split(
    name: HubName, split: str | None, subset: str | None
) -> list[str] | None:
    """The files that the card says a split has; None if it says nothing."""
    configs = {
        str(config.get("config_name", "default")): config for config in _configs(name)
    }
    if not configs and split == subset is None:
        return None
    if not configs and subset is None:
        raise _not_in_card(name, "split", str(split), {})
    named = [key for key, config in configs.items() if config.get("default") is True]
    if subset is None and len(configs) > 1:
        subset = named[0] if named else "default"
    elif subset is None:
        subset = next(iter(configs), "default")
    if subset not in configs:
        raise _not_in_card(name, "subset", subset, configs)
    splits = dict(_splits(configs[subset]))
    split = split or "train"
    if split not in splits:
        raise _not_in_card(name, "split", split, splits)
    return splits[split]


def _configs(name: HubName) -> Iterator[Mapping[str, Any]]:
    path = name.download(CARD_FILES) / _CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    head, _, rest = text.partition("---\n")
    if head.strip() or not rest:
        return
    try:
        values = parse_yaml(rest.partition("\n---")[0])
    except ValueError as error:
        raise DataNotFoundError(
            f"the card of the data set {name.repo} cannot be read",
            got=f"{path}: {printable(str(error).splitlines()[0])}",
            fix=_name_them(name),
        ) from error
    configs = values.get("configs") if isinstance(values, dict) else None
    for config in configs if isinstance(configs, list) else ():
        if isinstance(config, dict):
            yield config


def _splits(config: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each split of a configuration, and its globs."""
    files, folder = config.get("data_files"), config.get("data_dir")
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    elif not isinstance(files, list) or not isinstance((files or [""])[0], dict):
        files = [{"split": "train", "path": files}]
    for entry in files:
        paths = entry.get("path") if isinstance(entry, dict) else None
        globs = [paths] if isinstance(paths, str) else paths
        if isinstance(globs, list):
            prefix = f"{folder}/" if isinstance(folder, str) and folder else ""
            yield str(entry.get("split")), [f"{prefix}{glob}" for glob in globs]


def _is_in(file: str, glob: str) -> bool:
    """Whether a glob matches a file, or a folder of files with records."""
    parts, pattern = file.split("/"), glob.strip("/").removeprefix("./").split("/")
    return _fits(parts, pattern) or (
        _has_suffix(file) and _fits(parts, [*pattern, "**"])
    )


def _fits(parts: list[str], pattern: list[str]) -> bool:
    if not pattern or not parts:
        return not parts and set(pattern) <= {"**"}
    if pattern[0] == "**":
        return _fits(parts, pattern[1:]) or _fits(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _has_suffix(file: str) -> bool:
    return decompressed_name(file).endswith(_SUFFIXES)


def _not_in_card(
    name: HubName, what: str, value: str, known: Mapping[str, Any]
) -> DataNotFoundError:
    names = ", ".join(map(printable, known)) or "none"
    fix = f"write data.{what}=<one of them>" if known else _name_them(name)
    return DataNotFoundError(
        f"the data set {name.repo} has no {what} {value!r}",
        got=f"{what}s in its card: {names}",
        fix=fix,
    )


def _no_files(name: HubName, why: str, files: list[str]) -> DataNotFoundError:
    shown = "\n".join(map(printable, files[:_MOST_SHOWN]))
    more = f"\n… {len(files)} files in all" if len(files) > _MOST_SHOWN else ""
    return DataNotFoundError(
        f"it is not clear which files of the data set {name.repo} to read",
        got=f"{why}; it has\n{shown or 'no files of JSON lines or Parquet'}{more}",
        fix=_name_them(name),
    )


def _name_them(name: HubName) -> str:
    return (
        "name the files: data=text "
        f"'data.path=hf://datasets/{name.repo}/<file, folder or glob>'"
    )
