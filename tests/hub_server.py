"""A Hub that lives in a thread: as many of its endpoints as pushes and pulls of models and kernels need, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_test"
REPO = r"/api/(?:models|kernels)/(?P<repo>[^/]+/[^/]+)"


@dataclass
class Repository:
    private: bool = False
    kind: str = "model"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        before = self.commits.get(self.branches.get(branch, ""), {})
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = {**before, **files}
        self.messages.append(message)
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))


class Hub:
    """The server.

    ``fail_next`` are paths (regular expressions), each with the status that the next request of it is answered with;
    None breaks the connection.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.fail_next: dict[str, int | None] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def create(self, name: str, files: dict[str, bytes], private: bool = False) -> Repository:
        repository = self.repositories[name] = Repository(private)
        repository.commit(files)
        return repository

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        return self.repositories[name].files(revision) or {}

    def card(self, name: str) -> str:
        return self.files(name)["README.md"].decode()

    def front_matter(self, name: str) -> dict:
        return yaml.safe_load(self.card(name).split("---")[1])


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status=200, body=b"", **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self, code, status=404):
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def handle_request(self):
        path = unquote(urlsplit(self.path).path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, path))
        for pattern in list(self.hub.fail_next):
            if re.search(pattern, path):
                status = self.hub.fail_next.pop(pattern)
                self.close_connection = status is None
                return None if status is None else self.answer(status, {"error": "interrupted"})
        for method, pattern, action in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (match := re.fullmatch(pattern, path)):
                return action(self, content, **match.groupdict())
        return self.answer(404, {"error": f"no such endpoint: {path}"})

    def __getattr__(self, name):
        """Return the method for a kind of request, all of them the same."""
        if name in ("do_GET", "do_HEAD", "do_POST"):
            return self.handle_request
        raise AttributeError(name)

    def find(self, repo):
        """Return the repository, or answer as the Hub does of those that are not there or not to be seen."""
        repository = self.hub.repositories.get(repo)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not allowed):
            self.missing("RepoNotFound", 404 if allowed else 401)
            return None
        return repository

    def create_repo(self, content):
        wanted = json.loads(content)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        status = 409 if name in self.hub.repositories else 200
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        repository = Repository(private, wanted.get("type", "model"))
        self.hub.repositories.setdefault(name, repository).branches.setdefault("main", "")
        return self.answer(status, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def validate(self, content):
        self.answer(body={"errors": [], "warnings": []})

    def preupload(self, content, repo, revision):
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
            for file in json.loads(content)["files"]
        ]
        self.answer(body={"files": files, "commitOid": None})

    def branch(self, content, repo, name):
        repository = self.hub.repositories[repo]
        repository.branches.setdefault(name, repository.branches.get("main", ""))
        self.answer()

    def commit(self, content, repo, revision):
        files, message = {}, ""
        for line in map(json.loads, content.decode().splitlines()):
            if line["key"] == "header":
                message = line["value"]["summary"]
            elif line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        sha = self.hub.repositories[repo].commit(files, revision, message)
        url = f"{self.hub.url}/{repo}/commit/{sha}"
        self.answer(body={"success": True, "commitOid": sha, "commitUrl": url})

    def info(self, content, repo, revision="main"):
        if repository := self.find(repo):
            files = repository.files(revision)
            if files is None and revision != "main":
                return self.missing("RevisionNotFound")
            card = (files or {}).get("README.md", b"---\n{}\n---").decode().split("---")[1]
            sha = repository.branches.get(revision, revision)
            body = {
                "id": repo,
                "sha": sha,
                "private": repository.private,
                "cardData": yaml.safe_load(card),
                "tags": [],
            }
            self.answer(body={**body, "siblings": [{"rfilename": name} for name in files or {}]})

    def refs(self, content, repo):
        if repository := self.find(repo):
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
                for name, sha in repository.branches.items()
            ]
            self.answer(body={"branches": branches, "converts": [], "tags": []})

    def tree(self, content, repo, revision, folder=None):
        if repository := self.find(repo):
            files = repository.files(revision)
            if files is None:
                return self.missing("RevisionNotFound")
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)} for name, data in files.items()
            ]
            if "recursive=true" not in self.path.lower():
                prefix = f"{folder}/" if folder else ""
                names = {name.removeprefix(prefix).partition("/")[0] for name in files if name.startswith(prefix)}
                found = [each for each in found if each["path"].removeprefix(prefix) in names] + [
                    {"type": "directory", "path": prefix + name, "oid": ""}
                    for name in sorted(names)
                    if prefix + name not in files
                ]
            self.answer(body=found)

    def resolve(self, content, repo, revision, file):
        if repository := self.find(repo):
            files = repository.files(revision)
            sha = repository.branches.get(revision, revision)
            if files is None:
                return self.missing("RevisionNotFound" if sha else "EntryNotFound")
            if file not in files:
                return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            self.answer(body=files[file], ETag=f'"{_etag(files[file])}"', X_Repo_Commit=sha)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


ROUTES = (
    ("POST", "/api/repos/create", _Handler.create_repo),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", rf"{REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    ("POST", rf"{REPO}/commit/(?P<revision>.+)", _Handler.commit),
    ("POST", rf"{REPO}/branch/(?P<name>.+)", _Handler.branch),
    ("GET", REPO, _Handler.info),
    ("GET", rf"{REPO}/revision/(?P<revision>[^/]+)", _Handler.info),
    ("GET", rf"{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.*))?", _Handler.tree),
    ("GET", rf"{REPO}/refs", _Handler.refs),
    ("GET", r"/(?:kernels/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", _Handler.resolve),
)
