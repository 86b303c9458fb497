"""nondet's kernels under vLLM, through its entry point `vllm.general_plugins`; the user's guide is docs/engines.md.

Importing this package imports neither torch nor vLLM. vLLM calls `plugin` in each of its processes; with
NONDET_BATCH_INVARIANT=1 that loads `operators` and `attention`.
"""

from nondet.engines import ENABLED as ENABLED
from nondet.engines import WRITTEN as WRITTEN

OWN = "VLLM_BATCH_INVARIANT"  # vLLM's own mode


def log(text: str) -> None:
    """A line of vLLM's log."""
    from vllm.logger import init_logger

    init_logger("vllm.nondet").info("nondet: %s", text)
