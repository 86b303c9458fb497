#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, types, tests, speed, size. Sets its own environment up.
# As the first word, --quick: in under a minute, what the change since the last commit can touch (or the last commit did).
# --all: the tests marked `nightly` as well, which take longer than all others together.
source "$(dirname "$0")/environment.sh"
bin="$VENV/bin"

if [ "${1:-}" = --quick ]; then
    shift
    [ -x "$bin/pytest" ] || install "[dev]"
    "$bin/ruff" check -q .
    mapfile -t near < <("$bin/python" scripts/house.py --near)
    [ ${#near[@]} -gt 0 ] || exit 0
    # nearest first, until the time is over: tests/conftest.py skips what is left, and pytest counts it
    export NONDET_QUICK=35
    exec "$bin/pytest" -q -n 2 --dist loadfile --no-loadscope-reorder "${near[@]}" "$@"
fi
if [ "${1:-}" = --all ]; then
    shift
    export NONDET_ALL_TESTS=1 # read by tests/conftest.py
fi
install "[dev]"
unset PYTHONDONTWRITEBYTECODE # what one process compiled, the dozens that tests start load
export CI="${CI:-1}" # what a test needs and lacks is then a failure, not a skip

"$bin/ruff" check .
"$bin/ruff" format --check .
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
"$bin/mypy" > "$new/mypy" 2>&1 & # while the tests run
mypy=$!
# A worker a core, four at most. Each begins with its part of the tests in their order, so that what the tests of a file
# share is made once; who is through first takes from another's end.
"$bin/pytest" -n auto --maxprocesses 4 --dist worksteal "$@"
wait $mypy || { cat "$new/mypy"; exit 1; }

# Is an operator many times slower beside stock than it was? Ratios within this run, of CPU time, against a kept run; on a
# CPU with other vector instructions than the kept run's its bits are asked alone. What it says is on stderr.
"$bin/nondet" bench linear softmax rms-norm attention --device cpu --threads 1 --clock cpu --m 1 --m 16 --k 256 --n 1024 \
    --check docs/evidence/cpu-xeon/ci.jsonl --slower 4 --out "$new/ci.jsonl" > /dev/null &
kernels=$! # on one core, by its CPU time, while the other core runs the next
# And what a call costs the host, stock beside inside of batch_invariant(): a plan that is made anew at every call shows.
"$bin/python" scripts/host.py --device cpu --threads 1 \
    --check docs/evidence/cpu-xeon/host.jsonl --slower 3 --out "$new/host.jsonl"
wait $kernels
"$bin/python" scripts/house.py # lines by package, and their budget
