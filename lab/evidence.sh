#!/usr/bin/env bash
# Makes the run files and reports that the README's figures are read from, in the folder given. Needs an environment in
# which `python3 -m nondet.cli` runs: the one that scripts/quickstart.sh makes, or a machine's own PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: lab/evidence.sh FOLDER}
python=${PYTHON:-python3}
nondet() { "$python" -m nondet.cli "$@"; }
mkdir -p "$out"

nondet probe all --out "$out/probes.jsonl" --force > /dev/null
nondet sample --n 1000 --impl both --out "$out/sample.jsonl" --force > /dev/null
# one family of operators replaced at a time, under one load: which one is guilty?
nondet sample --n 120 --impl both --impl invariant:attention --impl invariant:matmul --impl invariant:norm \
    --out "$out/families.jsonl" --force > /dev/null
# one thing about the engine varied at a time: 1,000 completions at each value of each axis, stock and invariant
stock=$("$python" -c 'import torch; print("stock-no-cudnn" if torch.cuda.is_available() else "stock")')
company=others=40,targets=100,spread=64,prompt=8-64,tokens=8-48,budget=128,requests=128
nondet sample --vary all --n 1000 --impl "$stock" --impl invariant --max-tokens 32 --load "$company" \
    --out "$out/axes.jsonl" --force > /dev/null
# tokens drawn at a temperature, ten seeds with 100 completions each
nondet sample --temperature 0.8 --top-k 50 --top-p 0.95 --seeds 10 --n 100 --max-tokens 32 --load "$company" \
    --impl invariant --impl "${stock/%stock/stock-seeded}" --impl unseeded-invariant --impl stock --out "$out/seeds.jsonl" --force \
    > /dev/null
# speed: kernels alone, then a 12-layer model under several loads. Each load twice: the first run proves its shapes
nondet bench --out "$out/bench.jsonl" --force > /dev/null
nondet certify all --out "$out/certify.jsonl" --force > /dev/null
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    for load in 8:4:8:32 32:16:24:128 128:64:96:512; do
        IFS=: read -r requests others targets budget <<< "$load"
        for _ in first second; do
            nondet sample --model random:qwen3-12x1024 --max-tokens 32 --n "$((2 * targets))" \
                --impl stock-no-cudnn --impl invariant --out "$out/end-to-end-$requests.jsonl" --force \
                --load "others=$others,targets=$targets,requests=$requests,budget=$budget,spread=16,prompt=8-64,tokens=16-48" \
                > /dev/null
        done
    done
fi
PYTHON=$python bash scripts/reports.sh "$out" "$out"
