"""A small Hugging Face Hub on this machine, and folders as the Hub's cache has them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Files = Mapping[str, bytes]


def commit_of(files: Files) -> str:
    """A hash as git would give it."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    """What lies in a model's directory."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def cached(cache: Path, name: str, directory: Path) -> Path:
    """Put a model into a cache folder; returns its snapshot."""
    commit = commit_of(files_of(directory))
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(directory, repository / "snapshots" / commit))


class HubServer:
    """Serves repositories.

    Attributes:
        repositories: by id and revision, the files by path; ids of data sets begin with
            ``datasets/``.
        token: what private repositories are shown for.
        private: ids of these.
        fetched: paths of the files that have been sent, in order.
        failing: the HTTP status of every answer; 0: it serves.
        url: for ``HF_ENDPOINT``.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Files]] = {}
        self.token, self.private, self.fetched = "", set[str](), list[str]()
        self.url, self.failing = "", 0

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Of a process that asks this Hub and keeps what it gets in ``home``."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        inherited = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        return {**inherited, **own, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}

    def find(self, name: str, revision: str) -> Files | None:
        """The files of a revision, be it named or a commit."""
        revisions = self.repositories[name]
        commits = {commit_of(files): files for files in revisions.values()}
        return {**commits, **revisions}.get(revision)


@contextmanager
def serving() -> Iterator[HubServer]:
    """The server, running in threads of its own."""
    state = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(send=True)

        def do_HEAD(self) -> None:
            self.answer(send=False)

        def answer(self, send: bool) -> None:
            if state.failing:
                return self.refuse(state.failing, "")
            parts = self.path.split("?")[0].strip("/").split("/")
            api = parts[0] == "api"
            kind = parts.pop(0) if api or parts[0] == "datasets" else ""
            kind = parts.pop(0) if api else kind
            if kind not in ("", "models", "datasets") or len(parts) < 2:
                return self.refuse(404, "")
            owner, short, *rest = parts
            name = f"datasets/{owner}/{short}" if kind == "datasets" else f"{owner}/{short}"
            allowed = self.headers.get("Authorization") == f"Bearer {state.token}"
            if name not in state.repositories or (name in state.private and not allowed):
                return self.refuse(401, "RepoNotFound")
            if api:
                return self.tell(name, rest)
            files = state.find(name, rest[1]) or {}
            return self.send_file(files, "/".join(rest[2:]), send)

        def tell(self, name: str, rest: list[str]) -> None:
            kind, revision = rest if rest else ("revision", "main")
            files = state.find(name, revision)
            if files is None:
                return self.refuse(404, "RevisionNotFound")
            if kind == "tree":
                return self.send_json(
                    [
                        {"type": "file", "path": path, "size": len(data), "oid": etag(data)}
                        for path, data in files.items()
                    ]
                )
            siblings = [{"rfilename": path} for path in files]
            return self.send_json({"id": name, "sha": commit_of(files), "siblings": siblings})

        def send_file(self, files: Files, path: str, send: bool) -> None:
            data = files[path]
            if send:
                state.fetched.append(path)
            self.send_response(200)
            self.send_header("ETag", f'"{etag(data)}"')
            self.send_header("X-Repo-Commit", commit_of(files))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if send:
                self.wfile.write(data)

        def send_json(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
