"""The pictures of the README: the dashboard of a job with a slow rank, light and dark.

    python -m benchmarks.screenshots [--out docs/images]

Starts a sidecar, feeds it a synthetic job of 16 ranks one of which becomes slow, waits for the
plan, and takes the pictures with a headless Chromium (`chromium` and `chromedriver` on the PATH).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from resihp.client import Client
from resihp.contracts import Cause, Job, Layout, ModelShape, Status
from resihp.contracts.codec import WireFormat, encode
from resihp.testing.scenarios import Fault, steps_of
from service.launch import Sidecar

SLOW_RANK, SLOW_AT, STEPS = 6, 18, 44
SIZE = (1440, 1190)
_COLOURS = 128
_LIMIT_S = 60.0


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out: Path = parser.parse_args().out
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Sidecar(Path(folder) / "data") as sidecar:
        feed(Client(sidecar.url))
        for theme in ("light", "dark"):
            take(sidecar.url, theme, Path(folder), out / f"dashboard-{theme}.png")


def feed(client: Client) -> None:
    """Send the records of a job until its slow rank is named, also as the cause of lost time, and a
    plan is there."""
    job = Job(
        name="llama-7b",
        layout=Layout.grid(dp=2, pp=4, tp=2, layers=32, units=8),
        microbatches=16,
        model=ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=11008, vocab=32000),
        tokens_per_microbatch=4096,
    )
    client.register(job)
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 4096).astype(np.int64) + 1
    fault = Fault(rank=SLOW_RANK, factor=1.7, from_step=SLOW_AT)
    for batch in steps_of(job, lengths, steps=STEPS, seed=0, faults=[fault]):
        client.send_telemetry(job.name, encode(batch, WireFormat.MSGPACK), WireFormat.MSGPACK)
        time.sleep(0.1)
    deadline = time.monotonic() + _LIMIT_S
    while not (_named(client, job.name) and client.plan(job.name)):
        if time.monotonic() > deadline:
            sys.exit("no rank was named, or no plan came")
        time.sleep(0.2)


def _named(client: Client, job: str) -> bool:
    is_named = any(verdict.status is Status.FAIL_SLOW for verdict in client.verdicts(job))
    return is_named and client.diagnosis(job).root_cause is Cause.DEVICE


def take(url: str, theme: str, folder: Path, path: Path) -> None:
    """One picture of the dashboard with few enough colours to be small."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", "disable-sync"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={folder / theme}")
    options.add_argument(f"--window-size={SIZE[0]},{SIZE[1]}")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    try:
        browser.get(url)
        browser.execute_script("localStorage.setItem('resihp-theme', arguments[0])", theme)
        browser.get(url)
        deadline = time.monotonic() + _LIMIT_S
        while not browser.find_elements("css selector", f'.fail_slow[data-rank="{SLOW_RANK}"]'):
            if time.monotonic() > deadline:
                sys.exit("the dashboard does not show the slow rank")
            time.sleep(0.1)
        time.sleep(1.0)  # the chart is drawn after the panels
        browser.save_screenshot(str(path))
    finally:
        browser.quit()
    Image.open(path).convert("RGB").quantize(_COLOURS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
