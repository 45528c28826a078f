"""What people look at, from a results dictionary alone: `table`, `figure`, `page`.

groups.py    runs that differ by their seed only become one group: curve, final accuracy, bytes, seconds
plot.py      the paper's figure, with matplotlib
webpage.py   the page: one HTML file, no library, works offline (page.html, page.css, page.js go into it)
trust.py     the part of the page that shows who is believed, and why
"""

from signvote.report.groups import table
from signvote.report.plot import figure
from signvote.report.webpage import page

__all__ = ["figure", "page", "table"]
