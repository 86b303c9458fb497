#!/usr/bin/env bash
# From a bare machine to a report: an environment, a diagnosis of the embedded model, every operator probe, 1,000
# completions of one prompt with stock and with batch-invariant kernels, and both reports. Takes the GPU if there is one. Run again, it makes new run files.
source "$(dirname "$0")/environment.sh"
install ""
nondet="$VENV/bin/nondet"
stamp=$(date +%Y%m%d-%H%M%S)
out="runs/quickstart-$stamp"

"$nondet" diagnose --out "$out-diagnose.jsonl"
"$nondet" probe all --out "$out-probes.jsonl"
"$nondet" sample --n 1000 --impl both --out "$out-sample.jsonl"
"$nondet" report "$out-diagnose.jsonl" "$out-sample.jsonl" "$out-probes.jsonl" --out "$out.html" --out "$out.md"
