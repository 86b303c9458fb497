#!/usr/bin/env bash
# FP8 as evidence on the GPU of this machine (an H200: under 15 minutes, each part under 4): run files and logs in FOLDER.
# Called again it goes on: a part that is done is kept, one that was cut off resumes from its run file.
# usage: bash lab/evidence_fp8.sh FOLDER [DEVICE]     (DEVICE: cuda, or cpu; SMALL=1: little of each, to try it;
#   ONLY=torchao: the parts whose names have that expression)
#
# Stock FP8Linear takes its kernel from transformers' hub (the package kernels, and the network or its cache); where it can't
# be had the stock parts fail with transformers' own words, and the invariant ones run; torchao's layers call torch._scaled_mm,
# so that stock runs wherever torchao is installed. On a CPU transformers loads FP8
# weights as bfloat16, so that its samples say nothing about FP8.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: bash lab/evidence_fp8.sh FOLDER [DEVICE]}
device=${2:-cuda}
python=${PYTHON:-python}
mkdir -p "$folder"
failed=()
M=8192 N=1000 probe=() bench=() sample=()
if [ -n "${SMALL:-}" ]; then
    M=33 N=4 probe=(--k 512 --n 64) bench=(--k 256 --n 128 --m 1 --m 16) sample=(--max-tokens 8 --load none)
fi

part() { # part NAME SECONDS ARGUMENTS...: a command of nondet's that writes NAME.jsonl
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    [[ $name =~ ${ONLY:-.} ]] || return 0
    [ -e "$folder/$name.done" ] && return
    local on=()
    [ -s "$folder/$name.jsonl" ] && on=(--resume)
    if timeout "$limit" "$python" -m nondet "$@" --device "$device" --out "$folder/$name.jsonl" ${on[@]+"${on[@]}"} \
        >"$folder/$name.txt" 2>"$folder/$name.log"; then
        touch "$folder/$name.done"
    else
        failed+=("$name ($?)")
    fi
    echo "$name: $((SECONDS - began)) s: $(tail -n 1 "$folder/$name.log")"
}

# classes over M by scales and promotion, then the invariant product over M 1 to 8192 on two more sets of inputs
part probe 120 probe scaled-matmul --impl stock --impl invariant --m "$M" ${probe[@]+"${probe[@]}"}
for seed in 1 2; do
    part "invariant-$seed" 60 probe scaled-matmul --impl invariant --seed "$seed" --m "$M" ${probe[@]+"${probe[@]}"}
done
part certify 90 certify scaled-matmul ${SMALL:+--m 17 --k 512 --n 64}
part bench 120 bench scaled-matmul ${bench[@]+"${bench[@]}"}
for how in block tensor torchao-row torchao-tensor; do
    [[ sample-$how,trace-$how =~ ${ONLY:-.} ]] || continue
    "$python" -c "import torchao" 2>/dev/null || [ "${how#torchao}" = "$how" ] || { failed+=("model-$how, no torchao"); continue; }
    if [ ! -e "$folder/model-$how.done" ]; then
        rm -rf "$folder/model-$how" # one that was cut off
        "$python" lab/fp8_model.py "$how" "$folder/model-$how" && touch "$folder/model-$how.done" \
            || { failed+=("model-$how"); continue; }
    fi
    for impl in invariant stock; do
        part "sample-$how-$impl" 120 sample --model "$folder/model-$how" --n "$N" --impl "$impl" ${sample[@]+"${sample[@]}"}
    done
done
for how in block torchao-row torchao-tensor; do
    [ -e "$folder/model-$how.done" ] && part "trace-$how" 200 trace --model "$folder/model-$how" ${sample[@]+"${sample[@]}"}
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo "all parts are done: $folder"
