#!/usr/bin/env bash
# Makes the run files and reports that the README's figures are read from, in the folder given. Needs an environment in
# which `python3 -m nondet.cli` runs: the one that scripts/quickstart.sh makes, or a machine's own PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/evidence.sh FOLDER}
python=${PYTHON:-python3}
nondet() { "$python" -m nondet.cli "$@"; }
mkdir -p "$out"

nondet probe all --out "$out/probes.jsonl" --force > /dev/null
nondet sample --n 1000 --impl both --out "$out/sample.jsonl" --force > /dev/null
# one family of operators replaced at a time, under one load: which one is guilty?
nondet sample --n 120 --impl both --impl invariant:attention --impl invariant:matmul --impl invariant:norm \
    --out "$out/families.jsonl" --force > /dev/null
nondet report "$out/probes.jsonl" "$out/sample.jsonl" "$out/families.jsonl" \
    --out "$out/report.html" --out "$out/report.md" --force
