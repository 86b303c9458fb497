#!/usr/bin/env bash
# vLLM, its own batch-invariant mode, and nondet's plugin, one after the other on one GPU: where a start's seconds go,
# traces as solo under load, the same bits in fresh processes, and tokens a second. Needs vLLM 0.25.1 and nondet in PYTHON's
# environment. One file a mode and model under OUT; what is there is kept. ONLY=starts stops after the starts.
# usage: OUT=FOLDER [PYTHON=python3] [ONLY=starts] [MODELS="0.6b 8b"] [REPEATS=5] [GIB=48] scripts/evidence_vllm.sh
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder for the results: OUT=FOLDER}
PYTHON=${PYTHON:-python3}
MODELS=${MODELS:-0.6b 8b}
GIB=${GIB:-48}
failed=0
mkdir -p "$OUT"
"$PYTHON" -c "import vllm, nondet" || { echo "vLLM 0.25.1 and nondet have to be installed in $PYTHON's environment" >&2; exit 2; }
one() { # NAME OPTIONS...: a result that is there is kept
    local name=$1
    shift
    [ -f "$OUT/$name.json" ] && return
    echo "== $name"
    NONDET_COVERAGE=$OUT/coverage-$name-$$.jsonl "$PYTHON" scripts/vllm_load.py "$@" --out "$OUT/$name.part" > "$OUT/$name.log" 2>&1 \
        || { echo "failed, see $OUT/$name.log" >&2; failed=1; return; }
    mv "$OUT/$name.part" "$OUT/$name.json"
}
caches() { # FOLDER COMMAND...: everything that a start keeps for the next one lies there
    local at=$1
    shift
    VLLM_CACHE_ROOT=$at/vllm TORCHINDUCTOR_CACHE_DIR=$at/inductor TRITON_CACHE_DIR=$at/triton NONDET_CACHE=$at/nondet "$@"
}
for model in $MODELS; do # fresh processes: a machine's first start, its second, and a first one once more
    for mode in stock nondet; do
        for start in first second anew; do
            [ $start = second ] || at=$(mktemp -d)
            caches "$at" one "start-$model-$mode-$start" --mode $mode --model "$model" --cache-gib "$GIB" --copies 20 --others 40 --tokens 64
        done
    done
done
for mode in stock own nondet; do
    [ "${ONLY:-}" = starts ] && break
    one "embedded-$mode" --mode "$mode" --model nondet/embedded --prefix-cache
    for model in $MODELS; do
        one "$model-$mode" --mode "$mode" --model "$model" --cache-gib "$GIB" --speed --long 1x12000 --long 16x4000 --repeats "${REPEATS:-5}"
    done
done
"$PYTHON" scripts/vllm_summary.py "$OUT"
exit $failed
