#!/usr/bin/env bash
# On-policy training as evidence on the GPU of this machine: logs and run files in FOLDER. Called again it goes on.
# usage: bash lab/evidence_rl.sh FOLDER [DEVICE]     (SMALL=1: little of each, to try it; ONLY='^rl': parts so named)
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: bash lab/evidence_rl.sh FOLDER [DEVICE]}
device=${2:-cuda}
python=${PYTHON:-python}
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
seconds=60 models=(qwen3 llama gemma3 qwen3-moe) rl=() cells=()
if [ -n "${SMALL:-}" ]; then
    seconds=1 models=(llama) rl=(--steps 2) cells=(--m 16 --k 128)
fi

part() { # part NAME SECONDS COMMAND...: its output is NAME.txt; done once
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    [[ $name =~ ${ONLY:-.} ]] || return 0
    [ -e "$folder/$name.done" ] && return
    timeout "$limit" "$@" > "$folder/$name.txt" 2> "$folder/$name.log" && touch "$folder/$name.done"
    echo "$name: $? after $((SECONDS - began)) s"
}
command() { # command NAME SECONDS ARGUMENTS...: a command of nondet's that writes NAME.jsonl
    local name=$1 limit=$2 on=()
    shift 2
    [ -s "$folder/$name.jsonl" ] && on=(--resume)
    part "$name" "$limit" "$python" -m nondet "$@" --device "$device" --out "$folder/$name.jsonl" ${on[@]+"${on[@]}"}
}

for model in "${models[@]}"; do # promise A at length, then B: a process a model, since each waits for Python
    for dtype in bfloat16 float32; do
        part "at-length-$model-$dtype" $((3 * seconds + 60)) "$python" lab/promises.py "$seconds" only "$model" "$dtype" &
    done
    part "repeat-$model" 400 "$python" lab/promises.py 0 repeat only "$model" &
done
wait
[ "$device" = cuda ] && [ -z "${SMALL:-}" ] && part large 120 "$python" lab/promises.py 0 large
command bench 60 bench rms-norm-gradient softmax-gradient log-softmax-gradient silu-gradient attention-gradient ${cells[@]+"${cells[@]}"}
command mismatch 120 mismatch
command rl 500 rl ${rl[@]+"${rl[@]}"}
for model in "${models[@]}"; do # promise A in every layout after 100 steps
    for dtype in bfloat16 float32; do
        part "grid-$model-$dtype" 500 "$python" lab/promises.py 0 grid "$folder/grid-$model-$dtype.jsonl" only "$model" "$dtype" &
    done
done
wait
ls "$folder"/*.done
