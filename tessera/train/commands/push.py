# SPDX-License-Identifier: Apache-2.0
"""Upload an exported folder, of a model or of adapters, to the Hugging Face Hub.

tessera push my-model my-name/my-model
tessera push my-adapters my-name/my-adapters --public

A repository that does not exist is created, private without --public. What an earlier
push has left of a model's files is replaced as a whole, in one commit.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from tessera.errors import (
    HubError,
    ModelFolderError,
    SettingValueError,
    TesseraError,
    printable,
)
from tessera.train.commands.command_parser import CommandParser
from tessera.train.files.hub import (
    PREFIX,
    WEIGHT_FILES,
    HubName,
    hub_library,
    status_of,
)
from tessera.train.runtime.exit_codes import shows_errors

_ADAPTERS: Final = ("adapter_config.json", "adapter_model.safetensors")
_BESIDE: Final = ("README.md", "LICENSE*", "NOTICE*")


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Push what the command line asks for; the exit code."""
    options = _parser().parse_args(arguments)
    if "/" not in options.repo:
        raise SettingValueError(
            "a repository has an owner",
            got=options.repo,
            fix=f"write <your name>/{options.repo}; hf auth whoami shows your name",
        )
    # A name of the Hub, whatever folders are here.
    name = HubName.parse(f"{PREFIX}{options.repo.removeprefix(PREFIX)}")
    assert name is not None
    files = _check_export(options.folder)
    names = [
        path.relative_to(options.folder).as_posix()
        for path in sorted(options.folder.rglob("*"))
        if path.is_file()
    ]
    sent = (*files, *_BESIDE)
    others = [n for n in names if not any(fnmatch(n, pattern) for pattern in sent)]
    if others:
        sys.stdout.write(f"not sent, no part of an export: {', '.join(others)}\n")
    hub = hub_library(name.repo)
    try:
        url = _push(hub, name, options, files)
    except TesseraError:
        raise
    # Of the network, the server, the disk and Xet: they have no class in common.
    except Exception as error:
        raise _refused(name, error) from error
    sys.stdout.write(f"{url}\n")
    return 0


def _parser() -> ArgumentParser:
    parser = CommandParser("tessera push", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="what tessera export --format=hf or peft wrote")
    add("repo", help="<your name, or an organization>/<name>")
    add("--revision", help="a branch, made if it does not exist; main")
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument("--public", action="store_true", help="all people can see it")
    seen.add_argument("--private", action="store_true", help="the default")
    add("--message", default="Upload with tessera push", help="of the commit")
    return parser


def _check_export(folder: Path) -> tuple[str, ...]:
    """The files of an export that a folder is; nothing has been sent before.

    Raises:
      ModelFolderError: [T806] it is none.
      WeightFileError: [T805] tensors are missing, or are not those of its model.
    """
    # Here, because these import JAX: --help and wrong options do not wait for it.
    from tessera.train.models.decoder.decoder_model import DecoderModel
    from tessera.train.models.model_folder import ModelFolder
    from tessera.train.models.safetensors import SafetensorsFile
    from tessera.train.models.weights import check_weights

    if (folder / "config.json").is_file():
        check_weights(folder, DecoderModel(ModelFolder(folder).config))
        return WEIGHT_FILES
    if not all((folder / file).is_file() for file in _ADAPTERS):
        raise ModelFolderError(
            "the folder is no export, of a model or of adapters",
            got=f"{folder} has neither config.json nor {' and '.join(_ADAPTERS)}",
            fix="name what this writes: tessera export <run> <folder> --format=hf",
        )
    # Reads the header, and compares it with the size of the file.
    _ = SafetensorsFile(folder / _ADAPTERS[1]).arrays
    return _ADAPTERS


def _push(hub: Any, name: HubName, options: Namespace, files: tuple[str, ...]) -> str:
    """Create what is missing, and commit; the address."""
    api, branch = hub.HfApi(), options.revision or name.revision
    try:
        info = api.model_info(name.repo)
    except hub.errors.RepositoryNotFoundError:
        api.create_repo(name.repo, private=not options.public)
        # An organization may have made it as it prefers.
        info, options.private = api.model_info(name.repo), not options.public
    _check_existing(name, info, options, files)
    if branch not in (None, "main"):
        api.create_branch(name.repo, branch=branch, exist_ok=True)
    api.upload_folder(
        repo_id=name.repo,
        folder_path=options.folder,
        revision=branch,
        commit_message=options.message,
        allow_patterns=[*files, *_BESIDE],
        delete_patterns=[*files],
    )
    tree = f"/tree/{branch}" if branch else ""
    seen = "private" if info.private else "public"
    return f"{hub.constants.ENDPOINT}/{name.repo}{tree} ({seen})"


def _check_existing(
    name: HubName, info: Any, options: Namespace, files: tuple[str, ...]
) -> None:
    """Check what a repository is that exists already."""
    seen = "private" if info.private else "public"
    if (options.public and info.private) or (options.private and not info.private):
        raise HubError(
            f"{name.repo} exists, and a push does not change who can see it",
            got=f"it is {seen}",
            fix=f"leave out --{'public' if options.public else 'private'}, or change "
            "the settings of the repository on its page",
        )
    names = {one.rfilename for one in info.siblings or ()}
    is_model, other = files == WEIGHT_FILES, "config.json"
    if is_model:
        other = _ADAPTERS[0]
    if other in names:
        # Transformers would add the adapters to weights that have them already.
        raise HubError(
            f"{name.repo} holds {'adapters' if is_model else 'a whole model'}, and a "
            "repository is for one of both",
            got=f"its main branch has {other}",
            fix="push to a repository of another name",
        )


def _refused(name: HubName, error: Exception) -> HubError:
    got = printable([*str(error).splitlines(), type(error).__name__][0], longest=200)
    fix = "try again: a push that fails changes no branch"
    if any("Connect" in cls.__name__ for cls in type(error).__mro__):
        fix = "push where the Hub is reached (HF_ENDPOINT, HF_HUB_OFFLINE, proxies)"
    if status_of(error) in (401, 403):
        fix = (
            "log in with a token that may write there: hf auth login (or set HF_TOKEN)"
        )
    return HubError(f"{name.repo} was not pushed", got=got, fix=fix)
