#!/usr/bin/env bash
# `transformers serve` with continuous batching, holding the embedded model.
# See scripts/servers/common.sh for options. SERVE_ARGS are further arguments of `transformers serve`.
source "$(dirname "$0")/servers/common.sh"
version=5.23.0
control transformers "${1:-}"
environment transformers-serve

if [ ! -f "$VENV/ready-$version" ]; then
    say "Installing transformers $version with its server"
    # shellcheck disable=SC2086 # options are words of their own
    pip install $TORCH
    pip install "transformers[serving]==$version"
    touch "$VENV/ready-$version"
fi
if [ "${1:-}" = --setup ]; then exit; fi

# the folder's name is the model's name: this server knows no other. A cache of 32,768 tokens: left alone, it takes half
# of the machine's memory
served_model "$SERVERS/nondet-embedded"
PORT=${PORT:-$(free_port)}
# shellcheck disable=SC2086 # arguments are words of their own
start transformers "$SERVERS/nondet-embedded" "$VENV/bin/transformers" serve "$SERVERS/nondet-embedded" \
    --host 127.0.0.1 --port "$PORT" --device cpu --dtype bfloat16 --continuous-batching --cb-block-size 32 \
    --cb-num-blocks 1024 ${SERVE_ARGS:-}
