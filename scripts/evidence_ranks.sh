#!/usr/bin/env bash
# Makes the run files about several ranks in the folder given: scripts/evidence_ranks.sh FOLDER [RANKS [DEVICE]], as 4 on
# a host of four GPUs; on a CPU, cpu and fewer sizes. Each part is bounded and survives the others' failure; the most
# valuable comes first, and what no time is left for is left out. NVLink multicast stays off.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/evidence_ranks.sh FOLDER [RANKS [DEVICE]]}
ranks=${2:-2}
device=${3:-cuda}
python=${PYTHON:-python3}
most=${RANKS_SECONDS:-600}
model=${RANKS_MODEL:-random:qwen3-12x1024}
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export NONDET_RANKS_LIMIT_S=${NONDET_RANKS_LIMIT_S:-90}

part() { # NAME SECONDS COMMAND...: its output to NAME.txt, one line here
    local name=$1 limit=$2 began=$SECONDS left=$((most - SECONDS))
    shift 2
    if ((left < 10)); then
        echo "$name: left out, no time"
        return
    fi
    timeout -k 5 $((limit < left ? limit : left)) "$@" > "$out/$name.txt" 2>&1
    echo "$name: exit code $?, $((SECONDS - began)) s"
}
nondet() { # NAME SECONDS ARGUMENTS of nondet...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m nondet.cli "$@" --device "$device" --out "$out/$name.jsonl" --force
}

worlds=2
for ((world = 4; world <= ranks; world *= 2)); do worlds=$worlds:$world; done
load=others=8,spread=24,prompt=8-64,tokens=16-32,budget=64,requests=32

# the sum by message size, against NCCL
nondet bench-all-reduce 90 bench all-reduce --ranks "${worlds//:/,}"
# what it costs end to end, CUDA graphs, implementations in turn wave by wave. Cells are kept as they come; on two H200s
# the first of 12 layers took 36 s beside the start (proofs, captures), so the model of a usual size comes first
engine=(--models "$model" --requests 2,4)
[ "$device" = cuda ] && engine=(--models random:qwen3-8b --models "$model" --requests 8,32,128)
nondet bench-engine 240 bench engine --ranks "${worlds//:/,}" "${engine[@]}"
part tests 150 "$python" -m pytest -q -p no:cacheprovider tests/ranks/test_group.py
# a row-parallel layer with its all-reduce, stock, chain and rank-free
nondet bench-row-parallel 120 bench row-parallel --ranks "${worlds//:/,}" --m 1 --m 8 --m 64 --m 1024
nondet probe-all-reduce 120 probe all-reduce --ranks "${worlds//:/,}"
# traces within and across numbers of ranks, continuous batching under transformers' own tensor parallelism
nondet vary-ranks 125 sample --vary "ranks=$worlds" --impl stock --impl invariant --impl rank-free \
    --model "$model" --n 32 --max-tokens 24 --load "$load,targets=32"
