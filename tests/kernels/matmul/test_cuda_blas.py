"""What the library is told about a product, and which of its algorithms are let through."""

from __future__ import annotations

import ctypes

import pytest
import torch

from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul.cublaslt import BlasError, Problem, problem_of


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def problem(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Problem:
    found = problem_of(a, b, bias, False)
    assert found is not None
    return found


def test_layouts_are_told_apart():
    """The library chooses by layout, so a proof for one must not be taken for another's."""
    x, weight = half(1, 8, 64), half(32, 64)
    assert problem(x, weight.T[None]).layout() == "nt"
    assert problem(x, half(1, 64, 32)).layout() == "nn"
    assert problem(half(1, 64, 8).mT, half(1, 64, 32)).layout() == "tn"
    sliced = half(1, 8, 96)[:, :, :64]
    assert problem(sliced, weight.T[None]).layout() == "nt a=96"
    assert (problem(sliced, weight.T[None]).lda, problem(x, weight.T[None]).lda) == (96, 64)
    stacked = half(3, 8, 64)
    assert problem(stacked, half(3, 64, 32)).layout() == "nn"
    assert problem(stacked[::2], half(2, 64, 32)).layout() == "nn a=64,1024"


def test_sizes_of_one_have_a_valid_distance():
    """A stride over an axis of size 1 means nothing, and the library refuses a distance below the row's length."""
    row = half(5, 64)[2:3, :][None]
    column = half(64, 5)[:, 2:3][None]
    for a, b in ((row, column), (row.expand(1, 1, 64), half(1, 64, 3)), (half(1, 3, 1), half(1, 1, 7))):
        found = problem(a, b)
        assert found.lda >= (found.k if found.a_rows else found.m)
        assert found.ldb >= (found.n if found.b_rows else found.k)


def test_what_the_library_cannot_take_is_no_problem():
    """Strided both ways, overlapping, empty, or another dtype: left to Triton, not copied and not miscomputed."""
    weight = half(64, 32)[None]
    assert problem_of(half(1, 8, 128)[:, :, ::2], weight, None, False) is None
    assert problem_of(half(1, 1, 64).expand(1, 8, 64), weight, None, False) is None
    assert problem_of(half(1, 0, 64), weight, None, False) is None
    assert problem_of(half(1, 8, 64).double(), weight.double(), None, False) is None
    assert problem_of(half(2, 8, 64), half(2, 64, 32), half(32), False) is None
    assert problem_of(half(1, 8, 64), weight, half(64)[::2], False) is None
    assert problem(half(1, 8, 64), weight, half(32)).bias


class FakeFunction:
    """A library's function: remembers what it was called with, and answers by writing through the pointers."""

    def __init__(self, answer):
        self.answer = answer
        self.argtypes: object = None

    def __call__(self, *arguments):
        """Answer; nothing means success."""
        return self.answer(*arguments) or 0


class FakeLibrary:
    """As much of cuBLASLt as is called; three algorithms, of which the second splits K and the third reduces."""

    SETTINGS = ({2: 1, 3: 0}, {2: 4, 3: 0}, {2: 1, 3: 2})

    def __init__(self) -> None:
        self.masks: list[int] = []
        self.workspaces: list[int] = []
        self.launched: list[tuple[object, ...]] = []
        self.status = 0

    def __getattr__(self, name: str) -> FakeFunction:
        handlers = {
            "cublasLtMatmulPreferenceSetAttribute": self.prefer,
            "cublasLtMatmulAlgoGetHeuristic": self.offer,
            "cublasLtMatmulAlgoConfigGetAttribute": self.tell,
            "cublasLtMatmul": self.launch,
        }
        return FakeFunction(handlers.get(name, lambda *unused: 0))

    def prefer(self, preference, attribute, at, size):
        """Remember the mask and the room."""
        if attribute == 3:
            self.masks.append(ctypes.c_uint32.from_address(at).value)
        if attribute == 1:
            self.workspaces.append(ctypes.c_uint64.from_address(at).value)

    def offer(self, handle, desc, a, b, c, d, preference, count, found_at, returned):
        """Three algorithms, numbered."""
        found = (cublaslt.Heuristic * count).from_address(found_at)
        for i in range(min(count, 3)):
            found[i].algo[0] = i
        returned._obj.value = min(count, 3)

    def tell(self, algo_at, attribute, value_at, size, written):
        """What an algorithm says about itself."""
        number = ctypes.c_uint64.from_address(algo_at).value
        ctypes.c_uint32.from_address(value_at).value = self.SETTINGS[number].get(attribute, 9)

    def launch(self, *arguments):
        """Remember the call."""
        self.launched.append(arguments)
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(cublaslt, "library", lambda: fake)
    monkeypatch.setattr(cublaslt, "handle_of", lambda index: ctypes.c_void_p(7))
    monkeypatch.setattr(cublaslt, "_descriptors", cublaslt._Descriptors)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 11, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: __import__("contextlib").nullcontext())
    return fake


def test_split_k_is_forbidden_and_checked(library):
    """The mask forbids it, no room is given for partial sums, and an algorithm that says it splits is dropped."""
    found = cublaslt.algorithms(problem(half(1, 8, 64), half(1, 64, 32)), 0, 8)
    assert library.masks == [0]
    assert library.workspaces[0] < 1024
    assert [one.rank for one in found] == [0]
    assert str(found[0]).startswith("9.9.9.")


def test_the_library_is_asked_for_the_transposed_product(library):
    """The library thinks in columns: b comes first, then a; the result goes to `out`, on the current stream."""
    a, b, out = half(1, 8, 64), half(1, 64, 32), half(1, 8, 32)
    asked = problem(a, b)
    product = cublaslt.Product(asked, 0, cublaslt.algorithms(asked, 0)[0])
    product(a, b, None, out)
    (arguments,) = library.launched
    assert (arguments[3], arguments[5]) == (b.data_ptr(), a.data_ptr())
    assert (arguments[8], arguments[10]) == (out.data_ptr(), out.data_ptr())
    assert arguments[-1] == 11
    library.status = 15
    with pytest.raises(BlasError, match="15"):
        product(a, b, None, out)


def test_without_a_library_nothing_is_offered(monkeypatch):
    """A build of torch without CUDA says so instead of failing later."""
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    assert not cublaslt.available()
    monkeypatch.setattr("nondet.core.environment.cublaslt", lambda: None)
    assert cublaslt.version() == 0
    with pytest.raises(BlasError, match="no cuBLASLt"):
        cublaslt.do("cublasLtCreate")
