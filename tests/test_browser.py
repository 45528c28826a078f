"""The page of a report works in a real browser, without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from signvote.report import page
from signvote.report.experiments import experiments_of
from signvote.results import Results
from tests.test_report import SHAPES

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OFFLINE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WATCH = """<script>
const errors = [];
window.addEventListener("error", (event) => errors.push(event.message));
window.addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
const complain = console.error; console.error = (...all) => { errors.push(all.join(" ")); complain(...all); };
</script>"""
TRY = """<script>
const seen = {};
const one = (selector) => document.querySelector(selector);
const curves = () => [...document.querySelectorAll("svg.plot g[data-series]")];
const visible = () => curves().filter((curve) => getComputedStyle(curve).display !== "none").length;
try {
  seen.curves = curves().filter((curve) => curve.querySelector("polyline").getAttribute("points")).length;
  seen.buttons = document.querySelectorAll(".legend button[data-series]").length;
  const button = one(".legend button[data-series]"), id = button.dataset.series;
  button.click();
  seen.pressed = button.getAttribute("aria-pressed");
  seen.hidden = getComputedStyle(one(`g[data-series="${id}"]`)).display;
  seen.others = visible();
  button.click();
  seen.back = visible();
  const box = one("svg.plot").getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.6, clientY: box.top + 80 };
  one("svg.plot").dispatchEvent(new PointerEvent("pointermove", at));
  seen.tip = one(".tip").textContent;
  seen.readable = one(".tip").getBoundingClientRect().width > 50;
  one('.switch button[data-metric="loss"]').click();
  seen.axis = one("svg.plot").textContent.includes("log scale");
  seen.drawn = curves().length;
  seen.nonsense = /\\bNaN\\b|\\bnan\\b|undefined/.test(one("main").innerHTML);
} catch (error) { errors.push(String(error)); }
const outcome = document.createElement("pre");
outcome.id = "outcome";
outcome.textContent = JSON.stringify({ ...seen, errors });
document.body.append(outcome);
</script>"""


TAP = """<script>
const seen = {};
const tap = (target, at = {}) => {
  for (const kind of ["pointerdown", "pointerup", "pointerleave"]) {
    target.dispatchEvent(new PointerEvent(kind, { ...at, pointerType: "touch", bubbles: kind !== "pointerleave" }));
  }
};
try {
  seen.width = window.innerWidth;
  seen.fits = document.documentElement.scrollWidth <= window.innerWidth;
  const finals = document.querySelector(".finals").closest(".scroll");
  seen.finals = finals.scrollWidth <= finals.clientWidth;
  seen.scrolls = [...document.querySelectorAll("table")].every((table) => table.closest(".scroll"));
  const shaded = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth);
  seen.shaded = shaded.length > 0 && shaded.every((box) => getComputedStyle(box).backgroundImage.includes("gradient"));
  const plot = document.querySelector("svg.plot"), box = plot.getBoundingClientRect();
  tap(plot, { clientX: box.left + box.width * 0.6, clientY: box.top + 80 });
  const tip = document.querySelector(".tip"), edge = tip.getBoundingClientRect();
  seen.tip = !tip.hidden && edge.left >= 0 && edge.right <= window.innerWidth;
  tap(document.querySelector("h1"));
  seen.gone = tip.hidden;
  const rect = document.querySelector(".strips rect");
  tap(rect);
  seen.told = rect.closest("article").querySelector(".told").textContent === rect.querySelector("title").textContent;
} catch (error) { errors.push(String(error)); }
const outcome = document.createElement("pre");
outcome.id = "outcome";
outcome.textContent = JSON.stringify({ ...seen, errors });
document.body.append(outcome);
</script>"""


PHONE = """<!doctype html>
<iframe style="width: 400px; height: 2200px; border: 0" srcdoc="{}"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => document.body.append(frame.contentDocument.querySelector("#outcome")));
</script>"""  # a window of a browser cannot be that narrow


def tried_in_a_browser(results: Results, folder: Path, script: str = TRY, frame: str = "") -> dict[str, Any]:
    assert BROWSER is not None
    text = page(results).replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{script}</body>", 1)
    text = frame.replace("{}", escape(text)) if frame else text
    (folder / "report.html").write_text(text, encoding="utf-8")
    command = [BROWSER, *OFFLINE, f"--user-data-dir={folder / 'profile'}", "--window-size=1200,2200",
               "--virtual-time-budget=2000", "--dump-dom", (folder / "report.html").as_uri()]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    outcome = re.search(r'<pre id="outcome">(.*?)</pre>', run.stdout, re.S)
    assert outcome is not None, run.stderr
    found: dict[str, Any] = json.loads(unescape(outcome[1]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine")
@pytest.mark.parametrize("name", SHAPES)
def test_the_page_works_in_a_browser(name: str, tmp_path: Path) -> None:
    series = len(experiments_of(SHAPES[name]))
    seen = tried_in_a_browser(SHAPES[name], tmp_path)
    assert seen.pop("errors") == []
    assert "round " in seen.pop("tip")
    assert seen == {
        "curves": series, "buttons": series, "nonsense": False, "pressed": "false", "hidden": "none",
        "others": series - 1, "back": series, "axis": True, "drawn": series, "readable": True,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine")
@pytest.mark.parametrize("name", ["three seeds, four modes", "attack, recipe, split"])
def test_the_page_is_complete_on_a_phone(name: str, tmp_path: Path) -> None:
    """Nothing is wider than 400 pixels but tables, which show that they scroll; a tap does what a mouse does.

    The table of final values does not even scroll, unless runs differ in more than the rule and the batches.
    """
    seen = tried_in_a_browser(SHAPES[name], tmp_path, TAP, PHONE)
    assert seen.pop("finals") or name == "attack, recipe, split"
    assert (seen.pop("width"), seen.pop("errors")) == (400, [])
    assert seen == dict.fromkeys(("fits", "scrolls", "shaded", "tip", "gone", "told"), True)
