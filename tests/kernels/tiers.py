"""What tests of kernels share: what runs by default, and the full way of a call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    """A test of a GPU's, for compute capability 9.0 alone."""
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")(test))


def exposed(block: Any) -> list[str]:
    """What a block left to torch, and what is at risk in it."""
    return [*block.coverage().left, *block.coverage().at_risk]


def at_length(*values: Any) -> list[Any]:
    """These only in a run at length (`nightly`); a tuple stands for several arguments."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.nightly) for v in values]


def tiny(kind: str, how: dict[str, Any] | None = None, *, seed: int = 0, **own: Any) -> Any:
    """A transformers model of random weights, small unless `own` says otherwise; `how` it computes."""
    import transformers  # seconds, which most tests of kernels need not wait

    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(sizes | ends | own))
    return transformers.AutoModelForCausalLM.from_config(config, **(how or {})).eval()


def untouched(count: int) -> torch.Tensor:
    """Room for so many float16 numbers of which few are ever touched, as a CPU's allocator allows; else a skip."""
    if torch.cuda.is_available():
        pytest.skip("a GPU's allocator takes all of it")
    try:
        return torch.empty(count, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system gives no 4 GiB of memory that is not touched")


@contextmanager
def in_full() -> Iterator[None]:
    """Each call goes through its replacement: no decision is looked up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nondet.kernels.dispatch.functions.call_key", lambda *call: ())
        yield


def captured(call: Callable[..., Any], *given: Any, **how: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the call, and what it gives whenever the graph is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*given, **how)
    return graph, out
