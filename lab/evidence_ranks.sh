#!/usr/bin/env bash
# Makes the run files about several ranks in the folder given: lab/evidence_ranks.sh FOLDER [RANKS [DEVICE]], as 4 on
# a host of four GPUs; on a CPU, cpu and fewer sizes. It stops after RANKS_SECONDS (540) and exits 1 while a part is left:
# the same call again goes on where it stopped, cell by cell. A part that fails leaves the others alone; it is tried
# again, too. NVLink multicast stays off.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: lab/evidence_ranks.sh FOLDER [RANKS [DEVICE]]}
ranks=${2:-2}
device=${3:-cuda}
python=${PYTHON:-python3}
most=${RANKS_SECONDS:-540}
model=${RANKS_MODEL:-random:qwen3-12x1024}
left=0
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export NONDET_RANKS_LIMIT_S=${NONDET_RANKS_LIMIT_S:-90}

part() { # NAME COMMAND...: its output to NAME.txt, one line here; nothing where it has come to its end
    local name=$1 began=$SECONDS seconds=$((most - SECONDS)) code
    shift
    [ -e "$out/$name.done" ] && return
    if ((seconds < 10)); then
        echo "$name: left for another call"
        left=1
        return
    fi
    timeout -k 5 "$seconds" "$@" >> "$out/$name.txt" 2>&1
    code=$?
    echo "$name: exit code $code, $((SECONDS - began)) s"
    if ((code == 0)); then touch "$out/$name.done"; else left=1; fi
}
nondet() { # NAME ARGUMENTS of nondet...
    local name=$1 again=()
    shift
    [ -s "$out/$name.jsonl" ] && again=(--resume)
    part "$name" "$python" -m nondet.cli "$@" --device "$device" --out "$out/$name.jsonl" "${again[@]}"
}

worlds=2
for ((world = 4; world <= ranks; world *= 2)); do worlds=$worlds:$world; done
load=others=8,spread=24,prompt=8-64,tokens=16-32,budget=64,requests=32

# the sum by message size, against NCCL
nondet bench-all-reduce bench all-reduce --ranks "${worlds//:/,}"
# traces within and across numbers of ranks, continuous batching under transformers' own tensor parallelism
nondet vary-ranks sample --vary "ranks=$worlds" --impl stock --impl invariant --impl rank-free \
    --model "$model" --n 32 --max-tokens 24 --load "$load,targets=32"
# a row-parallel layer with its all-reduce, stock, chain and rank-free
nondet bench-row-parallel bench row-parallel --ranks "${worlds//:/,}" --m 1 --m 8 --m 64 --m 1024
nondet probe-all-reduce probe all-reduce --ranks "${worlds//:/,}"
part tests env -u NONDET_RANKS_LIMIT_S "$python" -m pytest -q -p no:cacheprovider tests/ranks/test_group.py
# what it costs end to end, implementations in turn round by round
n=64 turns=targets=8
[ "$device" = cuda ] && n=320 turns=targets=32,budget=512
for world in ${worlds//:/ }; do
    nondet "turns-$world" sample --turns --ranks "$world" --impl stock --impl invariant --impl rank-free \
        --model "$model" --n "$n" --load "others=0,spread=1,$turns"
done
exit "$left"
