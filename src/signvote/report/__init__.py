"""Figures, pages and tables from a results dictionary: `table`, `figure`, `page`, `markdown`; `write` writes all.

experiments.py  an experiment is all runs that differ in their seed only: curve, final accuracy, bytes, seconds
measures.py     a metric by round; mean, spread and band of several seeds
labels.py       settings in words
finals.py       the final table: accuracy, the best rule, leads over the baseline under the same conditions
panels.py       which curves share a panel, and its range
marks.py        the colors and dashes of curves
plot.py         the paper's figure, with matplotlib
bybytes.py      the same by bytes sent
webpage.py      the page: one HTML file, no library, works offline (it includes page.html, page.css, page.js)
webtables.py    the tables of the page; markup.py: their rows and cells
trust.py        the part of the page that shows the weights of the workers
live.py         the page of runs that are still going, served on this machine (with live.js, waiting.html)
notices.py      what was noticed about the workers, for page and table
markdown.py     the final table for a README
terminal.py     the final table in a terminal
"""

from pathlib import Path

from signvote.atomic import write_atomically
from signvote.report import bybytes
from signvote.report.finals import BASELINE, table
from signvote.report.markdown import markdown
from signvote.report.plot import figure
from signvote.report.webpage import page
from signvote.results import Results, current, results_file, to_csv
from signvote.results import write as write_results

__all__ = ["figure", "markdown", "page", "table", "write", "write_views"]


def write(results: Results, out: Path | str, baseline: str = BASELINE) -> None:
    """Write results.json, .csv and .md, figure.png and .svg and report.html into an existing folder.

    A folder that holds results.json.gz keeps that form. If some rules sent clearly fewer bytes than others, as votes do
    beside float32, there are also bytes.png and .svg: the metric by bytes sent.
    """
    out = Path(out)
    results = current(results)
    to_csv(results)  # raises before anything is written
    write_results(results_file(out), results)
    write_views(results, out, baseline)


def write_views(results: Results, out: Path | str, baseline: str = BASELINE) -> None:
    """Write all of that but results.json."""
    out = Path(out)
    csv = to_csv(results)
    write_atomically(out / "results.csv", csv.encode())
    write_atomically(out / "results.md", markdown(results).encode())
    figure(results, out / "figure.png")
    figure(results, out / "figure.svg")
    if bybytes.differ(results):
        bybytes.figure(results, out / "bytes.png")
        bybytes.figure(results, out / "bytes.svg")
    html = page(results, baseline)
    write_atomically(out / "report.html", html.encode())
