#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, types, tests. Sets its own environment up.
source "$(dirname "$0")/environment.sh"
install "[dev]"
bin="$VENV/bin"
export CI="${CI:-1}" # what a test needs and lacks is then a failure, not a skip

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
# Each worker begins with one half of the tests in their order, so that what the tests of a file share is made once; who
# is through first takes from the other's end.
exec "$bin/pytest" -n 2 --dist worksteal "$@"
