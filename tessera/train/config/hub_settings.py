# SPDX-License-Identifier: Apache-2.0
"""Replaces the names of the Hub in a configuration by names with a commit.

A resumed run uses the commits that its checkpoint has: a push to ``main`` meanwhile
changes nothing of it.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from tessera.errors import (
    CheckpointNotFoundError,
    HubError,
    SettingValueError,
    TesseraError,
)
from tessera.train.config.overrides import RUN_DIR
from tessera.train.config.setting_fields import collected, walk
from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.files.hub import HubName
from tessera.train.runtime.launcher_protocol import ParentLauncher

_OF_MODELS: Final = re.compile(r"training\.init_from|data\.tokenizer|rewards\.\d+")
_OF_DATA: Final = re.compile(r"data\.(path|sources\..+\.path)")


class HubCommits:
    """Gives names of the Hub their commits.

    Args:
      overrides: The command line, which says whether a run is resumed.
    """

    def __init__(self, overrides: Sequence[Override]) -> None:
        self._given = {one.key_or_group: one.value() for one in overrides}

    def pin(self, name: HubName) -> HubName:
        """A name with its commit: that of the run that is resumed, or the newest.

        Raises:
          HubError: [T719] that run used another commit than the one that is named; or
            as ``HubName.pin`` does.
          MissingLibraryError: [T511] as ``HubName.pin`` does.
        """
        kind = name.repo, name.is_dataset
        same = [one for one in self._used if (one.repo, one.is_dataset) == kind]
        used = sorted({str(one.revision) for one in same})
        if name.revision is None and len(used) == 1:
            return replace(name, revision=used[0])
        pinned = name.pin()
        if used and pinned.revision not in used:
            raise HubError(
                f"the run that is resumed used another commit of {name.repo}",
                got=f"{' and '.join(used)}, and {name} is {pinned.revision} now",
                fix=f"leave out the revision, or write it: {name.repo}@{used[0]}",
            )
        return pinned

    def pin_settings(self, config: DictConfig) -> Iterator[TesseraError]:
        """Pin the names in a configuration, in place; the errors.

        Where a model's folder goes, ``organization/name`` is one as well.
        """
        errors: list[TesseraError] = []
        values: Any = OmegaConf.to_container(config, resolve=False)
        for path, value in _texts(values):
            is_model = _OF_MODELS.fullmatch(path) is not None
            if not (is_model or _OF_DATA.fullmatch(path)):
                continue
            with collected(errors):
                name = HubName.find(value) if is_model else HubName.parse(value)
                if name is not None and is_model:
                    check_model(name, path)
                # The check of the data says that a path is of a model.
                if name is not None and (is_model or name.is_dataset):
                    OmegaConf.update(config, path, str(self.pin(name)))
        return iter(errors)

    @cached_property
    def _used(self) -> list[HubName]:
        """The names in the configuration of the run that is resumed."""
        for folder in self._resumed():
            # Here, because these import JAX.
            from tessera.train.checkpoints.checkpoint_folder import find_newest
            from tessera.train.checkpoints.manifest import LAST
            from tessera.train.checkpoints.metadata import read_metadata

            # What cannot be read has its own error later.
            with suppress(CheckpointNotFoundError, OSError, ValueError):
                newest = find_newest(Path(folder))
                values = parse_yaml(read_metadata(newest / LAST).config)
                texts = _texts(values)
                return [name for _, text in texts if (name := HubName.parse(text))]
        return []

    def _resumed(self) -> Iterator[str]:
        """Where the checkpoint may be that ``choose_start`` finds."""
        launcher = ParentLauncher.find(os.environ)
        attempt = launcher.attempt if launcher else 0
        resume = self._given.get("training.resume", "none")
        if launcher and (before := launcher.shared_before()):
            yield before
        if (attempt or resume == "auto") and RUN_DIR in self._given:
            yield str(self._given[RUN_DIR])
        if resume not in ("none", "auto"):
            yield str(resume)


def _texts(values: Any) -> Iterator[tuple[str, str]]:
    """Every text of a configuration with its path, those of lists as ``rewards.0``."""
    for path, value in walk(values):
        parts = {path: value}
        if isinstance(value, list):
            parts = {f"{path}.{i}": one for i, one in enumerate(value)}
        yield from ((key, one) for key, one in parts.items() if isinstance(one, str))


def check_model(name: HubName, setting: str) -> None:
    """Raise T502 for a data set where a model goes."""
    if name.is_dataset:
        raise SettingValueError(
            f"{setting} names a data set",
            got=f"{setting}={name}",
            fix=f"write hf://{name.repo} for a model of that name",
        )
