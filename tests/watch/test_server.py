from __future__ import annotations

import errno
import http.client
import json
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import uvicorn

from esper import cli
from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.utils.errors import UserError
from esper.watch.report import render_report
from esper.watch.server import ADDRESS, Library, open_socket, serve
from tests.runs.made_up import comparison, made_up_trajectories, trained
from tests.waiting import read_line
from tests.watch.served import Served, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = trained(tmp_path / "runs" / "demo", rounds=6, of=6, members=8)
    run.write(comparison())
    return run


@pytest.fixture
def served(folder: RunFolder) -> Iterator[Served]:
    with serving(folder.path.parent) as found:
        yield found


def line(number: int) -> RoundSummary:
    return RoundSummary(number, 9, 16, 640 * number, 3.0 * number, return_mean=0.1)


def test_what_the_page_asks_for_is_answered(served: Served, folder: RunFolder) -> None:
    assert served.json("/api/runs") == [{"name": "demo", "state": "finished"}]
    facts = served.json("/api/facts?run=demo")
    assert facts["kind"] == "train"
    assert facts["config"]["ppo.clip"] == 0.2
    assert facts["trajectories"] == [1, 2, 3, 4, 5, 6]
    assert len(facts["results"]["controllers"]) == 3
    assert facts["problems"] == []
    assert served.json("/api/events?run=demo&round=3")["kinds"]["germinated"] > 6
    assert served.get("/api/trajectories?run=demo&round=6") == (200, folder.trajectories.read_bytes(6))
    status, body = served.get("/api/trajectories?run=demo&round=9")
    assert (status, "cannot read" in json.loads(body)["error"]) == (404, True)


def test_a_run_is_running_while_somebody_writes_there(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with RunFolder.create(tmp_path / "young", config="seed: 1\n", seed=1) as young:
            assert served.json("/api/runs") == [{"name": "young", "state": "running"}]
            young.metrics_file.append(line(3))
            assert served.json("/api/runs") == [{"name": "young", "state": "running"}]
        assert served.json("/api/runs") == [{"name": "young", "state": "stopped"}]
        with RunFolder.open(young.path):
            young.metrics_file.append(line(9))
        assert served.json("/api/runs") == [{"name": "young", "state": "finished"}]


OUTSIDE = (
    "/api/facts?run=../demo", "/api/facts?run=/etc", "/api/facts", "/api/trajectories?run=demo&round=..",
    "/api/trajectories?run=demo&round=../../6", "/api/stream?run=../x", "/..%2f..%2fpyproject.toml",
    "/../server.py", "/%2e%2e/server.py", "/api/events?run=demo&round=-1",
)  # fmt: skip
LINKED = (
    "versions.json", "config.yaml", "command.txt", "metrics.jsonl", "events.jsonl",
    "results.json", "growth.json", "network.md", "trajectories", "trajectories/000006.safetensors", ".lock",
)  # fmt: skip


@pytest.fixture(scope="module")
def opened() -> Iterator[list[str]]:
    """Every file that this process opens."""
    found: list[str] = []
    listening = True

    def note(event: str, given: tuple[object, ...]) -> None:
        if event == "open" and listening and isinstance(given[0], str | Path):
            found.append(str(given[0]))

    sys.addaudithook(note)  # it cannot be removed
    yield found
    listening = False


@pytest.mark.parametrize("name", LINKED)
def test_no_file_outside_of_a_run_folder_is_read(
    served: Served, folder: RunFolder, tmp_path: Path, opened: list[str], name: str
) -> None:
    inside, outside = folder.path / name, tmp_path / "outside"
    folder.close()
    if inside.exists():
        inside.rename(outside)
    else:
        outside.write_text("{}")
    inside.symlink_to(outside)
    opened.clear()
    problems = served.json("/api/facts?run=demo")["problems"]
    served.json("/api/runs")
    served.get("/api/events?run=demo&round=6")
    status, body = served.get("/api/trajectories?run=demo&round=6")
    with served.stream("/api/stream?run=demo") as events:
        next(events)
    assert str(folder.path) in "".join(opened)
    assert [path for path in opened if Path(path).resolve().is_relative_to(outside)] == []
    told = f"{name} leads out of the run's folder"
    if name.startswith("trajectories"):
        assert status == 404
        assert "leads out of the run's folder" in json.loads(body)["error"]
    # The page learns of these two when it asks for them.
    if name not in ("trajectories/000006.safetensors", ".lock"):
        assert problems == [told]


def test_only_those_with_the_token_are_answered(folder: RunFolder) -> None:
    with serving(folder.path.parent, token="abc") as served:
        for path in ("/", "/api/runs", "/js/main.js", "/api/runs?token=ab", "/?token=", "/?token=é"):
            assert served.get(quote(path, safe="/?="))[0] == 403, path
        connection = http.client.HTTPConnection(ADDRESS, served.port)
        connection.request("GET", "/?token=abc")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["location"]) == (303, "/"), "the token leaves the address"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        connection.close()
        bearer = {"Cookie": cookie.partition(";")[0], "Host": "gpu7.example:8642"}
        assert [served.get(path, bearer)[0] for path in ("/", "/api/runs")] == [200, 200]
        assert served.get("/api/runs", {"Cookie": bearer["Cookie"] + "x"})[0] == 403


def listen(host: str) -> socket.socket:
    try:
        return open_socket(0, host)
    except UserError:
        pytest.skip(f"this machine has no address {host}")


@pytest.mark.parametrize(("host", "guarded"), [("127.0.0.1", False), ("::1", True), ("0.0.0.0", True)])
def test_any_host_but_the_usual_one_has_a_token(folder: RunFolder, host: str, guarded: bool) -> None:
    def read_address(address: str) -> None:
        told.append(address)
        raise KeyboardInterrupt

    told: list[str] = []
    with listen(host) as listener, pytest.raises(KeyboardInterrupt):
        serve(Library([folder.path]), listener, read_address)
    assert ("/?token=" in told[0]) == guarded
    assert "0.0.0.0" not in told[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_printed_address_opens_the_page(
    folder: RunFolder, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: queue.Queue[str] = queue.Queue()
    servers: list[uvicorn.Server] = []

    def make_server(config: uvicorn.Config, make: type[uvicorn.Server] = uvicorn.Server) -> uvicorn.Server:
        servers.append(make(config))
        return servers[-1]

    monkeypatch.setattr(uvicorn, "Server", make_server)
    with listen(host) as listener:
        arguments = (Library([folder.path]), listener, addresses.put)
        thread = threading.Thread(target=serve, args=arguments, daemon=True)
        thread.start()
        try:
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with browser.open(addresses.get(timeout=10), timeout=10) as answer:
                assert b"<title>Esper</title>" in answer.read()
        finally:
            servers[0].should_exit = True
            thread.join(10)


DOCUMENTED = re.findall(r"^    (esper watch .*?) *(?:#.*)?$", (ROOT / "docs" / "watch.md").read_text(), re.M)


@pytest.mark.parametrize("command", DOCUMENTED)
def test_the_commands_of_the_page_serve(command: str, folder: RunFolder) -> None:
    arguments = [str(folder.path) if word == "runs/first" else word for word in shlex.split(command)[1:]]
    process = subprocess.Popen(
        [sys.executable, "-m", "esper", *arguments, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        told = read_line(process)
        address = re.search(r"open (http://\S+) ", told)
        assert address, told
        port, token = re.search(r":(\d+)/(.*)", address[1]).groups()  # type: ignore[union-attr]
        connection = http.client.HTTPConnection(ADDRESS, int(port), timeout=10)
        connection.request("GET", f"/{token}")
        assert connection.getresponse().status == (303 if "--host" in command else 200)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_a_folder_without_runs_is_named_with_what_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by = "'esper train' and esper.grow(..., out='runs/mine') make a run"
    monkeypatch.setattr("esper.watch.server.serve", lambda library, listener, ready: ready("http://here/"))
    assert cli.run(["watch", str(tmp_path), "--port", "0"]) == 0
    told = f"there is no run in {tmp_path} yet ({made_by}), and the page shows one when it appears; open http"
    assert told in capsys.readouterr().out
    assert cli.run(["watch", str(tmp_path / "missing"), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert f"there is no folder at {tmp_path / 'missing'}; " in error
    assert made_by in error
    trained(tmp_path / "mine", rounds=1, of=1, members=2).close()
    assert cli.run(["watch", str(tmp_path), "--port", "0"]) == 0
    assert "watching 1 run; open http://here/" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(UserError, match=host):
        open_socket(0, host)


def test_a_port_of_the_system_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(UserError, match="port 80 is for the system alone; give one above 1023"):
        open_socket(80)


OTHER_HOSTS = ("evil.example", "evil.example:8642", "127.0.0.1.evil.example", "")


def test_what_lies_outside_other_hosts_and_writing_are_refused(served: Served) -> None:
    assert {path: served.get(path)[0] for path in OUTSIDE} == dict.fromkeys(OUTSIDE, 404)
    refused = {host: served.get("/api/runs", {"Host": host})[0] for host in OTHER_HOSTS}
    assert refused == dict.fromkeys(OTHER_HOSTS, 400)
    assert served.get("/api/runs", {"Host": f"localhost:{served.port}"})[0] == 200
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert [served.get(path, method=method)[0] for path in ("/api/runs", "/")] == [405, 405], method
    connection = http.client.HTTPConnection(ADDRESS, served.port)
    connection.request("GET", "/")
    answer = connection.getresponse()
    assert "default-src 'self'" in (answer.getheader("content-security-policy") or "")
    assert b"http://" not in answer.read()
    connection.close()


def test_every_module_is_fetched_at_once() -> None:
    page = Path(str(resources.files("esper.watch") / "page"))
    text = (page / "index.html").read_text()
    modules = sorted(file.name for file in (page / "js").iterdir())
    assert [name for name in modules if f'href="js/{name}"' not in text] == ["main.js"]


def rounds_of(events: Iterator[dict], many: int) -> list[int]:  # type: ignore[type-arg]
    """The rounds that the stream tells, until there are that many."""
    found: list[int] = []
    for event in events:
        if event["event"] == "rounds":
            found += [record["round"] for record in event["data"]["lines"]]
        if len(found) >= many:
            break
    return found


def test_a_stream_tells_old_rounds_as_one_event_new_ones_within_a_second_and_resumes(
    served: Served, folder: RunFolder
) -> None:
    with served.stream("/api/stream?run=demo") as events:
        first = next(event for event in events if event["event"] == "rounds")
        assert [record["round"] for record in first["data"]["lines"]] == [1, 2, 3, 4, 5, 6]
        assert first["id"] == first["data"]["at"]
        assert int(first["id"].split("-")[0]) == folder.metrics_file.path.stat().st_size
        begun = time.monotonic()
        folder.metrics_file.append(line(7))
        assert rounds_of(events, 1) == [7]
        assert time.monotonic() - begun < 1.0
    with served.stream("/api/stream?run=demo", last_id=first["id"]) as events:
        assert rounds_of(events, 1) == [7]
    with served.stream(f"/api/stream?run=demo&at={first['id']}") as events:
        assert rounds_of(events, 1) == [7]
    data = folder.metrics_file.path.read_bytes().replace(b"\n", b"\r\n")  # line ends of Windows
    folder.metrics_file.path.write_bytes(data)
    with served.stream(f"/api/stream?run=demo&at={'9' * 30}-0") as events:
        assert rounds_of(events, 7) == [1, 2, 3, 4, 5, 6, 7]


def test_a_stream_says_when_files_and_runs_appear(served: Served, folder: RunFolder) -> None:
    with served.stream("/api/stream?run=demo") as events:
        assert {next(events)["event"] for _ in range(3)} == {"facts", "rounds", "runs"}
        folder.trajectories.write(made_up_trajectories(7), kept=7)
        assert next(events)["event"] == "facts"
        with RunFolder.create(folder.path.parent / "second", config="seed: 1\n", seed=1):
            told = next(event for event in events if event["event"] == "runs")
        assert [run["name"] for run in told["data"]] == ["demo", "second"]


@pytest.mark.parametrize("odd", ['{"a": 1}', '{"round": "x", "rounds": 3}', '{"round": 1}'])
def test_a_last_line_without_its_round_stops_nothing(served: Served, folder: RunFolder, odd: str) -> None:
    with open(folder.metrics_file.path, "a") as file:
        file.write(f"{odd}\n")
    assert served.json("/api/runs")[0]["state"] == "running"
    assert "<html" in render_report(folder.path)


def test_damaged_files_are_told_and_stop_nothing(served: Served, folder: RunFolder) -> None:
    for name in ("results.json", "config.yaml", "versions.json"):
        (folder.path / name).write_bytes(b'{"half": ')
    facts = served.json("/api/facts?run=demo")
    assert len(facts["problems"]) == 3
    assert facts["results"] is None
    with open(folder.metrics_file.path, "ab") as file:
        file.write(b"no line\n")
    folder.metrics_file.append(line(7))
    with served.stream("/api/stream?run=demo") as events:
        told = next(event for event in events if event["event"] == "rounds")
    assert told["data"]["damaged"] == 1
    assert [record["round"] for record in told["data"]["lines"]] == [1, 2, 3, 4, 5, 6, 7]
