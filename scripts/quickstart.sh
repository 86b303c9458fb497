#!/usr/bin/env bash
# From a bare machine to a report: an environment, a diagnosis of the embedded model, every operator probe, 1,000
# completions of one prompt with stock and with batch-invariant kernels, and one report of all three. Takes the GPU if
# there is one. Run again, it makes new run files.
source "$(dirname "$0")/environment.sh"
install ""
nondet="$VENV/bin/nondet"
out="runs/quickstart-$(date +%Y%m%d-%H%M%S)"

part() { # part NAME TITLE COMMAND...: progress meanwhile, then what was found, which is its last paragraph
    printf '\n%s\n' "$2"
    "$nondet" "${@:3}" --out "$out-$1.jsonl" | awk 'BEGIN { RS = "" } { found = $0 } END { print found }'
}

echo "Three questions, about 3 minutes on two CPU cores and 2 on a GPU. The first answer comes within one."
part diagnose "1 of 3: does the model's output depend on its batch, where, why, and what is the cure?" diagnose
part probes "2 of 3: which operators depend on their batch?" probe all
part sample "3 of 3: 1,000 completions under load, with stock and with batch-invariant kernels" \
    sample --n 1000 --impl both --max-tokens 32
"$nondet" report "$out-diagnose.jsonl" "$out-sample.jsonl" "$out-probes.jsonl" --out "$out.html" --out "$out.md" -q
echo
echo "Report: $out.html, $out.md"
