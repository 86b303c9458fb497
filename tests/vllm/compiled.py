"""A vLLM on a CPU, compiled, with nondet's products and norms in place: what runs at start is looked for.

    python tests/vllm/compiled.py ours|theirs

Our operators compute as torch does here, since their kernels are a GPU's. "theirs" leaves a norm without a residual to
vLLM's own implementation, as a pass that rewrites the compiled model does. Ends with what `check_all_ran` says.
"""

from __future__ import annotations

import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_DISABLE_COMPILE_CACHE="1",
)  # fmt: skip

import torch
import torch.nn.functional as F
from vllm import LLM
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.worker.cpu_worker import CPUWorker

from lab.vllm_load import made_folder
from nondet.errors import UserError
from nondet.vllm import operators, plugin


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    operators.note(weight)
    return F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    operators.note(weight)
    return F.rms_norm(x, weight.shape, weight, epsilon)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    operators.note(weight)
    whole = x + residual
    return F.rms_norm(whole, weight.shape, weight, epsilon), whole


def main(norms: str) -> None:
    for compute in (product, rms_norm, add_rms_norm):
        name = f"nondet_{compute.__name__}"
        direct_register_custom_op(name, compute, fake_impl=operators.OPERATORS[name][1], dispatch_key="CPU")
    stock = RMSNorm.forward_native
    plugin.install_norms()
    ours = RMSNorm.forward_native

    def mixed(self, x, residual=None):  # type: ignore[no-untyped-def] # as vLLM's
        return stock(self, x) if residual is None else ours(self, x, residual)

    if norms == "theirs":
        RMSNorm.forward_native = RMSNorm.forward_cuda = mixed
        plugin.METHODS[mixed] = plugin.METHODS[ours]

    def apply(self, layer, x, bias=None):  # type: ignore[no-untyped-def] # as the plugin's own
        return torch.ops.vllm.nondet_product(x, layer.weight, bias)

    plugin.METHODS[apply] = plugin.REPLACED, plugin.PRODUCTS
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.apply = apply
        method.process_weights_after_loading = lambda self, layer: None  # on a CPU: another layout, and no weight
    load, warm_up = CPUWorker.load_model, CPUWorker.compile_or_warm_up_model

    def load_model(self, *given, **named):  # type: ignore[no-untyped-def] # whatever a CPU's takes
        load(self, *given, **named)
        operators.watch()

    def compile_or_warm_up_model(self):  # type: ignore[no-untyped-def]
        done = warm_up(self)
        model = self.model_runner.get_model()
        found = [plugin.standing_of(name, module, plugin.Standing) for name, module in model.named_modules()]
        try:
            plugin.check_all_ran(model, [one for one in found if one is not None])
            sys.stdout.write("all met\n")
        except UserError as error:
            sys.stdout.write(f"{error}\n")
        return done

    CPUWorker.load_model, CPUWorker.compile_or_warm_up_model = load_model, compile_or_warm_up_model
    LLM(
        model=made_folder("tiny"), skip_tokenizer_init=True, dtype="bfloat16", load_format="dummy", max_model_len=128,
        compilation_config={"custom_ops": ["+silu_and_mul", "+rotary_embedding"]},
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
