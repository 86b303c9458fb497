#!/usr/bin/env bash
# vLLM, its own batch-invariant mode, and nondet's plugin on one GPU: traces as solo under load, the same bits in fresh
# processes, tokens a second, where a start's seconds go, faults that have to be found. Needs vLLM and nondet in
# PYTHON's environment. One file a mode and model under OUT; what is there is kept, so a call that was cut off is made
# again as it was. PACK names one archive (some 100 kB) of all that is there, written anew after each result.
# usage: OUT=FOLDER [PACK=FILE.tgz] [PYTHON=python3] [ONLY=PART] [MODELS="0.6b 8b"] [REPEATS=5] [GIB=48] lab/evidence_vllm.sh
# Calls of under 9 minutes on one H200, made for docs/evidence/vllm at 12748eb and, but for fp8, profile and starts, at 496199b:
#   SIDE=7 ONLY=fp8 OUT=/tmp/ev PACK=/tmp/fp8.tgz lab/evidence_vllm.sh                   # static scales, layers replaced: 2 min
#   MODELS=8b GIB=24 ONLY=pair OUT=/tmp/ev PACK=/tmp/8b.tgz lab/evidence_vllm.sh             # both in memory, in turns: 4 min
#   TURNS=own,aten LONG= REPEATS=3 MODELS=8b GIB=24 ONLY=pair OUT=/tmp/ev PACK=/tmp/8b.tgz lab/evidence_vllm.sh   # vLLM's own mode, and that with aten's products: 5 min
#   MODELS=0.6b GIB=24 ONLY=pair OUT=/tmp/ev PACK=/tmp/0.6b.tgz lab/evidence_vllm.sh         # 3 min; then as 8b
#   MODELS=0.6b GIB=24 ONLY=profile OUT=/tmp/ev PACK=/tmp/prof.tgz lab/evidence_vllm.sh          # of both, after it: 2 min
#   MODELS=8b GIB=24 ONLY=starts SIDE=2 OUT=/tmp/ev PACK=/tmp/starts.tgz lab/evidence_vllm.sh    # 4 starts, 2 at a time: 3 min
#   N=200 ONLY=server OUT=/tmp/ev PACK=/tmp/server.tgz lab/evidence_vllm.sh                      # 2 min
# and on two H200s at 496199b, two H100s at 444df9a (four were not tried):
#   RANKS=2 SIDE=2 MODELS=8b GIB=16 ONLY=ranks OUT=/tmp/ev PACK=/tmp/ranks.tgz lab/evidence_vllm.sh   # 4 min
# LONG="" leaves long contexts out. "aten" is `lab/vllm_load.py --mode aten`.
# MODES chooses among the modes of starts and profile. Other parts: sample, trace, thousand, load.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder for the results: OUT=FOLDER}
PYTHON=${PYTHON:-python3}
MODELS=${MODELS:-0.6b 8b}
GIB=${GIB:-48}
failed=0
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
[ -z "${PACK:-}" ] || PACK=$(realpath -m "$PACK")
"$PYTHON" -c "import vllm, nondet" || { echo "vLLM and nondet have to be installed in $PYTHON's environment" >&2; exit 2; }
packed() { # everything small that is there, as one file that is whole at any time
    [ -n "${PACK:-}" ] || return 0
    local made=$PACK.$BASHPID
    "$PYTHON" lab/vllm_summary.py "$OUT" > "$OUT/summary.txt" 2>&1 || true
    find "$OUT" -maxdepth 1 -type f -size -4M -printf '%f\n' | tar czf "$made" -C "$OUT" -T - && mv "$made" "$PACK" || rm -f "$made"
}
one() { # NAME OPTIONS...: a result that is there is kept
    local name=$1
    shift
    [ -f "$OUT/$name.json" ] && return
    echo "== $name"
    NONDET_COVERAGE=$OUT/coverage-$name-$$.jsonl "$PYTHON" lab/vllm_load.py "$@" --out "$OUT/$name.part" > "$OUT/$name.log" 2>&1 \
        || { echo "failed, see $OUT/$name.log" >&2; failed=1; packed; return; }
    mv "$OUT/$name.part" "$OUT/$name.json"
    packed
}
caches() { # FOLDER COMMAND...: everything that a start keeps for the next one lies there
    local at=$1
    shift
    mkdir -p "$at"
    VLLM_CACHE_ROOT=$at/vllm TORCHINDUCTOR_CACHE_DIR=$at/inductor TRITON_CACHE_DIR=$at/triton NONDET_CACHE=$at/nondet "$@"
}
part() { [ "${ONLY:-$1}" = "$1" ]; }
slot() { while [ "$(jobs -rp | wc -l)" -ge "${SIDE:-1}" ]; do wait -n || true; done; } # for one more of SIDE at a time
there() { for name in "$@"; do [ -f "$OUT/$name" ] || failed=1; done; } # what others made, in processes of their own
if part server && ! [ -f "$OUT/server.ok" ]; then # as a user: vllm serve, sample and gate; on a CPU ASKED=0, and SERVE="--enforce-eager"
    port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    # shellcheck disable=SC2086 # arguments are words of their own
    NONDET_BATCH_INVARIANT=${ASKED:-1} VLLM_USE_FLASHINFER_SAMPLER=0 NONDET_COVERAGE=$OUT/coverage-server-$$.jsonl \
        "$PYTHON" -m vllm.entrypoints.cli.main serve nondet/embedded --dtype bfloat16 --max-model-len 1024 --port "$port" \
        ${SERVE:-} > "$OUT/server.log" 2>&1 &
    server=$!
    trap 'kill $server 2> /dev/null || true' EXIT
    for _ in $(seq 300); do curl -sf "http://127.0.0.1:$port/health" && break || kill -0 $server || break; sleep 1; done
    for command in "sample --fail-on divergent ${N:+--n $N}" gate; do
        # shellcheck disable=SC2086 # the command and its option
        timeout 120 "$PYTHON" -m nondet $command --endpoint "http://127.0.0.1:$port" -o "$OUT/${command%% *}.jsonl" --force || failed=1
    done
    kill $server 2> /dev/null || true
    [ $failed = 1 ] || touch "$OUT/server.ok"
fi
sampled() { # NAME OPTIONS...: `nondet sample` in vLLM's own process; a run that is whole is kept, one that was cut off goes on
    local name=$1 resumed=()
    shift
    [ -f "$OUT/sample-$name.ok" ] && return
    [ -s "$OUT/sample-$name.jsonl" ] && resumed=(--resume)
    caches "$OUT.caches/sample-$name" "$PYTHON" -m nondet sample --engine vllm --dtype bfloat16 "$@" ${resumed[@]+"${resumed[@]}"} \
        -o "$OUT/sample-$name.jsonl" > "$OUT/sample-$name.log" 2>&1 && touch "$OUT/sample-$name.ok" || { echo "failed: sample-$name" >&2; failed=1; }
}
if part sample; then # traces of N requests by nondet's own count: prompts in chunks, prefixes cached, mixed lengths; SIDE at a time
    N=${N:-1000}
    load=${LOAD:-others=120,targets=100,spread=96,prompt=8-700,tokens=16-128,budget=512,requests=128}
    for form in embedded moe window gemma2 gemma3 0.6b 8b; do
        case " ${FORMS:-embedded moe window gemma2 gemma3 0.6b 8b} " in *" $form "*) ;; *) continue ;; esac
        case $form in
            embedded) model=() ;;
            *b) model=(--model "random:qwen3-$form") ;;
            *) model=(--model "$OUT.models/$form"); [ -d "$OUT.models/$form" ] || "$PYTHON" lab/vllm_forms.py $form "$OUT.models/$form" ;;
        esac
        slot
        sampled "$form" --impl "${IMPL:-both}" --n "$N" --load "$load" ${model[@]+"${model[@]}"} ${MORE:-} &
    done
    wait
    for form in ${FORMS:-embedded moe window gemma2 gemma3 0.6b 8b}; do there "sample-$form.ok"; done
fi
for model in $MODELS; do # fresh processes: a machine's first start, its second, and a first one once more; SIDE modes at a time
    part starts || break
    for start in ${STARTS:-first second}; do
        for mode in ${MODES:-stock nondet}; do
            at=$OUT.caches/$model-$mode$([ $start = anew ] && echo -anew || true)
            [ $start = second ] || [ -f "$OUT/start-$model-$mode-$start.json" ] || rm -rf "$at" # one that was cut off left some
            caches "$at" one "start-$model-$mode-$start" --mode $mode --model "$model" --cache-gib "$GIB" --copies 20 --others 40 &
            [ "${SIDE:-1}" -gt 1 ] || wait
        done
        wait
        for mode in ${MODES:-stock nondet}; do there "start-$model-$mode-$start.json"; done
    done
done
if part trace; then # the first call that differs, of a prompt of 880 tokens that is read in chunks; on a CPU MORE="--device cpu"
    text="For example, the class method returns the value of the object, and the argument is called with the name. "
    for _ in $(seq 40); do printf %s "$text"; done | sed 's/ $//' > "$OUT/long.txt"
    for impl in ${IMPL:-stock vllm-invariant invariant}; do
        [ -f "$OUT/trace-$impl.ok" ] && continue
        # shellcheck disable=SC2086 # options are words of their own
        caches "$OUT.caches/trace-$impl" "$PYTHON" -m nondet trace --engine vllm --dtype bfloat16 --impl "$impl" --prompt-file "$OUT/long.txt" \
            --max-tokens 24 --load "others=20,targets=24,spread=32,prompt=8-600,tokens=8-32,budget=512,requests=64" ${MORE:-} \
            --out "$OUT/trace-$impl.jsonl" --force > "$OUT/trace-$impl.log" 2>&1 && touch "$OUT/trace-$impl.ok" || failed=1
    done
fi
folder_of() { # a model of `thousand`: a shape of vllm_load.py, the embedded one, or a folder that is made once
    local at=$OUT.models/$1
    case $1 in
        *b | moe) echo "$1" ;;
        embedded) echo nondet/embedded ;;
        fp8-*-*) [ -e "$at/config.json" ] || "$PYTHON" lab/fp8_model.py "$(cut -d- -f2 <<< "$1")" "$at" --model "$(folder_of "${1#fp8-*-}")" --vllm >&2; echo "$at" ;;
        fp8-*) [ -e "$at/config.json" ] || "$PYTHON" lab/fp8_model.py "${1#fp8-}" "$at" --vllm >&2; echo "$at" ;;
        *) [ -e "$at/config.json" ] || "$PYTHON" lab/vllm_forms.py "$1" "$at" >&2; echo "$at" ;;
    esac
}
if part fp8; then # static scales, norms not fused; layers whose own kernel can't stand; faults that have to be found
    wide=$(folder_of fp8-tensor-wide) row=$(folder_of fp8-row)
    fp8() { # NAME OPTIONS...
        slot
        caches "$OUT.caches/$1" one "$@" --prefix-cache --copies "${COPIES:-500}" ${MORE:-} &
    }
    fp8 fp8-wide-nondet --mode nondet --model "$wide"
    # without CUTLASS vLLM's own mode has torch's product on bfloat16 weights, which it compiles: ours has to stand there
    export VLLM_DISABLED_KERNELS=CutlassFP8ScaledMMLinearKernel
    for mode in nondet own stock; do fp8 "fp8-wide-torch-$mode" --mode $mode --model "$wide"; done
    unset VLLM_DISABLED_KERNELS
    for mode in nondet stock; do fp8 "fp8-row-split-$mode" --mode $mode --model "$row" --plant split; done
    wait
    there fp8-{wide-nondet,wide-torch-nondet,row-split-nondet,row-split-stock}.json
fi
for model in $MODELS; do # modes in one memory, timed in turns; TURNS: such groups, one after the other
    part pair || break
    turn=$OUT.turns/$model
    mkdir -p "$turn"
    # shellcheck disable=SC2206 # options are words of their own
    timed=(--model "$model" --cache-gib "$GIB" --copies 100 --others 100 --speed ${LONG---long 1x12000 --long 16x4000} --repeats "${REPEATS:-5}" ${MORE:-})
    rm -f "$turn"/*
    for group in ${TURNS:-stock,nondet}; do
        before='' names=()
        for mode in ${group//,/ }; do
            begin=() # the first as soon as all of them are up, any other after the one before it
            [ -n "$before" ] || for other in $(tr , ' ' <<< "$group"); do [ "$other" = "$mode" ] || begin+=(--begin "$turn/$other-up"); done
            [ -z "$before" ] || begin=(--begin "$turn/$before-done")
            { caches "$OUT.caches/pair-$model-$mode" one "pair-$model-$mode" --mode "$mode" "${timed[@]}" --until "$turn/$mode-up" ${begin[@]+"${begin[@]}"}
                touch "$turn/$mode-up" "$turn/$mode-done"; } &
            before=$mode names+=("pair-$model-$mode.json")
        done
        wait
        there "${names[@]}"
    done
done
for model in $MODELS; do # where the time of a small model's steps goes
    part profile && [ "$model" != 8b ] || continue
    for mode in ${MODES:-stock nondet}; do
        caches "$OUT.caches/pair-$model-$mode" one "profile-$model-$mode" --mode $mode --model "$model" --cache-gib "$GIB" \
            --copies 2 --others 2 --profile ${LONG---long 1x12000 --long 16x4000} ${MORE:-}
    done
done
for model in $MODELS; do # tensor-parallel ranks, a GPU each; SIDE modes at a time
    part ranks && [ "${RANKS:-1}" -gt 1 ] || break
    for mode in nondet stock; do
        slot
        caches "$OUT.caches/ranks$RANKS-$model-$mode" one "ranks$RANKS-$model-$mode" --mode $mode \
            --model "$model" --ranks "$RANKS" --cache-gib "$GIB" --copies "${COPIES:-500}" ${MORE:-} &
    done
    wait
    there "ranks$RANKS-$model-"{nondet,stock}.json
done
if part shared; then # RANKS ranks on the GPUs that are there, each posing as a host of its own: NCCL's sums by sockets, slow, of a small model
    ranks=${RANKS:-4} gpus=$(nvidia-smi -L | wc -l)
    for mode in nondet stock; do
        for rank in $(seq 0 $((ranks - 1))); do
            RANK=$rank LOCAL_RANK=0 WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT:-29533} CUDA_VISIBLE_DEVICES=$((rank % gpus)) \
                NCCL_HOSTID=$rank NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 \
                VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0 \
                caches "$OUT.caches/shared-$mode-$rank" one "shared$ranks-embedded-$mode-$rank" --mode $mode --model nondet/embedded \
                --ranks "$ranks" --launched --step 256 --cache-gib 2 --copies "${COPIES:-20}" --others 20 --tokens 32 ${MORE:-} &
        done
        wait
        there "shared$ranks-embedded-$mode-0.json"
    done
fi
if part thousand; then # 1,000 copies of two prompts among others, prompts in chunks, prefixes cold and warm; SIDE at a time
    for mode in nondet stock; do
        for form in ${FORMS:-8b 0.6b embedded moe fp8-tensor fp8-row fp8-block window gemma2 gemma3}; do
            slot
            at=$(folder_of "$form")
            # shellcheck disable=SC2086 # options are words of their own
            caches "$OUT.caches/thousand-$form-$mode" one "thousand-$form-$mode" --mode $mode --model "$at" \
                --prefix-cache --copies "${COPIES:-500}" ${MORE:-} &
        done
    done
    wait
    for form in ${FORMS:-8b}; do there "thousand-$form-nondet.json"; done
fi
for mode in stock own nondet; do
    part load || break
    one "embedded-$mode" --mode "$mode" --model nondet/embedded --prefix-cache
    for model in $MODELS; do
        one "$model-$mode" --mode "$mode" --model "$model" --cache-gib "$GIB" --speed --long 1x12000 --long 16x4000 --repeats "${REPEATS:-5}"
    done
done
packed
"$PYTHON" lab/vllm_summary.py "$OUT"
exit $failed
