"""Runs to one HTML page: self-contained, nothing fetched, readable without its script.

Three walls keep untrusted text (completions, prompts, kernel and file names) from acting: Jinja's autoescape,
`printable` on everything that is printed, and a content security policy that allows one style sheet and one script, by
their hashes, images that this script makes (`blob:`), and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from nondet.core.records import Run
from nondet.errors import printable
from nondet.reports import classes, document, plots
from nondet.reports import text as figures
from nondet.reports.content import build
from nondet.reports.first_screen import FirstScreen
from nondet.verdict.findings import plural

# Numbers, dates, options and servers, which no line may break: "1.2e-04", "--turns", "server-2".
_WHOLE = re.compile(r"\d[\d.]*e-\d+|\d+-\d\d-\d\dT|--\w[\w-]*|server-\d+")


def unbroken(text: str) -> Markup:
    """The text, escaped, in which these stay whole."""
    return Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', str(escape(printable(text)))))  # noqa: S704 - escaped


_TEMPLATES = Path(__file__).resolve().parent / "templates"


def render(runs: list[Run]) -> str:
    """The page. Raises UserError: a sampled run's side file is missing or malformed."""
    report = build(runs)
    parts = [list(document.shown(blocks, document.PAGE)) for blocks in report.blocks]
    return render_page("report.html.j2", report=report, screen=FirstScreen(report), parts=parts)


def render_page(template: str, **values: Any) -> str:
    """A page of a template with the common style; the script is included where the template uses it."""
    for name, file in (("style", "style.css"), ("script", "page.js")):
        text = (_TEMPLATES / file).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        values |= {name: Markup(text), f"{name}_hash": Markup(f"sha256-{digest}")}  # noqa: S704 - our own file, base64
    return _environment().get_template(template).render(**values)


@functools.cache  # with its compiled templates
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    environment.globals.update(kinds=classes.KINDS)
    named = (
        document.bits, document.plain, figures.apart_text, classes.classes,
        classes.kind_of, classes.letter, classes.map_figures, classes.short_kernel, figures.counted,
        figures.extras, figures.run_rate, figures.sentence, figures.shape_text, plural, plots.hue,
        classes.span_path, plots.tint, unbroken,
    )  # fmt: skip
    environment.filters.update({function.__name__: function for function in named})
    environment.filters.update(shown=lambda blocks: document.shown(blocks, document.PAGE))
    environment.filters.update(kind=lambda block: type(block).__name__.lower())
    return environment
