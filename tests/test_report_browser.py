"""The page in a real browser: what a reader does with it, and what hostile texts cannot do to it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from collapsediag.cli.report import build_page
from collapsediag.record import Record
from collapsediag.run_folder import RunStore

from .chromium import Chromium, chromium, needs_chromium
from .report_runs import write_noise, write_run

pytestmark = [pytest.mark.browser, needs_chromium]

PWNED = "window.pwned = 1; document.title = 'PWNED'"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
HOSTILE = (
    f"</script><script>{PWNED}</script>",
    f"<img src=x onerror=\"{PWNED}\">",
    f"<!--<script>{PWNED}</script>-->",
    "{{constructor.constructor('window.pwned = 1')()}} ${window.pwned = 1} @@SCRIPT@@",
    f"<a href=\"javascript:{PWNED}\">click</a> &lt;b&gt; &amp; [x](javascript:1)",
    "safe \u202eesrever\u202c \u2066isolate\u2069 zero\u200bwidth tag\U000e0041",
    "bell\x07 escape\x1b[31m null\x00 delete\x7f separators\u2028\u2029 lone \ud800 and \udfff",
    "من اليمين إلى اليسار " + "עברית",
    f"emoji {FAMILY} \U0001f44d\U0001f3fd می\u200cخواهم",  # noqa: RUF001
    "word " * 200_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    run = write_run(folder / "run", texts=HOSTILE[:1], environments=["maze", "shop"])
    return written(folder / "page.html", build_page([str(run)]))


def written(path: Path, page: str) -> str:
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


def text(browser: Chromium, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def count(browser: Chromium, selector: str) -> int:
    return int(browser.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))


def told(browser: Chromium, chart: str) -> str:
    return text(browser, f"[data-chart={chart}] .told")


def fill(browser: Chromium, name: str, value: str) -> None:
    """Type into a field, as far as its listeners can tell."""
    events = "['input', 'change'].forEach(kind => e.dispatchEvent(new Event(kind)))"
    browser.evaluate(f"(e => {{ e.value = {json.dumps(value)}; {events}; }})(document.getElementById('{name}'))")


def steps_on_axis(browser: Chromium) -> list[int]:
    ticks = (
        "[...document.querySelectorAll('[data-chart=retrieval] .tick[text-anchor=middle]')].map(e => +e.textContent)"
    )
    return [int(step) for step in browser.evaluate(ticks)]


def test_it_opens_with_the_verdict_and_asks_for_nothing(browser: Chromium, page: str) -> None:
    browser.open(page)
    assert text(browser, "h1") == "Template collapse since step 50"
    assert "chance 0.125" in text(browser, ".lead")
    assert "checks ran" in text(browser, ".answers")
    assert "out of <b>memory</b>" in text(browser, ".failures")
    for chart in ("retrieval", "mi", "entropies", "reward"):
        assert count(browser, f"[data-chart={chart}] .line") >= 1, chart
    assert count(browser, "#regime-map .dot") == 9
    assert text(browser, "[data-chart=pass] .why") == "Not measured, because no rollout has a success label."
    assert count(browser, "[data-chart=pass] svg") == 0
    assert browser.requests() == [page]
    assert browser.problems() == []


def test_noise_at_chance_is_drawn_as_the_verdict_says(browser: Chromium, folder: Path) -> None:
    browser.open(written(folder / "noise.html", build_page([str(write_noise(folder / "noise"))])))
    assert text(browser, "h1").startswith("Template collapse")
    (top, bottom), dots, ticks, title = browser.evaluate(
        "(all => [(box => [box.top, box.bottom])(all('.region.template')[0].getBoundingClientRect()),"
        " all('.dot.chance').map(e => (box => (box.top + box.bottom) / 2)(e.getBoundingClientRect())),"
        " all('.tick[text-anchor=end]').map(e => e.getBoundingClientRect().left),"
        " all('.axis[transform]')[0].getBoundingClientRect().right])"
        "(name => [...document.querySelectorAll('#regime-map ' + name)])"
    )
    assert len(dots) >= 7
    assert all(top - 0.1 <= dot <= bottom for dot in dots)
    assert min(ticks) >= title  # no number over the name of its axis
    assert "Red dots: retrieval at chance" in text(browser, "#regime-map .note")
    assert browser.problems() == []


def test_steps_are_chosen_by_slider_keys_and_clicks(browser: Chromium, page: str) -> None:
    browser.open(page)
    assert text(browser, "#step") == "step 80"
    browser.evaluate("(e => { e.value = 2; e.dispatchEvent(new Event('input')); })(document.querySelector('#slider'))")
    assert told(browser, "retrieval").startswith("step 20 ")
    browser.key("ArrowRight")
    assert told(browser, "retrieval").startswith("step 30 ")
    browser.wait("document.querySelector('#matrix .told').textContent.startsWith('step 30 ')")
    assert "#step=30" in browser.evaluate("location.hash")
    x, y, width, height = browser.box("[data-chart=mi] .target")
    browser.drag((x + width / 2, y + height / 2), (x + width / 2, y + height / 2))
    assert text(browser, "#step") == "step 40"
    browser.click("#earlier")
    assert text(browser, "#step") == "step 30"


def test_the_cursor_is_shared_and_a_drag_zooms_every_chart(browser: Chromium, page: str) -> None:
    browser.open(page)
    x, y, width, height = browser.box("[data-chart=reward] .target")
    browser.mouse("mouseMoved", x + width / 2, y + height / 2)
    browser.wait("document.querySelector('[data-chart=reward] .told').textContent.startsWith('step 40 ')")
    assert told(browser, "retrieval").startswith("step 40 ")
    browser.drag((x + width * 0.25, y + 20), (x + width * 0.75, y + 20))
    assert min(steps_on_axis(browser)) >= 20
    assert max(steps_on_axis(browser)) <= 60
    assert "zoom=20-60" in browser.evaluate("location.hash")
    browser.click("#reset")
    assert (min(steps_on_axis(browser)), max(steps_on_axis(browser))) == (0, 50)


def test_traces_are_found_and_read(browser: Chromium, page: str) -> None:
    browser.open(f"{page}#step=20&trace=1")
    assert text(browser, "#trace-reader h4").startswith("Trace 1: ")
    shaded = browser.evaluate(
        "[...document.querySelectorAll('pre.reasoning span')].map(e => [e.textContent, e.className])"
    )
    assert shaded == [["alpha ", "above s6"], ["beta ", "below s3"], ["gamma", ""]]
    assert count(browser, ".siblings button") == 7
    browser.evaluate("document.querySelectorAll('#trace-list button')[9].click()")
    assert text(browser, "#trace-reader h4").startswith("Trace 9: ")
    assert "trace=9" in browser.evaluate("location.hash")
    assert text(browser, ".prompts pre") == "the task says: prompt number 1, think first"
    x, y, _, height = browser.box(".cells canvas")
    browser.drag((x + 3, y + height * 60.5 / 64), (x + 3, y + height * 60.5 / 64))
    assert text(browser, "#trace-reader h4").startswith("Trace 60: ")
    browser.key("n")
    assert count(browser, "#trace-list .retrieved") == 0
    assert 0 < count(browser, "#trace-list .missed") < 64
    browser.evaluate("document.querySelector('#trace-list button').click()")
    parts = browser.evaluate(
        "[...document.querySelectorAll('.prompts pre')].map(e => [...e.children].map(s => s.textContent))"
    )
    assert [part[0] for part in parts] == ["the task says: prompt number "] * 2
    assert [part[2] for part in parts] == [", think first"] * 2
    assert parts[0][1] != parts[1][1]
    browser.key("n")
    assert count(browser, "#trace-list button") == 64
    fill(browser, "search", "NUMBER 3,")
    assert count(browser, "#trace-list button") == 8
    fill(browser, "reward-from", "0.9")
    rewards = browser.evaluate("[...document.querySelectorAll('#trace-list .reward')].map(e => e.textContent)")
    assert set(rewards) == {"1"}
    fill(browser, "environment", "shop")
    assert 0 < count(browser, "#trace-list button") < len(rewards)


def test_the_reader_stays_with_the_prompt_when_a_step_keeps_other_traces(browser: Chromium, folder: Path) -> None:
    run = write_run(folder / "thinned", is_kept=lambda step, row: (row + step // 10) % 2 == 0)
    page = written(folder / "thinned.html", build_page([str(run)]))
    browser.open(f"{page}#step=80&trace=18")
    assert text(browser, "#trace-reader h4").startswith("Trace 18: ")
    browser.key("ArrowLeft")
    browser.wait("document.querySelector('#trace-reader h4').textContent.startsWith('Trace 17: ')")
    assert "step=70&trace=17" in browser.evaluate("location.hash")
    # Asked for by name, a trace that was not kept is not replaced by another.
    browser.open(f"{page}#step=80&trace=19")
    assert "The text of trace 19 was not kept" in text(browser, "#trace-reader .why")


def test_each_draw_of_turns_has_its_own_curves_matrix_and_traces(browser: Chromium, folder: Path) -> None:
    run = write_run(folder / "draws", draws=("first_turn", "turn"))
    browser.open(written(folder / "draws.html", build_page([str(run)])))
    assert told(browser, "retrieval").startswith("step 80   retrieval 0.125 ")
    assert text(browser, "#trace-count").endswith("64 not retrieved")
    fill(browser, "draw", "turn")
    assert not told(browser, "retrieval").startswith("step 80   retrieval 0.125 ")
    browser.wait("!document.querySelector('#trace-count').textContent.endsWith('64 not retrieved')")
    assert "draw=turn" in browser.evaluate("location.hash")
    assert "diverse reasoning" in text(browser, "#regime-map .told")


def test_a_link_opens_what_it_names(browser: Chromium, page: str) -> None:
    browser.open(f"{page}#step=20&trace=5")
    assert text(browser, "#step") == "step 20"
    assert text(browser, "#trace-reader h4").startswith("Trace 5: ")
    browser.evaluate("void (location.hash = 'step=60&trace=7&zoom=40-80')")
    browser.wait("document.querySelector('#trace-reader h4').textContent.startsWith('Trace 7: ')")
    assert text(browser, "#step") == "step 60"
    assert min(steps_on_axis(browser)) >= 40
    browser.evaluate("void (location.hash = 'step=1e9&trace=<img>&run=99&zoom=9-1&draw=__proto__')")
    browser.wait("document.querySelector('#step').textContent === 'step 80'")
    assert count(browser, "[data-chart=retrieval] .line") == 2
    assert browser.problems() == []


def test_light_dark_print_and_narrow(browser: Chromium, page: str) -> None:
    browser.open(page, width=400)
    assert browser.evaluate("document.documentElement.scrollWidth") == 400
    pixel = "Array.from(document.querySelector('.cells canvas').getContext('2d').getImageData(1, 40, 1, 1).data)"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(f"[{ground}, {pixel}]")
    browser.key("t")
    dark = browser.evaluate(f"[{ground}, {pixel}]")
    assert dark[0] != light[0]
    assert sum(dark[1][:3]) < sum(light[1][:3])
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(f"[getComputedStyle(document.querySelector('nav')).display, {ground}]") == [
        "none",
        "rgb(255, 255, 255)",
    ]
    browser.call("Emulation.setEmulatedMedia", media="")
    pdf = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert pdf.startswith(b"%PDF")


def test_those_who_see_no_charts_get_words_and_a_table(browser: Chromium, page: str) -> None:
    browser.open(page)
    label = browser.evaluate("document.querySelector('[data-chart=retrieval] svg').getAttribute('aria-label')")
    assert "retrieval from" in label
    assert "at step 80" in label
    browser.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    browser.wait("document.querySelectorAll('#step-table tbody tr').length === 9")
    assert "no rollout has a success label" in text(browser, "#number-table .unmeasured td")
    unnamed = """[...document.querySelectorAll('button, input, select')].filter(e =>
        !e.closest('[hidden]') && !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length).length"""
    assert browser.evaluate(unnamed) == 0


def test_environments_share_one_axis(browser: Chromium, page: str) -> None:
    browser.open(page)
    ticks = "[...e.querySelectorAll('.tick')].map(t => t.textContent).join()"
    found = browser.evaluate(f"[...document.querySelectorAll('#environments svg')].map(e => {ticks})")
    assert len(found) == 2
    assert found[0] == found[1]
    assert browser.evaluate("[...document.querySelectorAll('#environments h3')].map(e => e.textContent)") == [
        "maze",
        "shop",
    ]


def test_hostile_texts_execute_nothing_and_can_be_read(browser: Chromium, folder: Path) -> None:
    run = write_run(folder / "hostile", texts=HOSTILE, environments=[f'<img src=x onerror="{PWNED}">', None])
    page = written(folder / "hostile.html", build_page([str(run)]))
    assert len(Path(folder / "hostile.html").read_bytes()) < 2_000_000
    browser.open(page)
    shown = []
    for trace in range(len(HOSTILE)):
        browser.evaluate(f"void (location.hash = 'step=80&trace={trace}')")
        browser.wait(f"document.querySelector('#trace-reader h4').textContent.startsWith('Trace {trace}: ')")
        shown.append(text(browser, "pre.reasoning"))
    assert shown[:5] == list(HOSTILE[:5])
    assert shown[5] == "safe U+202EesreverU+202C U+2066isolateU+2069 zeroU+200Bwidth tagU+E0041"
    assert (
        "bellU+0007 escapeU+001B[31m nullU+0000 deleteU+007F separatorsU+2028U+2029 lone U+D800 and U+DFFF" in shown[6]
    )
    assert shown[7:9] == list(HOSTILE[7:9])
    assert len(shown[9]) < 21_000
    assert "\n[...]\n" in shown[9]
    assert browser.evaluate("document.querySelectorAll('img, iframe, a[href^=javascript]').length") == 0
    assert browser.evaluate("[window.pwned ?? null, document.title]") == [None, "hostile"]
    assert browser.requests() == [page]
    assert browser.problems() == []


def test_numbers_too_large_to_be_counted_up_and_a_state_that_clears(browser: Chromium, folder: Path) -> None:
    with RunStore(folder / "large") as store:
        for step, calls in enumerate([2.0] * 5 + [0.0] * 3 + [2.0] * 2):
            store.append(Record(step=step, values={"reward/mean": 1e17, "tools/calls_per_rollout": calls}))
    browser.open(written(folder / "large.html", build_page([str(folder / "large")])))
    assert "mean 100\u202f000" in told(browser, "reward")
    assert text(browser, ".lead").endswith(" Not seen in the last 2 measured steps, too few to call it over.")
    assert text(browser, ".answers dd") == "step 5"
    assert browser.problems() == []


def test_the_policy_blocks_what_is_injected_into_the_file(browser: Chromium, folder: Path, page: str) -> None:
    whole = (folder / "page.html").read_text(encoding="utf-8")
    injected = f'<img src="x" onerror="{PWNED}"><script>{PWNED}</script><a id="go" href="javascript:{PWNED}">go</a>'
    assert whole.count("<main>") == 1
    browser.open(written(folder / "injected.html", whole.replace("<main>", "<main>" + injected)))
    browser.evaluate("document.querySelector('#go').click()")
    answer = "fetch('https://example.org/').then(() => 'sent', () => 'refused')"
    assert browser.evaluate(answer) == "refused"
    thrown = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'set'; } catch (e) { return e.name; } })()"
    assert browser.evaluate(thrown) == "TypeError"
    assert browser.evaluate("[window.pwned ?? null, document.title]") == [None, "run"]
    refused = [problem for problem in browser.problems() if "Content Security Policy" in problem]
    assert len(refused) >= 4


def test_several_runs_are_drawn_over_one_another(browser: Chromium, folder: Path) -> None:
    runs = [
        write_run(folder / name, reward=reward) for name, reward in (("a", 0.2), ("b", 0.4), ("c", 0.6), ("d", 0.8))
    ]
    browser.open(written(folder / "several.html", build_page([str(run) for run in runs])))
    assert count(browser, "#runs tbody tr") == 4
    assert count(browser, "[data-chart=retrieval] .line:not(.reference)") == 4
    assert count(browser, "[data-chart=entropies] .line") == 8
    assert browser.evaluate("document.querySelectorAll('#comparison tbody tr').length") > 0
    browser.evaluate("document.querySelectorAll('#runs input')[1].click()")
    assert count(browser, "[data-chart=retrieval] .line:not(.reference)") == 3
    browser.evaluate("document.querySelectorAll('#runs button')[2].click()")
    browser.wait("document.querySelector('.kicker').textContent.startsWith('c')")
    assert "run=3" in browser.evaluate("location.hash")
    assert browser.problems() == []
