"""The default sizes of `nondet certify`: layers of common models, odd sizes, and batches where kernels change."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES", "Heads", "Sizes"]


@dataclass(frozen=True)
class Heads:
    """Heads of an attention, and how many requests there are; `default` without --full, of other dtypes the first."""

    query: int
    key: int
    dim: int
    requests: int = 3
    default: bool = True
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Sizes:
    """The default list of one device type.

    Attributes:
        layers: dtype -> (name, K, N) of linear layers. The first dtype gets every batch size and every member.
        odd: (K, N) that are multiples of no tile.
        batched: (K, N) of a batched product.
        batches: Rows; tiles, waves and libraries' heuristics change there, and the odd ones leave tails.
        few_batches: For everything but the main layout.
        widths: Of operators over rows. The first is also asked in strided rows.
        row_elements: Most elements of a batch of rows.
        experts: (experts, K, N).
        tokens: Of an attention's prompts.
        chunks: Of a prefill.
    """

    layers: dict[str, tuple[tuple[str, int, int], ...]]
    odd: tuple[int, int]
    batched: tuple[int, int]
    batches: tuple[int, ...]
    few_batches: tuple[int, ...]
    widths: tuple[int, ...]
    row_batches: tuple[int, ...]
    row_elements: int
    experts: tuple[tuple[int, int, int], ...]
    heads: tuple[Heads, ...]
    attention_dtypes: tuple[str, ...]
    tokens: int
    chunks: tuple[int, ...]


_QWEN_SMALL = ("Qwen3-0.6B down_proj", 3072, 1024)

SIZES: dict[str, Sizes] = {
    "cuda": Sizes(
        layers={
            "bfloat16": (
                ("Qwen3-8B qkv_proj", 4096, 6144),
                ("Qwen3-8B o_proj", 4096, 4096),
                ("Qwen3-8B down_proj", 12288, 4096),
                _QWEN_SMALL,
                ("Qwen3-0.6B gate_proj up_proj", 1024, 3072),
                ("Llama-3.2-1B down_proj", 8192, 2048),
            ),
            "float16": (("Qwen3-8B o_proj", 4096, 4096), _QWEN_SMALL),
            "float32": (_QWEN_SMALL,),
            "float64": (("", 512, 384),),
        },
        odd=(1000, 777),
        batched=(128, 1024),
        batches=(1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 255, 256, 384, 513, 1024, 2048, 4096),
        few_batches=(1, 2, 7, 16, 17, 33, 64, 129, 300, 1024),
        widths=(4096, 1000, 128, 151936),
        row_batches=(1, 2, 3, 4, 7, 8, 15, 16, 17, 64, 100, 512),
        row_elements=2**24,
        experts=((16, 2048, 768), (8, 1000, 264)),
        heads=(
            Heads(8, 2, 128),
            Heads(4, 4, 64),
            Heads(4, 1, 256, default=False),
            Heads(4, 2, 96, default=False),
        ),
        attention_dtypes=("bfloat16", "float16"),
        tokens=1100,
        chunks=(128, 100),
    ),
    "cpu": Sizes(
        layers={
            "bfloat16": (("Qwen3-0.6B gate_proj up_proj", 1024, 3072), ("", 768, 2048), ("", 1000, 1024)),
            "float32": (("Qwen3-0.6B o_proj", 2048, 1024), ("", 768, 2048)),
            "float16": (("", 1024, 1024),),
        },
        odd=(333, 217),
        batched=(128, 192),
        batches=(1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 65, 100, 128),
        few_batches=(1, 2, 7, 16, 17, 33, 64),
        widths=(1024, 1000, 128),
        row_batches=(1, 2, 3, 4, 7, 8, 15, 16, 17, 64, 100),
        row_elements=2**22,
        experts=((4, 256, 192),),
        heads=(Heads(4, 2, 64), Heads(2, 2, 128, default=False)),
        attention_dtypes=("bfloat16", "float32"),
        tokens=200,
        chunks=(64, 50, 17),
    ),
}
