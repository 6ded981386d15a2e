"""The report of a run: the page as one file that holds the responses of the server.

The file needs no server and no network. Scripts of the page are embedded by an import map, responses as JSON
under the requests that the page makes (see stream.js); long ones are compressed. What does not fit into
`MOST_BYTES` is left out, old rounds first, and the page says so.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from esper.runs.files import file_in, parse_line, write_atomically
from esper.runs.run_folder import RunFolder
from esper.runs.schema import to_json
from esper.runs.trajectories import TrajectoryFolder
from esper.utils.errors import UserError
from esper.watch.facts import facts, last_round, state
from esper.watch.reading import round_events

PAGE = Path(__file__).parent / "page"
MOST_BYTES = 2_500_000  # of the responses; the page itself has about 300,000
_PLAIN = 32_768  # bytes up to which a response stays readable JSON
_MOST_ROUNDS = 2_000  # of the curves; a longer run has every second one, or fourth, ...
_BY_STEP = 100  # newest rounds that keep their ops step by step
_MOST_EVENTS = 40_000  # of all rounds together: to read so many takes half a second
# The browser itself refuses whatever would load something from elsewhere.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"


def write_report(folder: RunFolder) -> Path:
    """Write report.html into a run folder and return its path. Works for unfinished runs too."""
    write_atomically(folder.report_path, render_report(folder.path).encode())
    return folder.report_path


def render_report(run: Path) -> str:
    """Return the page of a run as one HTML file."""
    page = _text(PAGE / "index.html")
    title = f"<title>{escape(run.resolve().name)} · Esper</title>"
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}" />'
    # Modules of the page import each other by the names of the import map.
    scripts = {
        f"esper/{path.name}": _data_url("text/javascript", _text(path).replace('from "./', 'from "esper/'))
        for path in sorted((PAGE / "js").glob("*.js"))
    }
    module = "\n".join(
        (
            f'<script type="importmap">{_json_in_html({"imports": scripts})}</script>',
            f'<script type="application/json" id="answers">{_json_in_html(_responses(run))}</script>',
            '<script type="module">import "esper/main.js";</script>',
        )
    )
    icon = _data_url("image/svg+xml", _text(PAGE / "icon.svg"))
    page = re.sub(r' *<link rel="modulepreload".*\n', "", page)
    style = r'<link rel="stylesheet" href="(.*?)" />'
    page = re.sub(style, lambda link: f"<style>\n{_text(PAGE / link[1])}</style>", page)
    script = r'<script src="(.*?)" defer></script>'  # none of them contains "</script"
    page = re.sub(script, lambda link: f"<script>\n{_text(PAGE / link[1])}</script>", page)
    page = page.replace('<link rel="icon" href="icon.svg" />', f'<link rel="icon" href="{icon}" />')
    page = page.replace("<title>Esper</title>", policy + "\n    " + title)
    return page.replace('<script type="module" src="js/main.js"></script>', module)


def _responses(run: Path) -> dict[str, Any]:
    """Return request → response, as many as fit: JSON values, or text of base64 where they are compressed."""
    found: dict[str, Any] = {}
    bytes_left = MOST_BYTES
    for request, response in _requests(run):
        data = response if isinstance(response, bytes) else to_json(response).encode()
        packed = data is response or len(data) > _PLAIN
        text = b64encode(gzip.compress(data, 4, mtime=0)) if packed else data
        bytes_left -= len(text)
        if bytes_left < 0:
            break
        found[request] = text.decode() if packed else json.loads(text)
    return found


def _requests(run: Path) -> Iterator[tuple[str, Any]]:
    """Yield what the page may ask for, the most needed first, with the response of the server: a record, or
    the bytes of a file.
    """
    about, status = facts(run), state(run)
    yield "api/runs", [{"name": run.resolve().name, "state": "stopped" if status == "running" else status}]
    yield "api/facts", about
    yield "api/rounds", {"at": "", "restarted": False, **_rounds(run)}
    rounds = about["trajectories"] or ([last["round"]] if (last := last_round(run)) else [0])
    events = 0
    for number in reversed(rounds):
        with suppress(UserError):  # the facts name a link that leads out of the folder
            if events < _MOST_EVENTS:
                found = round_events(file_in(run, "events.jsonl"), number)
                events += found["total"]
                yield f"api/events {number}", found
        with suppress(UserError):  # the page says that it is missing
            yield f"api/trajectories {number}", TrajectoryFolder(run).read_bytes(number)


def _rounds(run: Path) -> dict[str, Any]:
    """Return the lines of metrics.jsonl, thinned out if they are many, and how many could not be read."""
    lines: list[bytes] = []
    with suppress(UserError, FileNotFoundError):  # the facts name a link that leads out of the folder
        lines = file_in(run, "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    stride = -(-len(lines) // _MOST_ROUNDS) or 1
    # Thinned before they are parsed, from the newest backwards, so that the last round is always there.
    records = [parse_line(line) for line in lines[::-1][::stride]]
    found = [record for record in records if isinstance(record, dict)]
    for record in found[_BY_STEP:]:
        record.pop("op_shares_by_step", None)
    return {"lines": found[::-1], "damaged": len(records) - len(found)}


def _json_in_html(value: Any) -> str:
    """Return JSON for a script element: without "<" nothing in it can end the element or open a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _data_url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{b64encode(text.encode()).decode()}"
