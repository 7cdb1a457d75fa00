# SPDX-License-Identifier: Apache-2.0
"""A Hub on loopback, with the few endpoints that downloads and pushes take."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


@dataclass
class Repo:
    """A repository: the files of each commit, and its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False

    def push(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A commit with exactly these files; its name."""
        files = {".gitattributes": b"", **files}
        text = repr((len(self.commits), sorted(files.items())))
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def files_of(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


@dataclass
class Hub:
    """The repositories, by ``models/org/name`` and ``datasets/org/name``.

    Attributes:
      requests: Method and path of each request.
      token: What a request to a gated repository, and each push, has to carry.
      pushes: Each is called after the next answer about what a branch is now.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    token: str = "hf_right"
    pushes: list[Callable[[], object]] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def push_folder(self, repo: str, folder: Path, **more: bytes) -> str:
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        return self.repos.setdefault(repo, Repo()).push({**files, **more})

    @property
    def downloads(self) -> list[str]:
        """The files that were sent."""
        found = (one.partition("/resolve/") for one in self.requests if "GET" in one)
        return [rest.partition("/")[2] for _, is_file, rest in found if is_file]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        parts = path.strip("/").split("/")
        if self.command == "POST":
            self._write_request(parts, body)
        elif parts[0] == "api":
            with self.hub.lock:  # one after the other, with the pushes between
                self._describe(parts[1:])
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            self._send_file(kind, parts[kind == "datasets" :])

    def _send(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self._send({"error": code}, status, X_Error_Code=code)

    def _find(self, repo: str, revision: str) -> tuple[Repo, str] | None:
        """The repository and the commit, or an answer that there is none."""
        if (found := self.hub.repos.get(repo)) is None:
            self._fail(404, "RepoNotFound")
            return None
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            self._fail(404, "RevisionNotFound")
            return None
        return found, commit

    def _describe(self, parts: list[str]) -> None:
        repo, what, revision = "/".join(parts[:3]), parts[3:4], "/".join(parts[4:])
        found = self._find(repo, revision or "main")
        if found is None:
            return
        files = found[0].commits[found[1]]
        if what == ["tree"]:
            self._send(
                [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(data),
                        "oid": _etag(data),
                    }
                    for name, data in files.items()
                ]
            )
            return
        self._send(
            {
                "id": "/".join(parts[1:3]),
                "sha": found[1],
                "private": found[0].is_private,
                "siblings": [{"rfilename": name} for name in files],
            }
        )
        if revision == "main" and self.hub.pushes:
            self.hub.pushes.pop(0)()

    def _send_file(self, kind: str, parts: list[str]) -> None:
        repo, rest = f"{kind}/{parts[0]}/{parts[1]}", "/".join(parts[3:])
        # A revision with a slash is quoted, and has one again here.
        found, name = None, ""
        for revision in (*self.hub.repos.get(repo, Repo()).branches, parts[3]):
            if rest.startswith(f"{revision}/"):
                found, name = self._find(repo, revision), rest[len(revision) + 1 :]
                break
        if found is None:
            return
        if found[0].is_gated and not self._is_logged_in:
            self._fail(403, "GatedRepo")
        elif (data := found[0].commits[found[1]].get(name)) is None:
            self._fail(404, "EntryNotFound")
        else:
            self._send(data, ETag=f'"{_etag(data)}"', X_Repo_Commit=found[1])

    @property
    def _is_logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _write_request(self, parts: list[str], body: bytes) -> None:
        if not self._is_logged_in:
            self._send({"error": "Invalid credentials in Authorization header"}, 401)
        elif parts == ["api", "validate-yaml"]:
            self._send({"errors": [], "warnings": []})
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts[4] == "preupload":
            files = json.loads(body)["files"]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            self._send({"files": [{"path": f["path"], **regular} for f in files]})
        elif parts[4] == "branch":
            repo = self.hub.repos["/".join(parts[1:4])]
            repo.branches["/".join(parts[5:])] = repo.branches["main"]
            self._send({})
        else:
            self._commit("/".join(parts[1:4]), "/".join(parts[5:]), body)

    def _create(self, values: dict[str, Any]) -> None:
        name = f"{values.get('organization') or 'me'}/{values['name']}"
        url = f"{self.hub.url}/{name}"
        if f"models/{name}" in self.hub.repos:
            self._send(
                {"error": "You already created this model repo", "url": url}, 409
            )
            return
        repo = Repo(is_private=values.get("visibility") == "private")
        repo.push({})
        self.hub.repos[f"models/{name}"] = repo
        self._send({"url": url, "name": name, "id": name})

    def _commit(self, repo: str, branch: str, body: bytes) -> None:
        found = self.hub.repos[repo]
        files = dict(found.files_of(branch))
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "deletedFile":
                del files[value["path"]]
        commit = found.push(files, branch)
        url = f"{self.hub.url}/{repo.partition('/')[2]}/commit/{commit}"
        self._send({"commitOid": commit, "commitUrl": url, "success": True})


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(patch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """A Hub on a free port, to which ``huggingface_hub`` of this process speaks.

    Args:
      patch: Undoes it.
      cache: The Hub's cache, instead of the user's.
    """
    hub = Hub()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})
    )
    hub.url = f"http://127.0.0.1:{server.server_port}"
    use(hub.url, patch, cache)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def use(url: str, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let ``huggingface_hub`` of this process speak to an address."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch.delenv("HF_TOKEN", raising=False)
    patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)


def offline(patch: pytest.MonkeyPatch) -> None:
    """As ``HF_HUB_OFFLINE=1``."""
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
