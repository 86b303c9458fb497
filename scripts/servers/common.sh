# Sourced by serve_vllm.sh, serve_llamacpp.sh and serve_transformers.sh: one real server each, on loopback, holding
# nondet's embedded model, in an environment of its own outside of the repository.
#   serve_X.sh            set up what is missing, start, wait until it answers; the last line on stdout is its URL
#   serve_X.sh --setup    only set up
#   serve_X.sh --stop     end the server that this script started, by process id
#   serve_X.sh --url      the URL of the running server; exit 1 if there is none
# NONDET_SERVERS names the folder of the environments (~/.cache/nondet-servers), PORT the port (a free one), NICE the
# niceness of the server (5), WAIT the most seconds to wait for its first answer (600), PYTHON the interpreter that
# environments are made with, TORCH what pip is told to install as torch (torch==2.13.0).

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
SERVERS=${NONDET_SERVERS:-$HOME/.cache/nondet-servers}
TORCH=${TORCH:-torch==2.13.0}
WAIT=${WAIT:-600}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# nothing is fetched from a hub and nobody is told of the use
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1
# a server under test must not inherit the keys of whoever tests it
unset NONDET_API_KEY OPENAI_API_KEY HF_TOKEN

say() { echo "$@" >&2; }

# environment NAME: a virtual environment at $SERVERS/NAME; VENV is set
environment() {
    VENV=$SERVERS/$1
    mkdir -p "$SERVERS"
    if [ ! -x "$VENV/bin/python" ]; then
        say "Making an environment in $VENV"
        "$PYTHON" -m venv "$VENV"
    fi
}

pip() { nice "$VENV/bin/python" -m pip "$@" -q 2> >(grep -v "^WARNING" >&2); }

# served_model DEST: the embedded model as a Hugging Face folder, with a chat template that says nothing but the message
# (the model was never trained on chats; with it, /v1/chat/completions and /v1/completions see the same tokens)
served_model() {
    mkdir -p "$1"
    cp nondet/embedded/{config.json,generation_config.json,model.safetensors,tokenizer.json,tokenizer_config.json} "$1"
    printf '%s' "{% for message in messages %}{{ message['content'] }}{% endfor %}" > "$1/chat_template.jinja"
}

# started PID: when the kernel says that the process began, so that a number used again is not taken for ours
started() { sed 's/.*) //' "/proc/$1/stat" 2> /dev/null | cut -d ' ' -f 20; }

# running NAME: true if the server that this script started is alive; PID is set
running() {
    local began
    [ -f "$SERVERS/$1.pid" ] || return 1
    read -r PID began < "$SERVERS/$1.pid"
    [ -n "$began" ] && [ "$(started "$PID")" = "$began" ]
}

stop() {
    if running "$1"; then
        kill -TERM "$PID" 2> /dev/null || true
        for _ in $(seq 60); do
            running "$1" || break
            sleep 0.5
        done
        # the server is the leader of a session of its own: what it left behind ends with it
        kill -KILL -- "-$PID" 2> /dev/null || true
    fi
    rm -f "$SERVERS/$1.pid" "$SERVERS/$1.url"
}

free_port() { "$VENV/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# answers URL MODEL: true if one token comes back
answers() {
    "$VENV/bin/python" - "$1" "$2" 2> /dev/null <<'PY'
import json, sys, urllib.request
body = json.dumps({"model": sys.argv[2], "prompt": "For", "max_tokens": 1, "temperature": 0}).encode()
request = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
with opener.open(request, timeout=60) as reply:
    sys.exit("choices" not in json.load(reply))
PY
}

# start NAME MODEL COMMAND...: in the background, in a session of its own, its output in $SERVERS/NAME.log
start() {
    local name=$1 model=$2 url=http://127.0.0.1:$PORT deadline=$((SECONDS + WAIT))
    shift 2
    say "Starting $name on $url (its log: $SERVERS/$name.log)"
    setsid nice -n "${NICE:-5}" "$@" > "$SERVERS/$name.log" 2>&1 < /dev/null &
    echo "$! $(started $!)" > "$SERVERS/$name.pid"
    until answers "$url" "$model"; do
        if ! running "$name" || [ $SECONDS -ge $deadline ]; then
            say "$name did not answer; the end of its log:"
            tail -n 20 "$SERVERS/$name.log" >&2
            stop "$name"
            exit 1
        fi
        sleep 1
    done
    echo "$url" > "$SERVERS/$name.url"
    echo "$url"
}

# control NAME OPTION: what needs no new server; ends the script if that was all
control() {
    case ${2:-} in
        --stop) stop "$1"; exit ;;
        --url) if running "$1" && [ -f "$SERVERS/$1.url" ]; then cat "$SERVERS/$1.url"; exit; fi; exit 1 ;;
        --setup | "") ;;
        *) say "usage: $0 [--setup | --stop | --url]"; exit 2 ;;
    esac
    if [ "${2:-}" = "" ] && running "$1"; then
        if [ -f "$SERVERS/$1.url" ]; then cat "$SERVERS/$1.url"; exit; fi
        say "$1 is being started by another call (process $PID)"; exit 1
    fi
}
