#!/usr/bin/env bash
# SGLang, its own deterministic mode and nondet's plugin on one GPU: traces as solo under load, equal bits in fresh
# processes, tokens a second, time by kernel. Servers of all ARMS start beside each other and share the card; timed
# parts run one server at a time. What is there is kept, so a call that was cut off is made again as it was.
# usage: SITE=FOLDER OUT=FOLDER [PYTHON=python3] [MODEL=0.6b] [ARMS="stock nondet chunk256"] [PARTS="bits speed kernels"]
#   [PACK=FILE.tgz] [READY=240] [KEEP=1] lab/sglang_gpu.sh
# SITE: where SGLang 0.5.17 and its needs lie, as one folder for PYTHONPATH. Arms: stock; own, SGLang's own mode; nondet;
# chunk256, the same with chunks of 256 tokens; each but stock and own has to have the same digest. page64, with pages of
# 64, is refused by the plugin since it gave other bits; it is here for whoever looks for the cause. FLAGS are given to every server. TIMED names the arms of speed and kernels, all of them by default.
# Evidence: LOADS=5 makes 1,000 traces an arm.
set -uo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
SITE=${SITE:?name the folder that SGLang lies in: SITE=FOLDER}
OUT=${OUT:?name a folder for the results: OUT=FOLDER}
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-0.6b}
ARMS=${ARMS:-stock nondet chunk256}
PARTS=${PARTS:-bits speed kernels}
WORK=${WORK:-${TMPDIR:-/tmp}/nondet-sglang}
mkdir -p "$OUT" "$WORK/cache" "$WORK/entry"
OUT=$(cd "$OUT" && pwd)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false
export FLASHINFER_DISABLE_VERSION_CHECK=1 CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export PATH=$CUDA_HOME/bin:$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:/usr/local/nvidia/lib64
cache=${CACHE:-$WORK/cache}
export TVM_FFI_CACHE_DIR=$cache/tvm DG_JIT_CACHE_DIR=$cache/dg SGLANG_DG_CACHE_DIR=$cache/dg TRITON_CACHE_DIR=$cache/triton
export FLASHINFER_WORKSPACE_BASE=$cache NONDET_CACHE=$cache/nondet
# nondet as if it were installed: its entry point, for SGLang to find
entry=$WORK/entry/nondet_llm-0.dist-info
mkdir -p "$entry"
printf 'Metadata-Version: 2.1\nName: nondet-llm\nVersion: 0\n' > "$entry/METADATA"
printf '[sglang.srt.plugins]\nnondet = nondet.sglang.plugin:register\n' > "$entry/entry_points.txt"
ln -sfn "$ROOT/nondet" "$WORK/entry/nondet" # not the whole checkout, whose folder "kernels" has the name of a package
load() { PYTHONPATH=$ROOT:$SITE "$PYTHON" lab/sglang_load.py "$@"; }
packed() { # everything small that is there, as one file that is whole at any time
    load summary "$OUT" > "$OUT/summary.txt" 2>&1 || true
    [ -n "${PACK:-}" ] || return 0
    find "$OUT" -maxdepth 1 -type f -size -4M -printf '%f\n' | tar czf "$PACK.part" -C "$OUT" -T - && mv "$PACK.part" "$PACK"
}
port_of() { case $1 in stock) echo 3101;; own) echo 3102;; nondet) echo 3103;; page64) echo 3104;; *) echo 3105;; esac; }
flags_of() {
    case $1 in
        own) echo --enable-deterministic-inference;;
        page64) echo --page-size 64;;
        chunk256) echo --chunked-prefill-size 256;;
    esac
}
start() { # ARM: its server, in a group of its own, so that all of its processes can be ended
    local arm=$1 on=1
    case $arm in stock | own) on=0;; esac
    # shellcheck disable=SC2046,SC2086 # flags are words of their own
    NONDET_BATCH_INVARIANT=$on NONDET_COVERAGE=$OUT/coverage-$arm.jsonl PYTHONPATH=$SITE:$WORK/entry setsid "$PYTHON" \
        -m sglang.launch_server --model-path "$WORK/$MODEL" --host 127.0.0.1 --port "$(port_of "$arm")" --grammar-backend none \
        --enable-metrics --random-seed 0 --max-running-requests 256 --cuda-graph-max-bs-decode 256 --context-length 8192 \
        --mem-fraction-static 0.85 --max-total-tokens "${KEYS:-160000}" $(flags_of "$arm") ${FLAGS:-} > "$OUT/$arm.log" 2>&1 &
    echo $! > "$WORK/$arm.pid"
    date +%s > "$WORK/$arm.began"
}
is_ready() { # ARM: waits; its log's end where it died
    local arm=$1 until=$((SECONDS + ${READY:-240}))
    while [ $SECONDS -lt $until ]; do
        if "$PYTHON" -c "import sys, urllib.request as u; sys.exit(u.urlopen('http://127.0.0.1:$(port_of "$arm")/health', timeout=3).status != 200)" 2> /dev/null; then
            echo "== $arm ready after $(($(date +%s) - $(cat "$WORK/$arm.began"))) s" | tee -a "$OUT/starts.txt"
            return 0
        fi
        if ! kill -0 "$(cat "$WORK/$arm.pid")" 2> /dev/null; then
            echo "== $arm died"
            break
        fi
        sleep 1
    done
    grep -nE 'nondet|Error|error:' "$OUT/$arm.log" | tail -n 12 | cut -c1-300
    tail -n 40 "$OUT/$arm.log" | cut -c1-240
    return 1
}
part() { # WHAT ARM: a result that is there is kept
    local what=$1 arm=$2
    [ -f "$OUT/$arm.$what.json" ] && return
    timeout -k 5 "${LIMIT:-90}" env PYTHONPATH="$ROOT:$SITE" "$PYTHON" lab/sglang_load.py "$what" "http://127.0.0.1:$(port_of "$arm")" \
        "$WORK/$MODEL" "$OUT/$arm.$what.part" --loads "${LOADS:-2}" --repeats "${REPEATS:-3}" > "$OUT/$arm.$what.txt" 2>&1 \
        && mv "$OUT/$arm.$what.part" "$OUT/$arm.$what.json" || { echo "failed: $what of $arm"; tail -n 8 "$OUT/$arm.$what.txt" | cut -c1-300; }
}
ended() {
    packed
    [ -n "${KEEP:-}" ] && return
    for arm in $ARMS; do
        [ -f "$WORK/$arm.pid" ] && kill -- "-$(cat "$WORK/$arm.pid")" 2> /dev/null
    done
    sleep 1
    for arm in $ARMS; do
        [ -f "$WORK/$arm.pid" ] && kill -9 -- "-$(cat "$WORK/$arm.pid")" 2> /dev/null
        rm -f "$WORK/$arm.pid"
    done
}
trap ended EXIT
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | tee "$OUT/machine.txt"
[ -f "$WORK/$MODEL/model.safetensors.index.json" ] || load model "$MODEL" "$WORK/$MODEL" || exit 1
echo "model at $SECONDS s"
for arm in $ARMS; do
    [ -f "$WORK/$arm.pid" ] && kill -0 "$(cat "$WORK/$arm.pid")" 2> /dev/null || start "$arm"
done
up=
for arm in $ARMS; do
    is_ready "$arm" || continue
    up="$up $arm"
    case $PARTS in *bits*) part bits "$arm"; grep -E '^(solo|load)' "$OUT/$arm.bits.txt" | cut -c1-300;; esac
    packed
done
grep -h 'nondet:' "$OUT"/*.log | cut -c1-200 | sort | uniq -c | sort -rn | head -n 30
for arm in ${TIMED:-$up}; do
    case " $up " in *" $arm "*) ;; *) continue;; esac
    for what in speed kernels; do
        case $PARTS in *$what*) part "$what" "$arm"; packed;; esac
    done
    echo "timed $arm at $SECONDS s"
done
packed
cat "$OUT/summary.txt"
