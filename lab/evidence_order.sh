#!/usr/bin/env bash
# Orders of addition as evidence on the GPU of this machine: run files in FOLDER. Called again it goes on where it was.
# usage: bash lab/evidence_order.sh FOLDER [DEVICE]     (SMALL=1: little of each, to try it)
# Seconds that each part may take are beside it; `order` is four processes at once, since most of its time is the host's.
# ONLY="map long": those parts alone. Four or more GPUs add the sums over ranks.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: bash lab/evidence_order.sh FOLDER [DEVICE]}
device=${2:-cuda}
python=${PYTHON:-python}
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
order=() long=(--k 16384 --n 64 --m 16) map=(--k 4096 --n 12288 --m 512) layers=(--preset qwen3-8b)
if [ -n "${SMALL:-}" ]; then
    order=(--k 64 --n 8 --m 2) long=(--k 128 --n 1 --m 2) map=(--k 64 --n 32 --m 4) layers=(--k 64 --n 32 --m 4)
fi

part() { # part NAME SECONDS ARGUMENTS...: a command of nondet's that writes NAME.jsonl
    local name=$1 limit=$2 began=$SECONDS on=()
    shift 2
    [[ " ${ONLY:-${name%%-*}} " == *" ${name%%-*} "* ]] || return
    [ -e "$folder/$name.done" ] && return
    [ -s "$folder/$name.jsonl" ] && on=(--resume)
    timeout "$limit" "$python" -m nondet "$@" --device "$device" --out "$folder/$name.jsonl" ${on[@]+"${on[@]}"} \
        > "$folder/$name.txt" 2> "$folder/$name.log" && touch "$folder/$name.done"
    echo "$name: $? after $((SECONDS - began)) s"
}

part map 40 probe matmul --map mn "${map[@]}" --impl stock
for impl in stock invariant; do
    for dtype in float32 bfloat16; do
        part "order-$impl-$dtype" 150 probe reduction-order --impl "$impl" --dtype "$dtype" ${order[@]+"${order[@]}"} &
    done
done
wait
part long 100 probe reduction-order "${long[@]}"
part matmul 240 probe matmul "${layers[@]}"
ls "$folder"/*.done
