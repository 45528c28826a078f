"""What people look at, from a results dictionary alone: `table`, `figure`, `page`, `markdown`; `write` them all.

groups.py    runs that differ by their seed only become one group: curve, final accuracy, bytes, seconds
finals.py    the final table: accuracy, the best rule, leads over the baseline, under the same conditions only
panels.py    which curves share a panel and in what frame; marks.py: their colours and dashes
plot.py      the paper's figure, with matplotlib
webpage.py   the page: one HTML file, no library, works offline (page.html, page.css, page.js go into it)
trust.py     the part of the page that shows who is believed, and why
markdown.py  the final table for a README; terminal.py: for a terminal
"""

from pathlib import Path

from signvote.atomic import write_atomically
from signvote.report.finals import BASELINE, table
from signvote.report.markdown import markdown
from signvote.report.plot import figure
from signvote.report.webpage import page
from signvote.results import Results, current, results_file, to_csv
from signvote.results import write as write_results

__all__ = ["figure", "markdown", "page", "table", "write"]


def write(results: Results, out: Path, baseline: str = BASELINE) -> None:
    """Write results.json, .csv and .md, figure.png, figure.svg and report.html into a folder that exists.

    A folder that holds results.json.gz keeps that form.
    """
    results = current(results)
    write_results(results_file(out), results)
    write_atomically(out / "results.csv", to_csv(results).encode())
    write_atomically(out / "results.md", markdown(results).encode())
    figure(results, out / "figure.png")
    figure(results, out / "figure.svg")
    write_atomically(out / "report.html", page(results, baseline).encode())
