#!/usr/bin/env bash
# Makes the reports and pictures that are kept in docs/ from the run files that are kept in docs/evidence/, by `nondet`
# alone: the same run files give the same bytes. A test compares; run this where it says that something is stale.
#   scripts/reports.sh              all of them, in their places
#   scripts/reports.sh DEST         all of them, under DEST instead of docs/
#   scripts/reports.sh FROM DEST    the reports of one folder of run files, into DEST
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
commands=$(mktemp)
trap 'rm -f "$commands"' EXIT

# A command is noted down; `run_noted` runs them all in one process, which loads torch and matplotlib once.
nondet() { (IFS=$'\t' && printf '%s\n' "$*" >> "$commands"); }
run_noted() {
    "$python" - "$commands" << 'NOTED'
import contextlib, io, sys
from nondet.cli import main
for line in open(sys.argv[1], encoding="utf-8"):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(line.rstrip("\n").split("\t"))
    if code:
        sys.exit(f"{said.getvalue()}nondet {' '.join(line.split())}: exit code {code}")
NOTED
}

# The run file of that name in that folder, plain or packed, if it is there.
there() { ls "$1/$2.jsonl" "$1/$2.jsonl.gz" "$1/$2.jsonl.xz" 2> /dev/null || true; }

# What a folder's report is made of, in this order; those that are there.
report_of() {
    local from=$1 to=$2 runs=() speed=() axes=() name run
    mkdir -p "$to"
    for name in diagnose trace sample sample-no-cudnn families probes; do
        runs+=($(there "$from" "$name"))
    done
    for name in "$from"/bench.jsonl* "$from"/engine-*.jsonl*; do
        case $name in *.traces.jsonl*) continue ;; esac
        if [ -f "$name" ]; then speed+=("$name"); fi
    done
    case $from in */h100) runs=() ;; esac # its probes are the H200's again: the run file alone is kept
    if [ ${#runs[@]} -gt 0 ]; then nondet report "${runs[@]}" --quiet --force --out "$to/report.html" --out "$to/report.md"; fi
    for name in "$from"/axes*.jsonl*; do
        case $name in *.traces.jsonl*) continue ;; esac
        if [ -f "$name" ]; then axes+=("$name"); fi
    done
    if [ ${#axes[@]} -gt 0 ]; then nondet report "${axes[@]}" --quiet --force --out "$to/axes.html" --out "$to/axes.md"; fi
    for name in seeds compare rl; do
        case $from in */h200) continue ;; esac # its ten seeds are ten tables: the run file alone is kept
        for run in $(there "$from" "$name"); do nondet report "$run" --quiet --force --out "$to/$name.md"; done
    done
    if [ ${#speed[@]} -gt 0 ]; then nondet report "${speed[@]}" --full --quiet --force --out "$to/speed.html" --out "$to/speed.md"; fi
}

if [ $# -eq 2 ]; then
    report_of "$1" "$2"
    run_noted
    exit
fi
to=${1:-docs}
for folder in docs/evidence/cpu docs/evidence/cpu-xeon docs/evidence/h100 docs/evidence/h200 docs/evidence/servers/*/; do
    folder=${folder%/}
    report_of "$folder" "$to/${folder#docs/}"
done
nondet report docs/evidence/h200/matmul-12288x4096.jsonl.gz --figure class-map --out "$to/class-map.png" --force
nondet report docs/evidence/h200/bench.jsonl.gz --figure jigsaw --section linear --out "$to/speed-matmul.png" --force
nondet report docs/evidence/h200/sample.jsonl.gz --figure tree --out "$to/tree-light.svg" --force
nondet report docs/evidence/cpu/probe-map.jsonl.gz --figure map --out "$to/map.png" --force
nondet report docs/evidence/cpu/rl.jsonl.gz --figure training --out "$to/training.svg" --force

# A class map for the page of each probe: of the run that the page links, and of the case below, or of those that differ.
mkdir -p "$to/probes"
cases=$(cat << 'CASES'
float-sum|orders of 1024 numbers, accumulated in float32, bell
matmul|16 rows in batches of M, K=3072 N=1024, bell
split-k|K in 1 to 16 parts added in order, M=16 K=12288 N=1024, bell
grouped-matmul|expert 0 while others go to other experts, of 128, K=768 N=2048, order
attention|decode of 64 requests in batches of B, 2048 keys, Hq=32 Hkv=8 D=128, order
rms-norm|rms_norm: 32 rows in batches of M, H=4096, bell
softmax|softmax: 32 rows in batches of M, V=1000, bell
log-softmax|log_softmax: 32 rows in batches of M, V=1000, bell
logsumexp|logsumexp: 16 rows in batches of M, V=151936, bell
cumsum|cumsum: 64 rows in batches of M, V=1000, order
scaled-matmul|16 rows in batches of M, a scale for each row, into float32, K=1024 N=256, order-wide
reduction-order|linear: the order in which row 0 of M is added, K=1000 N=64, order
reduction|sum: 32 rows in batches of M, K=4096, order
atomics|index_add: 8192 additions to 16 rows
backward|linear_weight: 16 sequences in micro-batches, bell
all-reduce|all_reduce: first row over M, ranks=4, width=512
pointwise|silu of 1024 elements
CASES
)
for picture in docs/probes/*.png; do
    probe=$(basename "$picture" .png)
    page=$(ls "docs/probes/$probe.md" 2> /dev/null || echo docs/probes/rows.md)
    run=$(sed -n "/^##* $probe\$/,\$ { /(\.\.\/evidence\/[^)]*gz)/ { s|.*(\.\./\(evidence/[^)]*gz\)).*|\1|p; q } }" "$page")
    nondet report "docs/$run" --figure class-map --probe "$probe" --case "$(sed -n "s/^$probe|//p" <<< "$cases")" \
        --out "$to/probes/$probe.png" --force
done
run_noted

# The README's picture for light pages and for dark ones: the same drawing in the other colours of the page's style.
"$python" - reports/templates/style.css "$to" << 'COLOURS'
import re, sys
from pathlib import Path

halves = Path(sys.argv[1]).read_text().split("@media (prefers-color-scheme: dark)", 1)
light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", half)) for half in halves)
picture = Path(sys.argv[2], "tree-light.svg").read_text().replace("#ffffff", "#0d1117").replace("#555555", dark["soft"])
for name, colour in light.items():
    picture = picture.replace(colour, dark[name])
Path(sys.argv[2], "tree-dark.svg").write_text(picture)
COLOURS
