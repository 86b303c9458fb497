#!/usr/bin/env bash
# Traces and replays as evidence, on the GPU of this machine: run files, reports and logs in FOLDER.
# Usage: bash lab/trace_gpu.sh FOLDER [DEVICE]      (DEVICE: cuda, or cpu)
# Each part has a time limit, and one that fails does not keep the others from running; the last line says which did.
set -uo pipefail
folder=${1:?usage: bash lab/trace_gpu.sh FOLDER [DEVICE]}
device=${2:-cuda}
python=${PYTHON:-python}
mkdir -p "$folder"
failed=()

part() { # part NAME SECONDS ARGUMENTS...
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    timeout "$limit" "$python" -m nondet "$@" >"$folder/$name.txt" 2>"$folder/$name.log" || failed+=("$name ($?)")
    echo "$name: $((SECONDS - began)) s: $(tail -n 1 "$folder/$name.log")"
}

traced() { # traced NAME SECONDS ARGUMENTS...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" trace --device "$device" --force --out "$folder/$name.jsonl" --report "$folder/$name.md" \
        --report "$folder/$name.html" --repro "$folder/$name.repro.py" "$@"
}

# the embedded model, the default prompt and load
traced trace-embedded 110
# a random model of 12 layers, 1,024 wide: whatever is guilty there, until the arms agree
traced trace-random 110 --model random:qwen3-12x1024 --load light,targets=6 --max-tokens 24
# one verdict on the embedded model: eight steps, and the guilty operator's probe at the shapes met
part diagnose 150 diagnose --device "$device" --force --out "$folder/diagnose.jsonl" --report "$folder/diagnose.md" \
    --report "$folder/diagnose.html"
part probe-from-trace 90 probe --from-trace "$folder/diagnose.jsonl" --device "$device" --force \
    --out "$folder/probe-from-trace.jsonl" --report "$folder/probe-from-trace.md"
# one round of completions with its tape
part sample 90 sample --device "$device" --n 40 --impl stock --max-tokens 32 --force --out "$folder/sample.jsonl"
# all that part, again bit for bit
part replay 60 replay "$folder/sample.jsonl" --request divergent --force --out "$folder/replay.jsonl" \
    --report "$folder/replay.md"
# two of them alone, and in the smallest company in which they still part
part shrink 110 replay "$folder/sample.jsonl" --request divergent --most 2 --solo --shrink --force \
    --out "$folder/shrink.jsonl" --report "$folder/shrink.md"
# one as recorded, traced
first=$("$python" - "$folder/replay.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    record = json.loads(line)
    if record["type"] == "replayed":
        print(record["request"])
        break
PY
)
part trace-recorded 60 trace --run "$folder/sample.jsonl" --request "${first:-t000000}" --force \
    --out "$folder/trace-recorded.jsonl" --report "$folder/trace-recorded.md"

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all parts ran, in $SECONDS s"
