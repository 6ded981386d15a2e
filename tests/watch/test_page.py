"""The page in a real browser: it shows, follows, replays, comes back, and survives damaged files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import esper
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, ControllerResult, CurvePoint, paired_differences
from esper.watch.report import render_report
from tests.growing import models
from tests.runs.made_up import add_round, comparison, made_up_trajectories, summary, trained
from tests.waiting import MINUTE, read_line
from tests.watch.browser import Visit, opened_tab
from tests.watch.served import Served, serving

pytestmark = pytest.mark.first  # it waits much, and should not be dealt out to two browsers in the end
VIEWS = ("overview", "controller", "members", "events", "compare", "settings")


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with opened_tab() as found:
        yield found


@pytest.fixture(autouse=True)
def no_page_is_left_open(tab: Any) -> Iterator[None]:
    """A page goes on asking its server for news as long as it is open."""
    yield
    tab.goto("about:blank")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training runs, two comparisons, and growths from the command line and from Python."""
    folder = tmp_path_factory.mktemp("runs")
    close = Path(__file__).parent / "crowded.json"  # five controllers, long names, close together
    trained(folder / "first", rounds=20, of=20, members=24).close()
    trained(folder / "second", rounds=14, of=20, members=24, gain=0.1).close()
    trained(folder / "rated", rounds=3, of=3, members=12, rates=True).close()
    with trained(folder / "crowded", rounds=3, of=3, members=4) as crowded:
        shutil.copy(close, crowded.path / "results.json")
    with RunFolder.create(folder / "compared", config="task: digits\n", seed=7, kind="compare") as compared:
        shutil.copy(close, compared.path / "results.json")
    with trained(folder / "shown", rounds=8, of=8, members=6) as shown:
        shown.write(compared_losses())
    note = "note: <script>alert('no')</script>\n"
    with RunFolder.create(folder / "contest", config=note, seed=7, kind="compare") as contest:
        contest.write(comparison())
        for i, name in enumerate(("static", "tamiyo"), start=1):
            contest.trajectories.write(made_up_trajectories(i, members=8, title=name), 2)
    with RunFolder.create(folder / "growth", config=note, seed=7, kind="grow") as grown:
        grown.write(comparison())
        grown.trajectories.write(made_up_trajectories(0, members=8))
        (grown.path / "network.md").write_text("# A network grown on digits\n")
    settings = {"epochs": 5, "progress": False}
    mine = {"controller": "schedule:norm@0.1", "baseline": True, "out": folder / "mine"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.growing.folder.save_archive", lambda *given: None)  # torch.export is slow
        esper.grow(models.small_mlp(), models.table(), **mine, **settings)
        esper.grow(models.small_mlp(), models.table(), out=folder / "yours", **settings)
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as found:
        yield found


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunFolder]:
    with trained(tmp_path / "live", rounds=5, members=16) as folder:
        yield folder


# What is wider than the window, or reaches out of its card; what scrolls sideways in a box of its own may.
SPILLED = """() => [...document.querySelectorAll('body *')].filter((e) => {
  const box = e.getBoundingClientRect();
  if (!box.width || e.parentElement.closest('.wide, svg')) return false;
  const card = e.closest('.card, .panel')?.getBoundingClientRect() ?? { left: 0, right: innerWidth };
  return box.left < Math.max(card.left, 0) - 1 || box.right > Math.min(card.right, innerWidth) + 1;
}).map((e) => `${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent.slice(0, 40)}`)"""
UNLABELLED = """() => [...document.querySelectorAll('main .uplot, main canvas, main svg')]
  .filter((e) => !e.closest('[role=img][aria-label]:not([aria-label=""]), [aria-hidden=true]'))
  .map((e) => e.outerHTML.slice(0, 80))"""


def check_views(visit: Visit, run: str) -> None:
    """Every view shows something, fits, and says what its pictures are."""
    for view in VIEWS:
        visit.go(f"runs={run}&view={view}")
        assert visit.page.locator("main .panel:visible").count() >= 1, view
        wide = "(e) => e.scrollWidth > e.clientWidth + 2"
        boxes = "[...document.querySelectorAll('main, .panel, .card, .wide:not(.drawing), header.top')]"
        assert visit.ask(f"() => {boxes}.filter({wide}).map((e) => e.className)") == [], view
        assert visit.ask(SPILLED) == [], view
        assert visit.ask(UNLABELLED) == [], view
    assert visit.errors == []


@pytest.mark.parametrize(
    ("run", "width", "theme"),
    [("first&runs=second", 1440, "dark"), ("growth", 900, "dark"), ("contest", 360, "light"),
     ("crowded", 360, "dark"), ("rated", 768, "light"), ("shown", 2000, "light")],
)  # fmt: skip
def test_every_view_shows_without_an_error_and_fits(
    tab: Any, served: Served, run: str, width: int, theme: str
) -> None:
    visit = Visit(tab, served.address, f"runs={run}", width, theme)
    check_views(visit, run)
    assert all(url.startswith(served.address) for url in visit.requests)


@pytest.mark.parametrize(
    ("run", "width", "theme"),
    [("first", 360, "dark"), ("shown", 360, "light"), ("compared", 1400, "dark"), ("mine", 1400, "light"),
     ("rated", 1400, "dark"), pytest.param("contest", 360, "light", marks=pytest.mark.long),
     pytest.param("growth", 360, "light", marks=pytest.mark.long)],
)  # fmt: skip
def test_a_report_shows_every_view_from_disk(
    tab: Any, runs: Path, tmp_path: Path, run: str, width: int, theme: str
) -> None:
    report = tmp_path / "report.html"
    report.write_text(render_report(runs / run), encoding="utf-8")
    visit = Visit(tab, report.as_uri(), "", width, theme)
    check_views(visit, run)
    visit.go("view=events")  # an address without a run shows the only one
    visit.wait("() => !['…', ''].includes(document.querySelector('.events .body').textContent)")
    if run != "compared":  # it keeps no members
        visit.go("view=members")
        visit.wait("() => document.querySelector('.network .part')")
    assert visit.page.locator("#notes").inner_text() == ""
    assert visit.errors == []
    assert all(url.startswith(("file:", "data:")) for url in visit.requests)


def compared_losses() -> Comparison:
    """Two language models, one ahead in loss."""
    arms = []
    for name, loss in (("plain", 2.0), ("grown", 1.8)):
        curve = [CurvePoint(1e9 * k, 0.1 * k, 9.0, 3.0 - loss * k / 8, 2.0 * k) for k in range(1, 6)]
        losses = [loss, loss + 0.01, loss - 0.01]
        measured = {"curve": curve, "test_loss": losses, "seconds": [9.0, 9.5, 10.0]}
        arms.append(
            ControllerResult(name, [0, 1, 2], [0.5] * 3, [9.0] * 3, [8.0] * 3, [5e9] * 3, **measured)  # type: ignore[arg-type]
        )
    verdicts = ["Same network, lower loss."]
    return Comparison("text", "a GPT", arms, paired_differences(arms), verdicts=verdicts)


def test_the_verdict_and_the_results_come_first(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=shown")
    visit.wait("() => document.querySelector('.outcome .uplot')")
    titles = visit.ask("() => [...document.querySelectorAll('main h2')].map((e) => e.textContent)")
    assert titles[:4] == [
        "What came out",
        "Controllers in shown",
        "Loss against compute",
        "Loss against time",
    ]
    assert visit.page.locator(".verdict .first").inner_text() == "Same network, lower loss."
    better = visit.page.locator("td[data-title='test loss'] b.above")
    assert better.inner_text().startswith("−0.200"), "less is better"
    assert visit.errors == []


def test_a_comparison_says_what_it_does_not_have(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=contest&view=controller")
    assert visit.page.locator("main .panel:visible").count() == 1
    assert "No controller was trained in this run" in visit.page.locator("main").inner_text()
    visit.go("runs=contest&view=events")
    visit.wait("() => document.querySelector('.events .body').textContent.includes('kept no events')")
    assert visit.page.locator("main .panel:visible").count() == 1, "it does not say that nothing was planted"
    visit.go("runs=mine&view=controller")  # a growth from Python has rounds, and what they hold
    visit.wait("() => document.querySelector('main .uplot') && !main.innerText.includes('nothing yet')")
    visit.go("runs=first&view=controller")
    visit.wait("() => document.querySelectorAll('main .panel.chart:not([hidden]) .uplot').length >= 8")
    assert visit.errors == []


def test_empty_cells_are_left_out_on_a_phone(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=rated&view=events", width=360)
    visit.wait("() => document.querySelector('.events-table')")
    cells = visit.page.locator(".events-table td:visible")
    assert all(cells.nth(i).inner_text().strip() for i in range(14)), "a row of the phone has no empty line"
    assert visit.errors == []


def test_a_run_with_nothing_to_replay_shows_no_sliders(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=compared")
    assert not visit.page.locator("#transport").is_visible()
    visit.go("runs=first")
    visit.wait("() => !document.querySelector('#transport').hidden")


def test_the_page_is_light_and_whole_on_paper(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=shown", theme="dark")
    visit.page.emulate_media(media="print", color_scheme="dark")
    visit.ask("() => dispatchEvent(new Event('beforeprint'))")
    assert visit.ask("() => document.documentElement.dataset.theme") == "light"
    cut = "(e) => e.scrollHeight > e.clientHeight + 2 && getComputedStyle(e).overflowY !== 'visible'"
    assert visit.ask(f"() => ({cut})(document.querySelector('main'))") is False, "all of it is printed"
    for hidden in ("#transport", ".views", "#theme"):
        assert not visit.page.locator(hidden).is_visible()
    visit.ask("() => dispatchEvent(new Event('afterprint'))")
    assert visit.ask("() => document.documentElement.dataset.theme") == "dark"
    visit.page.emulate_media(media="screen")


def test_a_growth_from_python_is_shown_by_epochs_beside_its_baseline(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=mine")
    visit.wait("() => document.querySelector('#rounds-done')?.textContent === '5 / 5'")
    names = "() => [...document.querySelectorAll('.chart:not([hidden]) .value em')].map((e) => e.textContent)"
    assert visit.ask(names)[:2] == ["grown", "static"]
    assert visit.page.locator(".chart:visible", has_text="Return").count() == 0
    visit.wait("() => document.querySelector('.wall .hint').textContent.includes('step 5')")
    visit.page.keyboard.press("ArrowLeft")
    visit.wait("() => document.querySelector('#rounds-done').textContent === '4 / 5'")
    visit.go("runs=mine&view=members")
    visit.wait("() => document.querySelector('.network')?.textContent.includes('the rest')")
    visit.go("runs=mine&runs=yours&view=compare")
    visit.wait("() => document.querySelectorAll('.comparing .results table').length === 2")
    assert visit.page.locator("main", has_text="the same model without growth").count() == 1
    assert visit.errors == []


def test_rates_that_are_set_are_shown_for_one_member_and_for_all(
    tab: Any, served: Served, runs: Path
) -> None:
    told = made_up_trajectories(3, members=12, rates=True)
    choice, rate = told.columns["rate_choice"], told.columns["rate"]
    visit = Visit(tab, served.address, "runs=rated&view=members&member=5&step=7")
    visit.wait("() => document.querySelector('.rate .uplot')")
    words = {1: "×2", 2: "÷2", 3: "↘"}
    marks = ", ".join(f"{t + 1} {words[int(choice[t, 5])]}" for t in np.flatnonzero(choice[:, 5]))
    assert visit.ask("() => document.querySelector('.rate .body').dataset.marks") == marks
    figures = visit.page.locator(".figures").inner_text().replace("\n", " ")
    now = float(f"{rate[8, 5]:.3g}")
    assert f"learning rate × {now:g}" in figures, figures
    visit.go("runs=rated&view=controller&step=7")
    visit.wait("() => document.querySelector('.rates .uplot')")
    shown = visit.ask(SPREAD)
    for u in range(told.columns["rate"].shape[0]):
        powers = np.sort(np.log10(rate[u][rate[u] > 0]))
        if len(powers):
            ends = [powers[int(share * (len(powers) - 1) + 0.5)] for share in (0.1, 0.9)]
            assert [row[u] for row in shown] == pytest.approx([powers.mean(), *ends], abs=1e-5)
    visit.go("runs=rated&view=events&member=5")
    chip = visit.page.locator(".chip", has_text="rate changed")
    chip.click()
    assert chip.inner_text() == f"rate changed {np.count_nonzero(choice[:, 5])}"
    assert visit.page.locator(".events-table tbody tr").count() == np.count_nonzero(choice[:, 5])
    visit.go("runs=first&view=controller")
    visit.wait("() => document.querySelector('.rates').hidden")  # a folder without rates
    visit.go("runs=first&view=members")
    visit.wait("() => document.querySelector('.network') && document.querySelector('.rate').hidden")
    assert visit.errors == []


SPREAD = """async () => {
  const { momentOf } = await import("/js/moment.js");
  const { spreadOf } = await import("/js/rates.js");
  const { mean, low, high } = spreadOf(momentOf(() => {}).trajectories);
  return [mean, low, high];
}"""


def test_a_run_is_followed_forward_and_back(tab: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        visit = Visit(tab, served.address, ready="false")
        visit.wait("() => document.querySelector('#notes').textContent.includes('There is no run here yet')")
        with trained(tmp_path / "live", rounds=5, members=16) as live:
            visit.wait("() => document.querySelector('#rounds-done')?.textContent === '5 / 40'")
            assert visit.ask("() => document.querySelector('#notes').textContent") == ""
            took = []
            for number in (6, 7, 8):  # the quickest counts: the machine may be busy with something else
                add_round(live, number, members=16)
                begun = time.monotonic()
                visit.wait(f"() => document.querySelector('#rounds-done').textContent === '{number} / 40'")
                took.append(time.monotonic() - begun)
            assert min(took) < 1
            # A file that is asked for while it is taken back would be missing.
            visit.wait("() => document.querySelector('.wall .hint').textContent.includes('in round 8')")
            live.truncate_after(3)
            visit.wait("() => document.querySelector('#rounds-done').textContent === '3 / 40'", seconds=2)
            assert visit.rounds("live") == [1, 2, 3]
            assert visit.errors == []


def watch_command(folder: Path, port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "esper", "watch", str(folder), "--port", str(port)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "open http://127.0.0.1:" in read_line(process)
    return process


def test_the_page_comes_back_after_the_server_was_killed(tab: Any, live: RunFolder) -> None:
    with serving(live.path) as served:  # only to learn of a port that is free
        port = served.port
    process = watch_command(live.path, port)
    try:
        visit = Visit(tab, f"http://127.0.0.1:{port}/")
        visit.wait("() => document.querySelector('#rounds-done')?.textContent === '5 / 40'")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(MINUTE)
        visit.wait("() => document.querySelector('#link').textContent !== ''")
        add_round(live, 6, members=16)
        process = watch_command(live.path, port)
        visit.wait("() => document.querySelector('#rounds-done').textContent === '6 / 40'", seconds=6)
        assert visit.rounds("live") == [1, 2, 3, 4, 5, 6]
        assert [text for text in visit.errors if "net::ERR_" not in text] == []  # the browser notes the loss
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_truncated_and_corrupt_files_are_told_and_the_rest_is_shown(tab: Any, live: RunFolder) -> None:
    with open(live.metrics_file.path, "ab") as file:
        file.write(b"\x00\xff not a line\n")
    live.metrics_file.append(summary(6))
    with open(live.metrics_file.path, "ab") as file:
        file.write(b'{"round":7,"rou')
    for trajectories in live.trajectories.path.iterdir():
        trajectories.write_bytes(trajectories.read_bytes()[:100])
    (live.path / "results.json").write_bytes(b"[]")
    live.events_file.path.write_bytes(live.events_file.path.read_bytes()[:5000] + b"\nxx\n")
    with serving(live.path) as served:
        visit = Visit(tab, served.address)
        visit.wait("() => document.querySelector('#rounds-done')?.textContent === '6 / 40'")
        told = visit.page.locator("#notes").inner_text()
        assert "1 line of metrics.jsonl could not be read" in told
        assert "results.json does not hold a Comparison" in told
        visit.wait(
            "() => document.querySelector('#notes').textContent.includes('000005.safetensors is damaged')"
        )
        assert "trajectories/000005.safetensors is damaged" in visit.page.locator(".wall .empty").inner_text()
        for view in VIEWS:
            visit.go(f"view={view}")
        assert visit.errors == []


def test_what_is_shown_lives_in_the_address_and_the_keys_reach_it(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=first")
    hash_of = lambda: visit.ask("() => location.hash")  # noqa: E731
    visit.press("3")
    visit.wait("() => document.querySelector('.network')")
    visit.press("ArrowLeft")
    visit.press("ArrowDown")
    assert "view=members" in hash_of()
    assert "step=22" in hash_of()
    assert "member=" in hash_of()
    visit.press(",")
    assert "round=19" in hash_of()  # of the rounds whose members were kept
    visit.press("t")
    assert visit.ask("() => document.documentElement.dataset.theme") == "dark"
    member = visit.page.locator(".member > header h2").inner_text()
    visit.page.reload()
    visit.wait("() => document.querySelector('.member > header h2')?.textContent.startsWith('Member ')")
    assert visit.page.locator(".member > header h2").inner_text() == member
    assert visit.ask("() => document.documentElement.dataset.theme") == "dark"
    assert visit.page.locator("output[for=step]").inner_text() == "23 of 24"
    visit.press("l")
    assert "round=" not in hash_of()
    visit.press("?")
    assert visit.page.locator("dialog[open] kbd").count() > 8
    visit.press("Escape")
    assert visit.page.locator("dialog[open]").count() == 0
    assert visit.errors == []


@pytest.mark.parametrize(("width", "box"), [(1440, "#main"), (360, "html")])
def test_all_of_a_page_is_reached_with_keys_alone(tab: Any, served: Served, width: int, box: str) -> None:
    visit = Visit(tab, served.address, "runs=shown", width=width)
    visit.wait("() => document.querySelector('.outcome .uplot')")
    top = f"() => Math.round(document.querySelector('{box}').scrollTop)"
    visit.press("PageDown")
    page = visit.ask(top)
    assert page > 300
    visit.press("ArrowUp")
    assert visit.ask(top) == page - 60
    visit.press("End")
    end = visit.ask(f"() => ((e) => e.scrollHeight - e.clientHeight)(document.querySelector('{box}'))")
    assert visit.ask(top) == pytest.approx(end, abs=1)
    visit.press("Home")
    assert visit.ask(top) == 0
    for _ in range(9 if width > 600 else 12):  # from the name over the views to the buttons behind them
        visit.press("Tab")
        focused = (
            "() => [document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
        )
        tag, outline = visit.ask(focused)
        assert tag in ("A", "BUTTON", "SELECT")
        assert outline == "solid", "one sees where the focus is"
    assert visit.errors == []


def test_a_replay_runs_through_the_steps_and_on_to_the_next_round(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=first&view=members&round=19&step=20")
    visit.wait("() => document.querySelector('.wall .hint').textContent.includes('round 19')")
    visit.ask(
        "() => { for (let i = 0; i < 2; i++) document.querySelector('[title=\"steps per second\"]').click() }"
    )
    visit.press(" ")
    visit.wait("() => document.querySelector('.wall .hint').textContent.includes('round 20')", seconds=4)
    visit.press(" ")
    assert visit.errors == []


def test_runs_are_laid_over_each_other_with_their_settings(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=first&view=compare")
    visit.page.get_by_label("lay another run over these").select_option("second")
    visit.wait("() => document.querySelector('.comparing table')?.textContent.includes('second')")
    assert "±" in visit.page.locator(".comparing table").first.inner_text()
    visit.go("runs=first&runs=second&view=settings")
    assert visit.page.locator(".settings-table .differs").inner_text().split() == ["ppo.clip", "0.2", "0.1"]
    visit.go("runs=contest&view=settings")
    visit.wait("() => document.querySelector('.settings-table')?.textContent.includes('<script>alert')")
    visit.go("runs=first&runs=second&view=overview")
    named = "[...document.querySelectorAll('.chart .value')].filter((e) => e.textContent.includes('second'))"
    visit.wait(f"() => {named}.length >= 3")
    assert visit.errors == []


def test_members_are_shown_by_controller_sorted_filtered_and_picked(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=contest&view=members")
    hint = "document.querySelector('.wall .hint').textContent"
    size = "document.querySelector('.wall canvas').getBoundingClientRect().height"
    for key, name in (("", "tamiyo"), (",", "static"), (".", "tamiyo")):
        if key:
            visit.press(key)
        visit.wait(f"() => {hint}.includes('8 in {name}')")
        assert visit.page.locator("output[for=round]").inner_text() == name
    visit.go("runs=first&view=members")
    visit.wait(f"() => {hint}.includes('24 in round 20')")
    visit.page.locator("#filter").select_option("ever:NORM")
    visit.wait(f"() => {hint}.includes(' of 24')")
    visit.settle()
    before = visit.ask(f"() => {size}")
    visit.settle()
    assert visit.ask(f"() => {size}") == before, "the wall stands still"
    visit.page.locator(".wall canvas").click(position={"x": 80, "y": 12})
    member = visit.page.locator(".member > header h2").inner_text()
    assert f"member={member.removeprefix('Member ')}" in visit.ask("() => location.hash")
    assert visit.errors == []


def test_the_memory_of_the_page_is_bounded(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=first")
    held = visit.ask("""async () => {
      const { Run } = await import("/js/store.js");
      const run = new Run("long");
      const line = (round) => ({ round, rounds: 1e5, members: 4, seconds: round, return_mean: 0.1,
        op_shares: { WAIT: 1 }, op_shares_by_step: [[1], [1]], anomalies: ["something"] });
      for (let k = 0; k < 50; k++) {
        const lines = Array.from({ length: 1000 }, (_, i) => line(1000 * k + i + 1));
        run.add({ at: "0-0", damaged: 0, restarted: false, lines });
      }
      const steps = run.rounds.filter((record) => record.byStep).length;
      const order = run.rounds.every((record, i) => i === 0 || record.round > run.rounds[i - 1].round);
      return { rounds: run.rounds.length, steps, notes: run.notes.length, last: run.last.round, order };
    }""")
    assert held["rounds"] <= 4000
    assert held["steps"] <= 301
    assert held["notes"] <= 200
    assert held["last"] == 50_000
    assert held["order"]


def test_films_lie_inside_the_wall_and_a_click_finds_its_own(tab: Any, served: Served) -> None:
    visit = Visit(tab, served.address, "runs=first&view=members")
    wrong = visit.ask("""async () => {
      const { arrange, Wall } = await import("/js/wall.js");
      const wrong = [];
      for (const [w, h] of [[300, 200], [760, 640], [1900, 900]])
        for (const count of [1, 2, 7, 24, 300, 2048])
          for (const T of [1, 24, 150])
            for (const S of [1, 3, 25]) {
              const wall = Object.create(Wall.prototype);
              wall.layout = arrange(w, h, count, T, S, 1);
              wall.scale = 1;
              wall.order = [...Array(count).keys()].reverse();
              const seen = new Set();
              for (let place = 0; place < count; place++) {
                const [x, y] = wall.corner(place);
                const { filmWidth, filmHeight } = wall.layout;
                const inside = x >= 0 && y >= 0 && x + filmWidth <= w && y + filmHeight <= h;
                const found = wall.hit({ offsetX: x + filmWidth / 2, offsetY: y + filmHeight / 2 });
                if (!inside || found !== wall.order[place] || seen.has(`${x},${y}`))
                  wrong.push([w, h, count, T, S, place, inside, found]);
                seen.add(`${x},${y}`);
              }
            }
      return wrong.slice(0, 5).concat(wrong.length);
    }""")
    assert wrong == [0]


def test_what_grew_into_the_host_is_drawn_there(tab: Any, tmp_path: Path) -> None:
    trajectories = made_up_trajectories(1, members=3, steps=8, slots=1)
    trajectories = replace(
        trajectories,
        parts=[replace(trajectories.parts[0], units=8), *trajectories.parts[1:]],
        blueprint_names={**trajectories.blueprint_names, 13: "CLONE", 15: "WIDEN_FULL"},
    )
    twice = [2, 4, 7, 1, 2, 4, 7, 1]  # two seeds, each kept and folded
    trajectories.columns["stage"][:, :, 0] = np.array([twice, [2, 4, 7, 1, 1, 1, 1, 1], twice]).T
    for n, (first, second) in enumerate(((1, 3), (1, 255), (13, 15))):
        trajectories.columns["blueprint"][:, n, 0] = [first] * 3 + [255] + [second] * 3 + [255]
    trajectories.columns["rolled_back"][:] = 0
    trajectories.columns["rolled_back"][2, 1] = 1  # the governor took the fossil of member 1 back
    with trained(tmp_path / "run", rounds=1, members=3) as folder:
        folder.trajectories.write(trajectories)
    grown = "document.querySelectorAll('.network .grown')"
    with serving(tmp_path) as served:
        visit = Visit(tab, served.address, "runs=run&view=members&member=0")
        visit.wait(f"() => {grown}.length === 2")
        assert visit.page.locator(".network .grown text").all_text_contents() == ["conv light", "norm"]
        visit.go("runs=run&view=members&member=0&step=4")
        visit.wait(f"() => {grown}.length === 1")
        visit.go("runs=run&view=members&member=1")
        visit.wait(f"() => {grown}.length === 0")
        visit.go("runs=run&view=members&member=2")
        visit.wait("() => document.querySelectorAll('.network .part .copy').length === 1")
        drawn = visit.page.locator(".network .part").first.text_content()
        assert "× 2" in drawn
        assert "hidden 8 → 16" in drawn
        assert visit.errors == []
