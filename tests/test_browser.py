"""The page of a report works in a real browser, without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
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


def tried_in_a_browser(results: Results, folder: Path) -> dict[str, Any]:
    assert BROWSER is not None
    text = page(results).replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{TRY}</body>", 1)
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
