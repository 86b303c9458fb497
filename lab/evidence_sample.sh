#!/usr/bin/env bash
# How soon `nondet sample` answers: its default command with the seconds of each line, the same load in steps launched one
# by one (two rounds), whether what was recorded in graphs can be replayed and traced, and what a step's host does, cuDNN's
# plans on a thread that has met the shapes and on one that has not. A part that is there is kept; ONLY names one.
# usage: OUT=FOLDER [PYTHON=python3] [N="--n 80"] [ONLY=PART] lab/evidence_sample.sh
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder for the results: OUT=FOLDER}
PYTHON=${PYTHON:-python3}
failed=0
mkdir -p "$OUT"
stamped() { # NAME LIMIT COMMAND...: with the second at which each line came
    local name=$1 limit=$2
    shift 2
    [ -f "$OUT/$name.txt" ] || [ "${ONLY:-$name}" != "$name" ] && return
    echo "== $name"
    SECONDS=0
    timeout "$limit" "$@" 2>&1 | while IFS= read -r line; do printf '%4d s  %s\n' "$SECONDS" "$line"; done | tee "$OUT/$name.part" || failed=1
    printf '%4d s  in all\n' "$SECONDS" | tee -a "$OUT/$name.part"
    [ $failed = 1 ] || mv "$OUT/$name.part" "$OUT/$name.txt"
}
# shellcheck disable=SC2086 # options are words of their own
stamped default 200 "$PYTHON" -u -m nondet sample ${N:-} --out "$OUT/default.jsonl" --force
# shellcheck disable=SC2086
stamped apart 100 "$PYTHON" -u -m nondet sample ${N:---n 80} --no-cuda-graphs --out "$OUT/apart.jsonl" --force
# shellcheck disable=SC2086
stamped chain 60 "$PYTHON" -u -m nondet sample ${N:---n 80} --impl stock --out "$OUT/chain.jsonl" --force
stamped replay 60 "$PYTHON" -u -m nondet trace --replay --run "$OUT/chain.jsonl" --request divergent --most 8 --out "$OUT/replay.jsonl" --force
# the two requests that the sample's last lines name, without the run file's line break
two=$(tr -d '\n' < "$OUT/chain.txt" 2> /dev/null | grep -o -- '--request *\([0-9]* s *\)\?t[0-9]\{6\}' | grep -o 't[0-9]\{6\}' | sed 's/^/--request /' | tr '\n' ' ' || true)
# shellcheck disable=SC2086
stamped trace 100 "$PYTHON" -u -m nondet trace --run "$OUT/chain.jsonl" $two --out "$OUT/trace.jsonl" --force
stamped profile 100 "$PYTHON" -u lab/profile_sampling_gpu.py stock embedded default 64
stamped profile-graphs 60 "$PYTHON" -u lab/profile_sampling_gpu.py stock embedded default,graphs=on 64
exit $failed
