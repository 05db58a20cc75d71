"""A hub of models on this machine that speaks as much of Hugging Face's HTTP interface as its library asks for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class ModelHub:
    """Serves one directory as the model `name`, while it is a context.

    Attributes:
        url: for HF_ENDPOINT.
        sent: names of the files whose contents were asked for, in order.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.sent: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None: ...

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                files = sorted(file for file in directory.rglob("*") if file.is_file())
                if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                    listed = [{"rfilename": str(file.relative_to(directory))} for file in files]
                    self._send(json.dumps({"id": name, "sha": _COMMIT, "siblings": listed}).encode())
                elif path == f"/api/models/{name}/tree/{_COMMIT}":
                    entries = [
                        {
                            "type": "file",
                            "path": str(file.relative_to(directory)),
                            "size": file.stat().st_size,
                            "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                        }
                        for file in files
                    ]
                    self._send(json.dumps(entries).encode())
                elif (found := re.fullmatch(f"/{name}/resolve/{_COMMIT}/(.+)", path)) and (
                    directory / found[1]
                ).is_file():
                    if with_body:
                        hub.sent.append(found[1])
                    self._send((directory / found[1]).read_bytes(), with_body)
                else:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def _send(self, body: bytes, with_body: bool = True) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", _COMMIT)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ModelHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
