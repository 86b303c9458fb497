#!/usr/bin/env bash
# Gradients' kernels as evidence on the GPU of this machine: tests and speeds. Called again it goes on.
# usage: bash lab/evidence_gradients.sh FOLDER [DEVICE]     (SMALL=1: little of each, to try it)
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: bash lab/evidence_gradients.sh FOLDER [DEVICE]}
device=${2:-cuda}
python=${PYTHON:-python}
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
cells=() on=()
[ -n "${SMALL:-}" ] && cells=(--m 16 --k 128)
names="softmax-gradient log-softmax-gradient rms-norm-gradient silu-gradient"

part() { # part NAME SECONDS COMMAND...: its output is NAME.txt; done once
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    [ -e "$folder/$name.done" ] && return
    timeout "$limit" "$@" > "$folder/$name.txt" 2> "$folder/$name.log" && touch "$folder/$name.done"
    echo "$name: $? after $((SECONDS - began)) s"
}

part tests 150 "$python" -m pytest -q -n 0 -p no:cacheprovider tests/kernels/gradients \
    tests/kernels/dispatch/test_gradients.py
[ -s "$folder/bench.jsonl" ] && on=(--resume)
# shellcheck disable=SC2086 # names are words
part bench 90 "$python" -m nondet bench $names --device "$device" --out "$folder/bench.jsonl" \
    ${cells[@]+"${cells[@]}"} ${on[@]+"${on[@]}"}
tail -n 3 "$folder/tests.txt"
ls "$folder"/*.done
