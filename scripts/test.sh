#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, types, tests, speed. Sets its own environment up.
source "$(dirname "$0")/environment.sh"
install "[dev]"
bin="$VENV/bin"
export CI="${CI:-1}" # what a test needs and lacks is then a failure, not a skip

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
# Each worker begins with one half of the tests in their order, so that what the tests of a file share is made once; who
# is through first takes from the other's end.
"$bin/pytest" -n 2 --dist worksteal "$@"

# Is an operator many times slower beside stock than it was? Ratios within this run, of CPU time, against a kept run; on a
# CPU with other vector instructions than the kept run's its bits are asked alone. What it says is on stderr.
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
"$bin/nondet" bench linear softmax rms-norm attention --device cpu --threads 1 --clock cpu --m 1 --m 16 --k 256 --n 1024 \
    --check docs/evidence/cpu-xeon/ci.jsonl --slower 4 --out "$new/ci.jsonl" > /dev/null
