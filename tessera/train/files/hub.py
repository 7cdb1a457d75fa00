# SPDX-License-Identifier: Apache-2.0
"""Names of the Hugging Face Hub, and the files behind them in the Hub's own cache.

A user writes ``Qwen/Qwen3-0.6B``, with ``@<revision>`` if it is not ``main``. A
configuration holds ``hf://Qwen/Qwen3-0.6B@<commit>``, which names the same files
forever, and ``hf://datasets/<repository>@<commit>/<files>`` for data. The token, the
cache and the offline mode are those of ``huggingface_hub``, whose locks let one process
of a host download each file.
"""

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tessera.errors import HubError, MissingLibraryError, SettingValueError, printable

PREFIX: Final = "hf://"
# What a model's folder has, by exact names: never pickles, nor weights of other tools.
MODEL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
)
# Small, and nearly every data set has one of them.
CARD_FILES: Final = ("README.md", ".gitattributes")
WEIGHT_FILES: Final = (
    *MODEL_FILES,
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)
_REPO: Final = r"(?P<repo>[\w-][\w.-]*/[\w.-]+)"
_BARE: Final = re.compile(rf"{_REPO}(@(?P<revision>[^@]+))?")
# As `HfFileSystem` reads it; of revisions, only these have a slash in a data set.
_MODEL: Final = re.compile(rf"{PREFIX}{_BARE.pattern}")
_DATASET: Final = re.compile(
    rf"{PREFIX}datasets/{_REPO}(@(?P<revision>refs/(convert|pr)/[\w.-]+|[^/@]+))?"
    r"(/(?P<files>.+))?"
)
# What ends so is a file, and no repository.
_FILES: Final = (".safetensors", ".json", ".jsonl", ".ndjson", ".parquet", ".txt")
_COMMIT: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub.

    Attributes:
      repo: Its name, ``organization/name``.
      revision: A branch, a tag or a commit; None is ``main``.
      is_dataset: Whether it is a data set, not a model.
      files: The files that are meant, a glob; "" is the repository.

    Example:
      >>> HubName.parse("hf://Qwen/Qwen3-0.6B@main")
      HubName(repo='Qwen/Qwen3-0.6B', revision='main', is_dataset=False, files='')
    """

    repo: str
    revision: str | None = None
    is_dataset: bool = False
    files: str = ""

    @classmethod
    def parse(cls, text: str) -> "HubName | None":
        """What a text names that begins with ``hf://``; None for another one.

        Raises:
          SettingValueError: [T502] it begins so, and names no repository.
        """
        if not text.startswith(PREFIX):
            return None
        is_dataset = text.startswith(f"{PREFIX}datasets/")
        match = (_DATASET if is_dataset else _MODEL).fullmatch(text)
        if match is None:
            raise SettingValueError(
                "a name of the Hub names no repository",
                got=printable(text),
                fix=f"write {PREFIX}<organization>/<model>[@<revision>], or "
                f"{PREFIX}datasets/<organization>/<data set>[@<revision>][/<files>]",
            )
        return cls(is_dataset=is_dataset, **match.groupdict(""))._normalized()

    @classmethod
    def find(cls, text: str, *, is_dataset: bool = False) -> "HubName | None":
        """As ``parse``; ``organization/name[@revision]`` too, if no such path exists.

        Raises:
          SettingValueError: [T502] as ``parse`` does.
        """
        match = _BARE.fullmatch(text)
        if match is None or text.endswith(_FILES) or os.path.exists(text):
            return cls.parse(text)
        return cls(is_dataset=is_dataset, **match.groupdict(""))._normalized()

    def _normalized(self) -> "HubName":
        return self if self.revision else replace(self, revision=None)

    def __str__(self) -> str:
        datasets = "datasets/" if self.is_dataset else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{datasets}{self.repo}{revision}" + (
            f"/{self.files}" if self.files else ""
        )

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which no push changes."""
        return _COMMIT.fullmatch(self.revision or "") is not None

    def pin(self) -> "HubName":
        """The same with the commit that its revision is now.

        Downloads what is small and needed next. Without a network, it is the commit
        that the cache has for the revision.

        Raises:
          HubError, MissingLibraryError: As ``download`` does.
        """
        if self.is_pinned:
            return self
        files = CARD_FILES if self.is_dataset else MODEL_FILES
        return replace(self, revision=self.download(files).name)

    def download(self, files: Iterable[str], *, shows: bool = False) -> Path:
        """The folder of the repository's files in the Hub's cache.

        Args:
          files: Patterns of those that are needed; others may be there, too.
          shows: Whether a terminal shows progress.

        Raises:
          HubError: [T719] there is no such repository or revision, no permission, or
            no network and not all in the cache.
          MissingLibraryError: [T511] ``huggingface_hub`` is not installed.
        """
        hub = hub_library(self.repo)
        try:
            folder = hub.snapshot_download(
                self.repo,
                repo_type="dataset" if self.is_dataset else "model",
                revision=self.revision,
                allow_patterns=[*files],
                tqdm_class=_bars(is_shown=shows),
            )
        # Of the network, the server, the disk and Xet: they have no class in common.
        except Exception as error:
            raise self._error(hub, error) from error
        return Path(folder)

    def list_files(self) -> list[str]:
        """The paths of all files of a data set's commit.

        Raises:
          HubError, MissingLibraryError: As ``download`` does.
        """
        hub = hub_library(self.repo)
        self.download(CARD_FILES)
        try:
            # What a download has listed. A folder in the cache may lack some of them.
            files = hub.get_cached_repo_tree(
                self.repo, repo_type="dataset", revision=self.revision
            )
        except Exception as error:
            raise self._error(hub, error) from error
        return sorted(file.path for file in files)

    def _error(self, hub: ModuleType, error: Exception) -> HubError:
        kinds, kind = hub.errors, "data set" if self.is_dataset else "model"
        folder = "datasets/" if self.is_dataset else ""
        page = f"{hub.constants.ENDPOINT}/{folder}{self.repo}"
        here = f"\nthere is no folder {self.repo!r} here, either"
        here = "" if os.path.exists(self.repo) else here
        got, log_in = page, "run: hf auth login (or set HF_TOKEN)"
        if isinstance(error, kinds.GatedRepoError):
            what = f"{self.repo} is gated, and this machine may not read it"
            fix = f"accept its terms on {page}, then {log_in}"
        elif isinstance(error, kinds.RepositoryNotFoundError):
            what = f"the Hub has no {kind} {self.repo!r}, or it is private"
            fix = f"check the name; for a private one, {log_in}"
            got = f"{page}{here}"
        elif isinstance(error, kinds.RevisionNotFoundError):
            what = f"{self.repo} has no revision {self.revision!r}"
            fix = f"name a branch, a tag or a whole commit: {self.repo}@main"
        elif status_of(error) in (401, 403):
            what, fix = f"the Hub refuses to give {self.repo}", log_in
        else:
            what = f"{self.repo} cannot be downloaded, and is not whole in the cache"
            why = [*str(error).splitlines(), type(error).__name__][0]
            why = why.removeprefix("Got: ")
            if hub.constants.HF_HUB_OFFLINE:
                why = "HF_HUB_OFFLINE is set"
            got, fix = f"{printable(why, longest=200)}{here}", self._by_hand()
        return HubError(what, got=got, fix=fix)

    def _by_hand(self) -> str:
        folder = self.repo.rpartition("/")[2]
        options = f" --revision {self.revision}" if self.revision else ""
        if self.is_dataset:
            # A folder of it has all splits, and its card would be a text.
            options += " --repo-type dataset"
            bring = "bring its cache here: ~/.cache/huggingface, or what HF_HOME names"
        else:
            options += f" --local-dir {folder}"
            bring = f"bring the folder here, and write model=./{folder}"
        return (
            f"where there is a network, run: hf download {self.repo}{options}\n{bring}"
        )


def hub_library(repo: str) -> ModuleType:
    """``huggingface_hub``.

    Raises:
      MissingLibraryError: [T511] it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingLibraryError(
            f"{repo!r} is no folder here, and a name of the Hub needs a library",
            got=str(error),
            fix="run: pip install 'tessera-spmd[hub]'; or name a folder: ./model",
        ) from error
    return huggingface_hub


def _bars(*, is_shown: bool) -> Any:
    """The progress bars of a download: of large files, and on a terminal."""
    from huggingface_hub.utils import tqdm

    is_hidden = not (is_shown and sys.stderr.isatty())

    class Bars(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": is_hidden or None})

    return Bars


def is_hidden_by_path(text: str) -> bool:
    """Whether a name could be of the Hub, if there were no such path here."""
    return _BARE.fullmatch(text) is not None and os.path.exists(text)


def local_path(
    path: str | Path, files: Iterable[str] = MODEL_FILES, *, bare: bool = False
) -> str | Path:
    """A path as it is, or the folder of the files that ``hf://…`` names.

    Args:
      path: Of a file, of a folder, or a name of the Hub.
      files: Patterns of the files that are needed of a repository.
      bare: Whether ``organization/name`` is of the Hub if no such path exists.

    Raises:
      SettingValueError: [T502] as ``HubName.parse`` does.
      HubError, MissingLibraryError: As ``HubName.download`` does.
    """
    name = (HubName.find if bare else HubName.parse)(str(path))
    return path if name is None else name.download(files, shows=files != MODEL_FILES)


def status_of(error: Exception) -> int | None:
    """The status of the response that an error is about, if it is about one."""
    return getattr(getattr(error, "response", None), "status_code", None)
