# Sourced by quickstart.sh and test.sh: makes .venv beside the README, once, with the pinned versions.
# PYTHON names another interpreter; NONDET_VENV another place; TORCH what pip is told to install as torch, options and all.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${NONDET_VENV:-.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "nondet needs Python 3.11 or newer; '$PYTHON' is $("$PYTHON" --version 2>&1 || true). Set PYTHON=/path/to/python3.11." >&2
    exit 2
fi
if [ ! -x "$VENV/bin/python" ]; then
    echo "Making an environment in $VENV" >&2
    "$PYTHON" -m venv "$VENV" || { echo "python's venv module failed; on Debian: apt-get install python3-venv" >&2; exit 2; }
fi

# install EXTRAS: torch by name first, so that its pin decides and nothing drags in another build of it
install() {
    if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
        echo "Installing PyTorch: from PyPI, on Linux, that is the CUDA build (about 5 GB on disk). TORCH names another, as" >&2
        echo "TORCH='torch --index-url https://download.pytorch.org/whl/cpu' for PyTorch's own CPU builds." >&2
        # shellcheck disable=SC2086 # options are words of their own
        "$VENV/bin/python" -m pip install -q -c constraints.txt ${TORCH:-torch} 2> >(grep -v "^WARNING" >&2)
    fi
    echo "Installing nondet$1" >&2
    "$VENV/bin/python" -m pip install -q -c constraints.txt -e ".$1" 2> >(grep -v "^WARNING" >&2)
}
