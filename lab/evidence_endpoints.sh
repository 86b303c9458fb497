#!/usr/bin/env bash
# What a real server shows over time: a gate that is killed and goes on, seeds at a temperature, a restart between two
# runs, a second server beside it. Of llama.cpp and transformers serve, and seeds of vLLM, each holding the embedded model.
#   lab/evidence_endpoints.sh FOLDER
# Makes FOLDER/{llamacpp,transformers-serve,vllm-cpu}/*.jsonl, with what the gate and the diff said as .txt and .md.
# PYTHON as in lab/evidence.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: lab/evidence_endpoints.sh FOLDER}
python=${PYTHON:-python3}
prompts=docs/evidence/servers/prompts.jsonl
folder=${NONDET_SERVERS:-$HOME/.cache/nondet-servers}/nondet-embedded
load=others=8,targets=4,prompt=8-64,tokens=8-32
mkdir -p "$out/llamacpp" "$out/transformers-serve" "$out/vllm-cpu"

stop() { for name in llamacpp transformers vllm; do "scripts/serve_$name.sh" --stop; done; }
trap stop EXIT
nondet() { "$python" -m nondet.cli "$@"; }

# gate DIR URL MODEL: killed at the third answer, then gone on with; what it said and its exit codes in gate.txt
gate() {
    local dir=$1 code pid
    local ask=(gate --endpoint "$2" --model "$3" --prompts "$prompts" --max-tokens 32 --load "$load" --rate 10% --out "$dir/gate.jsonl")
    rm -f "$dir"/gate.*
    {
        echo "\$ nondet gate --endpoint URL --model NAME --prompts prompts.jsonl --max-tokens 32 --load $load --rate 10% --out gate.jsonl"
        "$python" -m nondet.cli "${ask[@]}" > /dev/null 2>&1 &
        pid=$!
        until [ "$(grep -c '"completion"' "$dir/gate.jsonl" 2> /dev/null)" -ge 3 ] 2> /dev/null; do
            kill -0 "$pid" 2> /dev/null || break
            sleep 0.05
        done
        kill -KILL "$pid" 2> /dev/null || true
        wait "$pid" && code=0 || code=$?
        echo "killed: exit code $code, $(grep -c '"completion"' "$dir/gate.jsonl") answers on disk"
        echo "\$ nondet gate ... --resume"
        "$python" -m nondet.cli "${ask[@]}" --resume 2>&1 && code=0 || code=$?
        echo "exit code $code"
    } | sed "s#$dir/##g" > "$dir/gate.txt"
}

# seeds DIR URL MODEL ARMS SEEDS
seeds() {
    nondet sample --endpoint "$2" --model "$3" --temperature 0.8 --seeds "$5" --arms "$4" --max-tokens 32 --load "$load" \
        --concurrency 12 --out "$1/seeds.jsonl" --force --quiet
}

llama=$(scripts/serve_llamacpp.sh | tail -n 1)
serve=$(scripts/serve_transformers.sh | tail -n 1)
gate "$out/llamacpp" "$llama" nondet-embedded
gate "$out/transformers-serve" "$serve" "$folder"
seeds "$out/llamacpp" "$llama" nondet-embedded solo=8,cold=8,warm=8,loaded=32 4
seeds "$out/transformers-serve" "$serve" "$folder" solo=4,loaded=16 2
nondet sample --endpoint "$llama" --model nondet-embedded --compare-endpoint "$serve" --compare-model "$folder" --prompts "$prompts" \
    --arms solo=4,loaded=16 --max-tokens 32 --load "$load" --concurrency 12 --out "$out/llamacpp/compare.jsonl" --force --quiet
scripts/serve_transformers.sh --stop

# the same questions before and after a restart, on the same port: the address is part of what was asked
restarted() {
    nondet sample --endpoint "$llama" --model nondet-embedded --prompts "$prompts" --arms solo=6,loaded=12 --max-tokens 32 \
        --load "$load" --concurrency 12 --out "$out/llamacpp/restarted-$1.jsonl" --force --quiet
}
restarted before
scripts/serve_llamacpp.sh --stop
PORT=${llama##*:} scripts/serve_llamacpp.sh > /dev/null
restarted after
nondet diff "$out/llamacpp/restarted-before.jsonl" "$out/llamacpp/restarted-after.jsonl" --out "$out/llamacpp/restarted.md" --force --quiet
scripts/serve_llamacpp.sh --stop

vllm=$(scripts/serve_vllm.sh | tail -n 1)
seeds "$out/vllm-cpu" "$vllm" nondet-embedded solo=8,cold=8,warm=8,loaded=32 4
