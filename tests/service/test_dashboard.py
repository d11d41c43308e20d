"""The dashboard in a headless browser: what a person sees."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from resihp.contracts import Job, Layout, to_json
from service import Settings
from tests.service.conftest import Http, batch_of, eventually, job_of, running

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"
)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    profile = tmp_path_factory.mktemp("profile")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.add_argument("--window-size=1440,1200")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    chrome.set_page_load_timeout(300)
    yield chrome
    chrome.quit()


@pytest.fixture
def browser(chrome: webdriver.Chrome) -> webdriver.Chrome:
    """On an empty page, and without what an earlier test has left on the console."""
    chrome.get("about:blank")
    chrome.get_log("browser")
    return chrome


def text(browser: webdriver.Chrome, selector: str) -> str:
    """What is seen of it, in one go: the page draws its elements anew whenever something comes."""
    shown = """
        const seen = [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility());
        return seen.map(e => e.innerText).join("\\n");
    """
    return str(browser.execute_script(shown, selector))


@contextlib.contextmanager
def before_the_page(browser: webdriver.Chrome, script: str) -> Iterator[None]:
    """Pages opened in the block run `script` before their own."""
    name = "Page.addScriptToEvaluateOnNewDocument"
    added = browser.execute_cdp_cmd(name, {"source": script})
    yield
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def answering(url_part: str, answer: str) -> str:
    """A script that gives `answer` for requests to such URLs; `real` is the browser's `fetch`, and
    `number` counts these requests from 1."""
    return f"""
        const real = window.fetch;
        let number = 0;
        window.fetch = (url, options) => {{
            if (!String(url).includes({json.dumps(url_part)})) return real(url, options);
            number += 1;
            return {answer};
        }};
    """


def watchers(http: Http) -> int:
    return int(http.app.state.context.notifier.count)


def test_a_job_is_followed_live(http: Http, browser: webdriver.Chrome):
    browser.get(f"{http.url}#%")  # an address that cannot be read names no job
    eventually(lambda: "No job yet" in text(browser, "#empty"))
    http.register(job_of("live"))
    eventually(lambda: "live" in text(browser, "#jobs"))
    for step in range(12):
        http.send("live", batch_of(step, slow=(3,) if step == 11 else ()))
    eventually(lambda: "slow" in text(browser, '[data-rank="3"]'))
    assert browser.find_elements(By.CSS_SELECTOR, '.fail_slow[data-rank="3"]')
    eventually(lambda: "healthy" in text(browser, '[data-rank="0"]'))
    eventually(lambda: "plan 1" in text(browser, "#log"))
    eventually(lambda: "Rank 3 is slow by 2.50×" in text(browser, "#log"))
    eventually(lambda: browser.find_elements(By.CSS_SELECTOR, "#chart path.observed"))
    eventually(lambda: "7 of 8 healthy" in text(browser, "#facts"))
    eventually(lambda: "plan 1 is not applied yet" in text(browser, "#facts"))
    for rank in (0, 1):
        ack = {"rank": rank, "state": "applied", "pause_ms": 3.0 - rank}
        http("POST", "/v1/jobs/live/plan/1/ack", ack)
    told = "Plan 1 answered by 2 of 7 ranks, paused 3.0 ms at most"
    eventually(lambda: told in text(browser, "#log"))
    http.send("live", batch_of(12, plan_version=1))
    eventually(lambda: "\napplied" in text(browser, "#facts"))
    eventually(lambda: "Rank 3: planned in" in text(browser, "#facts"))
    eventually(lambda: "applied in" in text(browser, "#log"))
    for rank in (4, 5):
        refusal = {"rank": rank, "state": "refused", "detail": "too large"}
        http("POST", "/v1/jobs/live/plan/1/ack", refusal)
    eventually(lambda: "Plan 1 refused by ranks 4, 5" in text(browser, "#log"))
    http("POST", "/v1/jobs/live/failures", {"ranks": [6], "reported_by": 4})
    eventually(lambda: "stopped" in text(browser, '[data-rank="6"]'))
    eventually(lambda: "rank 6 stopped" in text(browser, "#facts"))
    http.send("live", batch_of(13, plan_version=2))
    eventually(lambda: "stopped" in text(browser, '.unused [data-rank="6"]'))
    eventually(lambda: "layers 0–1" in text(browser, "#layout"))
    http("DELETE", "/v1/jobs/live")
    eventually(lambda: "No job yet" in text(browser, "#empty"))
    assert_clean(browser, http)


def test_a_job_is_followed_although_its_first_request_failed(http: Http, browser: webdriver.Chrome):
    http.register(job_of("failed"))
    failing = "number > 1 ? real(url, options) : Promise.reject(new TypeError('failed'))"
    with before_the_page(browser, answering("/diagnosis", failing)):
        browser.get(f"{http.url}#failed")
    eventually(lambda: text(browser, "#link") == "live" and text(browser, "#facts"))
    http("POST", "/v1/jobs/failed/failures", {"ranks": [6]})
    eventually(lambda: "stopped" in text(browser, '[data-rank="6"]'))
    eventually(lambda: "Rank 6 reported stopped" in text(browser, "#log"))


def test_what_changes_without_an_event_is_shown(http: Http, browser: webdriver.Chrome):
    """As the diagnosis of a job's last steps."""
    http.register(job_of("quiet"))
    later = """real(url, options).then((answer) => answer.json()).then((told) => {
        if (Date.now() > window.laterMs) Object.assign(told, { steps: 9, root_cause: "host" });
        return new Response(JSON.stringify(told));
    })"""
    with before_the_page(browser, answering("/diagnosis", later)):
        browser.get(f"{http.url}#quiet")
    eventually(lambda: "not enough steps yet" in text(browser, "#facts"))
    browser.execute_script("window.laterMs = Date.now() + 2000")  # reads of the events are over
    eventually(lambda: "\nhost\n" in text(browser, "#facts"))


def test_panels_go_on_without_a_stream_and_the_page_says_so(http: Http, browser: webdriver.Chrome):
    http.register(job_of("refused"))
    with before_the_page(
        browser, answering("/events", "Promise.resolve(new Response('', {status: 429}))")
    ):
        browser.get(f"{http.url}#refused")
    eventually(lambda: text(browser, "#facts"))
    http("POST", "/v1/jobs/refused/failures", {"ranks": [6]})
    eventually(lambda: "stopped" in text(browser, '[data-rank="6"]'))
    eventually(lambda: text(browser, "#link") == "disconnected")


def test_a_stream_that_has_fallen_silent_is_opened_again(http: Http, browser: webdriver.Chrome):
    http.register(job_of("silent"))
    silent = """number > 1 ? real(url, options) : Promise.resolve(new Response(new ReadableStream({
        start(controller) {
            controller.enqueue(new TextEncoder().encode("retry: 1000\\n\\n"));
            options.signal.addEventListener("abort", () => controller.error(new Error("aborted")));
        },
    })))"""
    sooner = """
        const later = window.setTimeout;
        window.setTimeout = (work, ms) => later(work, ms > 20000 && number === 1 ? 100 : ms);
    """
    with before_the_page(browser, answering("/events", silent) + sooner):
        browser.get(f"{http.url}#silent")
    eventually(lambda: "Registered as silent" in text(browser, "#log"))


def test_switching_between_jobs_leaves_one_stream(http: Http, browser: webdriver.Chrome):
    for name in ("left", "right"):
        http.register(job_of(name))
    late = """new Promise((done) => setTimeout(done, 300)).then(() => {
        window.late -= 1;
        return real(url, options);
    }, window.late = (window.late ?? 0) + 1)"""
    with before_the_page(browser, answering("/diagnosis", late)):
        browser.get(f"{http.url}#left")
    eventually(lambda: "left" in text(browser, "#jobs"))
    browser.execute_async_script(
        "for (let i = 0; i < 7; i++)"
        " setTimeout(() => (location.hash = i % 2 ? 'left' : 'right'), 60 * i);"
        " setTimeout(arguments[0], 500);"
    )
    eventually(lambda: browser.title.startswith("right") and text(browser, "#link") == "live")
    eventually(lambda: browser.execute_script("return window.late === 0"))
    eventually(lambda: watchers(http) == 1)


def test_a_page_that_is_not_seen_holds_no_stream(http: Http, browser: webdriver.Chrome):
    http.register(job_of("hidden"))
    browser.get(f"{http.url}#hidden")
    eventually(lambda: "Registered as hidden" in text(browser, "#log") and watchers(http) == 1)
    page = browser.current_window_handle
    browser.switch_to.new_window("tab")
    eventually(lambda: watchers(http) == 0)
    http("POST", "/v1/jobs/hidden/failures", {"ranks": [6]})
    browser.close()
    browser.switch_to.window(page)
    eventually(lambda: "Rank 6 reported stopped" in text(browser, "#log"))
    assert text(browser, "#log").count("Registered as hidden") == 1


def test_steps_follow_a_job_that_goes_back(http: Http, browser: webdriver.Chrome):
    http.register(job_of("back"))
    browser.get(f"{http.url}#back")

    def chart(selector: str) -> str:
        shown = "return document.querySelector('#chart ' + arguments[0])?.textContent"
        return browser.execute_script(shown, selector) or ""

    def run(*steps: int) -> str:
        """Do these steps; the first label of the chart once it ends with the last but one, which
        is whole."""
        for step in steps:
            http.send("back", batch_of(step))
        eventually(lambda: f"Step {steps[-2]}:" in chart("title"))
        return chart('text[text-anchor="middle"]')

    assert run(*range(80, 100)) == "80"
    assert run(*range(90, 94)) == "80"
    assert run(*range(10, 16)) == "10"
    http.register(job_of("back", device="H100"))
    eventually(lambda: "Waiting for the first steps" in text(browser, "#chart"))


def test_a_job_stays_shown_when_another_is_registered(http: Http, browser: webdriver.Chrome):
    http.register(job_of("zebra-1"))
    browser.get(http.url)
    eventually(lambda: browser.title.startswith("zebra-1"))
    http.register(job_of("zebra-2"))
    eventually(lambda: "zebra-2" in text(browser, "#jobs"))
    assert text(browser, "#jobs [aria-current]") == "zebra-1"
    for name in ("zebra-1", "zebra-2"):
        http("DELETE", f"/v1/jobs/{name}")


def test_what_the_pointer_tells_is_there_without_one(http: Http, browser: webdriver.Chrome):
    layout = Layout.grid(dp=9, pp=1, tp=8, layers=4)
    http.register(Job(name="large", layout=layout, microbatches=9))
    browser.get(f"{http.url}#large")
    eventually(lambda: text(browser, "#facts"))
    link = browser.find_element(By.CSS_SELECTOR, '#jobs [data-job="large"]')
    browser.execute_script("arguments[0].focus()", link)
    http("POST", "/v1/jobs/large/failures", {"ranks": [1, 2, 3, 5, 8, 70], "detail": "no heart"})
    eventually(lambda: "and 2 more" in text(browser, "#facts"))
    told = text(browser, "#health li").splitlines()
    assert [line.split(",")[0].split(":")[0] for line in told] == [
        f"Rank {rank}" for rank in (1, 2, 3, 5, 8, 70)
    ]
    assert told[0].startswith("Rank 1: stopped")
    bad = '#jobs [data-job="large"] [aria-label="has slow or stopped devices"]'
    eventually(lambda: browser.find_elements(By.CSS_SELECTOR, bad))
    assert browser.switch_to.active_element == link
    assert text(browser, "#health caption") == "Slowdown of each device"
    http("DELETE", "/v1/jobs/large")


def test_the_tip_of_the_chart_stays_under_a_resting_pointer(http: Http, browser: webdriver.Chrome):
    http.register(job_of("tip"))
    for step in range(8):
        http.send("tip", batch_of(step))
    browser.get(f"{http.url}#tip")
    eventually(lambda: browser.find_elements(By.CSS_SELECTOR, "#chart path.observed"))
    chart = browser.find_element(By.ID, "chart")
    ActionChains(browser).move_to_element(chart).perform()
    tip = text(browser, "#chart .tip").split(" · ")[0]
    assert tip.startswith("step ")
    old = browser.find_element(By.CSS_SELECTOR, "#chart svg")
    http.send("tip", batch_of(8))
    eventually(lambda: browser.find_element(By.CSS_SELECTOR, "#chart svg") != old)
    assert text(browser, "#chart .tip").split(" · ")[0] == tip
    ActionChains(browser).move_to_element(browser.find_element(By.ID, "theme")).perform()
    eventually(lambda: not text(browser, "#chart .tip"))
    http("DELETE", "/v1/jobs/tip")


def test_advice_for_a_job_that_takes_on_no_plan_is_shown(http: Http, browser: webdriver.Chrome):
    http.register(job_of("told", actions=("notify",)))
    browser.get(http.url)
    for step in range(2):
        http.send("told", batch_of(step, slow=(3,)))
    eventually(lambda: "replace rank 3: steps" in text(browser, "#facts"))
    eventually(lambda: "replace rank 3: steps" in text(browser, "#log"))
    assert_clean(browser, http)


def assert_clean(browser: webdriver.Chrome, http: Http) -> None:
    """No error on the console but answers 404 for the job deleted; nothing from elsewhere."""
    severe = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert [message for message in severe if "404" not in message] == []
    urls = browser.execute_script("return performance.getEntries().map(e => e.name)")
    assert [u for u in urls if u.startswith("http") and not u.startswith(http.url)] == []


def test_a_hostile_job_name_stays_text(http: Http, browser: webdriver.Chrome):
    name = "<img src=x onerror=alert(1)>"
    answer = http("PUT", f"/v1/jobs/{name}".replace(" ", "%20"), to_json(job_of(name)))
    assert answer.status == 201, answer.data
    browser.get(http.url)
    eventually(lambda: name in text(browser, "#jobs"))
    assert browser.find_elements(By.CSS_SELECTOR, "img") == []


def test_the_theme_is_switched_and_kept(http: Http, browser: webdriver.Chrome):
    def theme() -> str:
        """Of the page once its script has run."""
        shown = "return document.documentElement.dataset.theme"
        return str(eventually(lambda: browser.execute_script(shown)))

    browser.get(http.url)
    first = theme()
    browser.find_element(By.ID, "theme").click()
    second = theme()
    assert {first, second} == {"light", "dark"}
    browser.refresh()
    assert theme() == second


def test_the_theme_is_that_of_the_system_until_one_is_chosen(http: Http, browser: webdriver.Chrome):
    def shown_in(system: str) -> str:
        media = {"features": [{"name": "prefers-color-scheme", "value": system}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        frames = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        browser.execute_async_script(frames)  # the page is told in the next
        return str(browser.execute_script("return document.documentElement.dataset.theme"))

    browser.get(http.url)
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    eventually(lambda: text(browser, "#link") != "connecting")
    try:
        assert [shown_in("dark"), shown_in("light")] == ["dark", "light"]
        browser.find_element(By.ID, "theme").click()
        assert [shown_in("dark"), shown_in("light")] == ["dark", "dark"]
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_works_where_storage_is_refused(tmp_path: Path, browser: webdriver.Chrome):
    refused = "".join(
        f"Object.defineProperty(window, '{name}', {{get() {{ throw new Error('refused'); }}}});"
        for name in ("localStorage", "sessionStorage")
    )
    with (
        running(Settings(redis_url=None, data=tmp_path / "data", token="secret")) as http,
        before_the_page(browser, refused),
    ):
        browser.get(http.url)
        eventually(lambda: "requires a token" in text(browser, "#token"))
        browser.find_element(By.NAME, "token").send_keys("secret")
        browser.find_element(By.CSS_SELECTOR, "#token button").click()
        eventually(lambda: "No job yet" in text(browser, "#empty"))


def test_events_of_another_day_have_a_date(http: Http, browser: webdriver.Chrome):
    http.register(job_of("dates"))
    browser.get(f"{http.url}#dates")
    eventually(lambda: "Registered as dates" in text(browser, "#log"))
    assert re.fullmatch(r"\d\d:\d\d:\d\d", text(browser, "#log time"))
    said = browser.find_element(By.CSS_SELECTOR, "#log time").get_attribute("title")
    assert said is not None
    assert re.search(r"\d{4}.*[A-Z]{3}", said)
    browser.execute_script(
        "const Real = Date; window.Date = class extends Real {"
        " constructor(...at) { super(...(at.length ? at : [Real.now() + 86_400_000])); } }"
    )
    eventually(lambda: re.fullmatch(r"[A-Z].* \d\d:\d\d:\d\d", text(browser, "#log time")))
    http("DELETE", "/v1/jobs/dates")


def test_a_token_is_asked_for(tmp_path: Path, browser: webdriver.Chrome):
    with running(Settings(redis_url=None, data=tmp_path / "data", token="secret")) as http:
        browser.get(http.url)
        eventually(lambda: "requires a token" in text(browser, "#token"))
        browser.find_element(By.NAME, "token").send_keys("secret")
        browser.find_element(By.CSS_SELECTOR, "#token button").click()
        eventually(lambda: "No job yet" in text(browser, "#empty"))


def test_a_job_is_shown_again_once_the_right_token_is_given(
    tmp_path: Path, browser: webdriver.Chrome
):
    with running(Settings(redis_url=None, data=tmp_path / "data", token="secret")) as http:
        bearer = {"Authorization": "Bearer secret"}
        http("PUT", "/v1/jobs/again", to_json(job_of("again")), headers=bearer)
        browser.get(http.url)
        browser.execute_script("sessionStorage.setItem('resihp-token', 'secret')")
        browser.refresh()
        eventually(lambda: text(browser, "#facts"))
        browser.execute_script("sessionStorage.setItem('resihp-token', 'wrong')")
        eventually(lambda: "requires a token" in text(browser, "#token"))
        browser.find_element(By.NAME, "token").send_keys("secret")
        browser.find_element(By.CSS_SELECTOR, "#token button").click()
        eventually(lambda: text(browser, "#facts"))


def test_what_is_unchanged_is_not_sent_again(tmp_path: Path, browser: webdriver.Chrome):
    with running(Settings(redis_url=None, data=tmp_path / "data", token="secret")) as http:
        bearer = {"Authorization": "Bearer secret"}
        http("PUT", "/v1/jobs/same", to_json(job_of("same")), headers=bearer)
        browser.get(http.url)
        browser.execute_script("sessionStorage.setItem('resihp-token', 'secret')")
        browser.refresh()
        eventually(lambda: "same" in text(browser, "#jobs"))

        def unchanged() -> bool:
            """Whether `/v1/jobs` was answered with 304."""
            lines = http("GET", "/v1/metrics", headers=bearer).data.decode().splitlines()
            parts = 'route="/v1/jobs",status="304"'
            return any("http_requests_total" in line and parts in line for line in lines)

        eventually(unchanged)


@contextlib.contextmanager
def behind_a_proxy(http: Http, prefix: str) -> Iterator[str]:
    """The address of a sidecar behind a proxy that strips `prefix`."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            inner = self.path.removeprefix(prefix)
            if inner == self.path:
                self.send_error(404)
                return
            answer = http("GET", inner, headers=dict(self.headers), preload_content=False)
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
            self.end_headers()
            with contextlib.suppress(OSError):
                while part := answer.read1():
                    self.wfile.write(part)
            answer.close()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{prefix}"
        finally:
            server.shutdown()


def test_the_pages_work_behind_a_proxy_with_a_prefix(tmp_path: Path, browser: webdriver.Chrome):
    settings = Settings(redis_url=None, data=tmp_path / "data")
    with running(settings) as http, behind_a_proxy(http, "/some/prefix") as url:
        for page in ("/", "/dashboard"):
            browser.get(url + page)
            eventually(lambda: f'url="{url}"' in text(browser, "#empty"))
        http.register(job_of("proxied"))
        eventually(lambda: "Registered as proxied" in text(browser, "#log"))
        browser.find_element(By.LINK_TEXT, "API").click()
        eventually(lambda: "/v1/jobs/{job}/telemetry" in text(browser, "#swagger-ui"))
        for part in ("opblock-summary-control", "try-out button", "execute-wrapper button"):
            selector = f'.opblock[id*="livez"] .{part}'
            eventually(lambda selector=selector: browser.find_elements(By.CSS_SELECTOR, selector))
            browser.find_element(By.CSS_SELECTOR, selector).click()
        eventually(lambda: text(browser, ".request-url"))
        assert text(browser, ".request-url") == f"Request URL\n{url}/v1/livez"
        assert [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
        browser.get("about:blank")


def test_the_api_page_works_without_the_net(http: Http, browser: webdriver.Chrome):
    browser.get(f"{http.url}/docs")
    eventually(lambda: "/v1/jobs/{job}/telemetry" in text(browser, "#swagger-ui"))
    assert_clean(browser, http)
