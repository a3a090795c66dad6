"""A stand-in for `llama-server`: its help, its health, and completions of counting tokens; notes what it was asked."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_PROGRAM = """#!{python} -S
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv[1:]
if words == ["--help"]:
    print("--spec-type none,draft-simple,draft-eagle3,ngram-simple,ngram-mod")
    print("                    comma-separated list")
    raise SystemExit(0)
given = dict(zip(words[::2], words[1::2]))
if {fails!r}:
    print("error: failed to load model")
    raise SystemExit(1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({notes!r}, "a") as file:
            file.write(json.dumps({{"given": given, "path": self.path, **asked}}) + chr(10))
        timings = {{"predicted_ms": 1.0}}
        if "--spec-type" in given:
            timings |= {{"draft_n": 4, "draft_n_accepted": 2}}
        self.answer({{"tokens": list(range(asked["n_predict"] - {missing})), "timings": timings}})

    def log_message(self, *words):
        pass


ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


def write_llama_server(folder: Path, *, fails: bool = False, missing: int = 0) -> tuple[Path, Path]:
    """The program, and the file of what it was asked, one JSON object a line; it writes `missing` tokens too few."""
    program, notes = folder / "llama-server", folder / "asked.jsonl"
    program.write_text(_PROGRAM.format(python=sys.executable, fails=fails, notes=str(notes), missing=missing))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program, notes
