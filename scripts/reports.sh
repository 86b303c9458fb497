#!/usr/bin/env bash
# Makes the reports and pictures that are kept in docs/ from the run files that are kept in docs/evidence/, by `nondet`
# alone: the same run files give the same bytes. A test compares; run this where it says that something is stale.
#   scripts/reports.sh              all of them, in their places
#   scripts/reports.sh DEST         all of them, under DEST instead of docs/
#   scripts/reports.sh FROM DEST    the reports of one folder of run files, into DEST
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nondet() { "$python" -m nondet.cli "$@"; }

# What a folder's report is made of, in this order; those that are there.
report_of() {
    local from=$1 to=$2 runs=() speed=() name
    mkdir -p "$to"
    for name in diagnose trace sample sample-no-cudnn families probes; do
        if [ -f "$from/$name.jsonl" ]; then runs+=("$from/$name.jsonl"); fi
    done
    for name in "$from"/bench.jsonl "$from"/end-to-end-*.jsonl; do
        case $name in *.traces.jsonl) continue ;; esac
        if [ -f "$name" ]; then speed+=("$name"); fi
    done
    if [ ${#runs[@]} -gt 0 ]; then nondet report "${runs[@]}" --quiet --force --out "$to/report.html" --out "$to/report.md"; fi
    if [ ${#speed[@]} -gt 1 ]; then nondet report "${speed[@]}" --quiet --force --out "$to/speed.html" --out "$to/speed.md"; fi
}

if [ $# -eq 2 ]; then
    report_of "$1" "$2"
    exit
fi
to=${1:-docs}
for folder in docs/evidence/cpu docs/evidence/cpu-xeon docs/evidence/h200 docs/evidence/servers/*/; do
    folder=${folder%/}
    report_of "$folder" "$to/${folder#docs/}"
done
nondet export docs/evidence/h200/matmul-12288x4096.jsonl --figure class-map --out "$to/class-map.png" --force 2> /dev/null
nondet export docs/evidence/h200/bench.jsonl --figure jigsaw --section linear --out "$to/speed-matmul.png" --force 2> /dev/null
