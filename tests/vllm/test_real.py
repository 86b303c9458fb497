"""The seams of a real vLLM, where one is installed: `pytest -m vllm tests/vllm`, in an environment that has 0.25.1."""

from __future__ import annotations

import importlib.util
from operator import attrgetter
from typing import Any

import pytest

from nondet.errors import UserError
from nondet.vllm import plugin
from scripts.vllm_load import made_folder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_every_seam_fits() -> None:
    """By signature, the attention backend's base classes among them; nothing is patched."""
    found = plugin.check_seams()
    assert set(found) == {seam.place for seam in plugin.SEAMS}
    from nondet.vllm.attention import SegmentsBackend

    assert SegmentsBackend.get_name() == "CUSTOM"


def test_the_operators_take_its_registration() -> None:
    """vLLM infers their schemas."""
    from vllm.utils.torch_utils import direct_register_custom_op

    from nondet.vllm.operators import OPERATORS

    for name, (compute, shape) in OPERATORS.items():
        direct_register_custom_op(f"{name}_tested", compute, fake_impl=shape)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"enable_lora": True}, "LoRA adapters"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding",
        ),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of fp8"),
        ({"cpu_offload_gb": 1}, "offloaded weights"),
        ({"offload_backend": "prefetch", "offload_group_size": 2}, "offloaded weights"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "a transfer of KV caches"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "a transfer of weights"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"dtype": "float32"}, "torch.float32 as the model's dtype"),
    ],
)
def test_what_is_refused_is_where_its_configuration_has_it(given: dict[str, Any], named: str) -> None:
    """A name that this vLLM has elsewhere would be a refusal that never comes."""
    from vllm.engine.arg_utils import EngineArgs

    plain = {"model": made_folder("tiny"), "skip_tokenizer_init": True, "dtype": "bfloat16", "load_format": "dummy"}
    plugin.refuse(EngineArgs(**plain).create_engine_config())
    with pytest.raises(UserError, match=f"does not cover {named}"):
        plugin.refuse(EngineArgs(**(plain | given)).create_engine_config())


def test_what_no_cpu_can_be_asked_for_is_where_its_configuration_has_it() -> None:
    """Refused on a GPU; here vLLM itself refuses or drops it."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=made_folder("tiny"), skip_tokenizer_init=True, load_format="dummy").create_engine_config()
    for name in ("model_config.use_mla", "model_config.enable_sleep_mode", "parallel_config.enable_dbo"):
        assert attrgetter(name)(config) is False
    assert attrgetter("parallel_config.ubatch_size")(config) == 0
    for name in ("decode_context", "prefill_context", "tensor", "pipeline"):
        assert attrgetter(f"parallel_config.{name}_parallel_size")(config) == 1
    assert attrgetter("parallel_config.world_size")(config) == 1
    assert attrgetter("cache_config.block_size")(config) > 0
