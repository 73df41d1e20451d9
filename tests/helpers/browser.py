"""Opens a page in headless Chromium and asks it questions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

CATCH = """<script>
window.found = [];
addEventListener("error", (e) => found.push(String(e.message)));
addEventListener("securitypolicyviolation", (e) => found.push("refused " + e.blockedURI));
</script>"""
ANSWER = """<script>
// What a reader may do to the charts of a task, and what one of them shows then.
const ask = (chart) => {
  const section = chart.closest("section"), box = chart.getBoundingClientRect();
  const key = section.querySelector("button.key");
  const press = (name) => section.querySelector(`[data-do="${name}"]`).click();
  const at = (share) => ({ clientX: box.left + box.width * share, clientY: box.top + 20 });
  const point = (kind, share) => chart.dispatchEvent(new PointerEvent(kind, at(share)));
  const now = () => ({
    curves: [...chart.querySelectorAll("path.curve")].map((p) => p.getAttribute("d")),
    texts: [...chart.querySelectorAll("text")].map((t) => t.textContent),
    shown: !section.querySelector('[data-do="whole"]').hidden,
  });
  const after = (...steps) => { steps.forEach((step) => step()); return now(); };
  const drag = [["pointerdown", 0.4], ["pointermove", 0.6], ["pointerup", 0.6]];
  const zoom = () => drag.forEach(([kind, share]) => point(kind, share));
  return {
    first: now(),
    hidden: after(() => key.click()),
    back: after(() => key.click()),
    time: after(() => press("time")),
    timeTip: after(() => point("pointermove", 0.5)) && document.getElementById("tip").textContent,
    logY: after(() => press("step"), () => press("logY")),
    logX: after(() => press("logY"), () => press("logX")),
    zoomed: after(() => press("logX"), zoom),
    whole: after(() => press("whole")),
    twice: after(zoom, () => chart.dispatchEvent(new MouseEvent("dblclick"))),
  };
};
addEventListener("load", () => {
  const page = document.documentElement;
  // What may scroll by itself, and what it holds, does not widen the page.
  const wide = [...document.body.querySelectorAll("*")].filter((e) =>
    !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1);
  const charts = [...document.querySelectorAll("svg.chart")].filter((e) => e.clientWidth > 0);
  for (const chart of charts.slice(0, 3)) {
    const box = chart.getBoundingClientRect();
    const place = { clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true };
    chart.dispatchEvent(new PointerEvent("pointermove", place));
  }
  const answer = {
    errors: found, width: innerWidth, overflow: page.scrollWidth - innerWidth,
    wide: wide.map((e) => e.tagName + "." + e.className),
    charts: charts.length,
    curves: charts.reduce((n, c) => n + c.querySelectorAll("path.curve").length, 0),
    lengths: charts.flatMap((c) => [...c.querySelectorAll("path.curve")]).map(
      (p) => p.getTotalLength()),
    tip: document.getElementById("tip").textContent,
    background: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
  };
  answer.asked = charts.length ? ask(charts[charts.length - 1]) : null;
  parent.postMessage(JSON.stringify(answer), "*");
});
</script>"""


FRAME = """<!doctype html><script>
addEventListener("message", (e) => { document.documentElement.dataset.answer = e.data; });
</script><iframe src="%s" style="border:0;width:%dpx;height:900px"></iframe>"""
"""A window cannot be as narrow as a phone, a frame can."""


def find_browser() -> str:
    """The path of Chromium; skips the test where there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip("no Chromium on this machine")


def ask_browser(page: Path, folder: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    """Return what the page looks like to a browser of this width."""
    text = page.read_text(encoding="utf-8")
    probed = folder / f"probed-{width}-{dark}.html"
    text = text.replace("<head>", f"<head>{CATCH}", 1)
    probed.write_text(text.replace("</body>", f"{ANSWER}</body>", 1), encoding="utf-8")
    frame = folder / f"frame-{width}-{dark}.html"
    frame.write_text(FRAME % (probed.name, width), encoding="utf-8")
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1300,1000"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, frame.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.search(r'data-answer="([^"]*)"', done.stdout)
    assert found is not None, "the page's script did not run to its end"
    answer: dict[str, Any] = json.loads(unescape(found.group(1)))
    return answer
