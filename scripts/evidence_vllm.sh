#!/usr/bin/env bash
# vLLM, its own batch-invariant mode, and nondet's plugin, one after the other on one GPU: traces as solo under load, and
# tokens a second. Needs vLLM 0.25.1 and nondet in PYTHON's environment. One file a mode and model under OUT.
# usage: OUT=FOLDER [PYTHON=python3] [MODELS="0.6b 8b"] [REPEATS=5] scripts/evidence_vllm.sh
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder for the results: OUT=FOLDER}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
"$PYTHON" -c "import vllm, nondet" || { echo "vLLM 0.25.1 and nondet have to be installed in $PYTHON's environment" >&2; exit 2; }
one() { # NAME OPTIONS...: a result that is there is kept
    local name=$1
    shift
    [ -f "$OUT/$name.json" ] && return
    echo "== $name"
    NONDET_COVERAGE=$OUT/coverage-$name-$$.jsonl "$PYTHON" scripts/vllm_load.py "$@" --out "$OUT/$name.part" > "$OUT/$name.log" 2>&1 \
        || { echo "failed, see $OUT/$name.log" >&2; return; }
    mv "$OUT/$name.part" "$OUT/$name.json"
}
for mode in stock own nondet; do
    one "embedded-$mode" --mode "$mode" --model nondet/embedded --prefix-cache
    for model in ${MODELS:-0.6b 8b}; do
        one "$model-$mode" --mode "$mode" --model "$model" --cache-gib 48 --speed --long 1x12000 --long 16x4000 --repeats "${REPEATS:-5}"
    done
done
for again in 2 3; do # fresh processes, and nothing that was tuned is shared
    VLLM_CACHE_ROOT=$(mktemp -d) TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) one "0.6b-nondet-$again" --mode nondet --model 0.6b --cache-gib 48
done
"$PYTHON" - "$OUT" <<'P'
import json, pathlib, sys

for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    seen = json.loads(path.read_text())
    traces = {name: f"{one['traces_as_alone']} of {one['copies']}, {one['distinct_traces']} distinct" for name, one in seen["load"].items()}
    digests = {name: one["digest"] for name, one in seen["solo"].items()}
    print(path.stem, traces, digests, {n: one["tokens_per_s"] for n, one in seen.get("speed", {}).items()}, seen.get("long", ""))
P
