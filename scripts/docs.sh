#!/usr/bin/env bash
# Builds the documentation site into site/, in an environment of its own beside the tests'. A broken link is an error.
source "$(dirname "$0")/environment.sh"
DOCS_VENV=${NONDET_DOCS_VENV:-.venv-docs}
if [ ! -x "$DOCS_VENV/bin/mkdocs" ]; then
    "$PYTHON" -m venv "$DOCS_VENV"
    "$DOCS_VENV/bin/python" -m pip install -q -c constraints.txt mkdocs-material mkdocstrings-python 2> >(grep -v "^WARNING" >&2)
fi
exec env NO_MKDOCS_2_WARNING=1 "$DOCS_VENV/bin/mkdocs" build --strict --quiet "$@"
