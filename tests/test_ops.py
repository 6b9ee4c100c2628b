"""The public calls refuse what doesn't fit, by name and before anything runs, and take NumPy and torch alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arguments import block_arguments, tkg_arguments
from test_conv1d import conv_arguments

import gdn_kernels
from gdn_kernels import BackendUnavailable, BlockDims, backends, gdn_block_tkg, gdn_conv1d_decode, gdn_tkg

CALLS: dict[str, tuple[Callable[..., Any], dict[str, np.ndarray]]] = {
    "block": (gdn_block_tkg, block_arguments(BlockDims(256, 2, 4, 32, 16, 4), 3)),
    "block fp32": (gdn_block_tkg, block_arguments(BlockDims(256, 2, 4, 32, 16, 4), 3, "fp32")),
    "tkg": (gdn_tkg, tkg_arguments(3, 4, 32, 16)),
    "conv1d": (gdn_conv1d_decode, conv_arguments(3, 10, 4, "bf16", 0)),
}
EVERY = [(call, name) for call, (_, arguments) in CALLS.items() for name in arguments]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """In these tests a kernel that starts is a failure, unless a test asks for it."""
    if "runs" not in request.keywords:
        monkeypatch.setattr(backends, "run", lambda *_: pytest.fail("a kernel ran"))


@pytest.mark.parametrize(("call", "name"), EVERY)
def test_a_wrong_size_of_any_axis_is_named(call: str, name: str) -> None:
    function, arguments = CALLS[call]
    for axis, size in enumerate(arguments[name].shape):
        for wrong in (size + 1, size - 1):
            shape = list(arguments[name].shape)
            shape[axis] = wrong
            with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
                function(**{**arguments, name: np.zeros(shape, arguments[name].dtype)})
            assert str(wrong) in str(caught.value), "the message says what came"


@pytest.mark.parametrize(("call", "name"), EVERY)
def test_a_wrong_rank_is_named(call: str, name: str) -> None:
    function, arguments = CALLS[call]
    with pytest.raises(ValueError, match=rf"^{name} must have shape"):
        function(**{**arguments, name: arguments[name][None]})


@pytest.mark.parametrize(("call", "name"), EVERY)
def test_a_wrong_dtype_is_named(call: str, name: str) -> None:
    function, arguments = CALLS[call]
    for dtype in (np.float64, np.float16, np.int32, np.float32, np.bool_):
        if dtype != arguments[name].dtype:
            with pytest.raises(ValueError, match=rf"\b{name}.* must be .*(bfloat16|float32).*got .*{np.dtype(dtype)}"):
                function(**{**arguments, name: arguments[name].astype(dtype)})


@pytest.mark.parametrize(("call", "name"), EVERY)
def test_a_strided_argument_is_named(call: str, name: str) -> None:
    function, arguments = CALLS[call]
    twice = np.repeat(arguments[name], 2, axis=-1)[..., ::2]
    if twice.flags.c_contiguous:
        pytest.skip("a last axis of one element has no stride")
    with pytest.raises(ValueError, match=rf"^{name} must be C-contiguous"):
        function(**{**arguments, name: twice})


@pytest.mark.parametrize(("call", "name"), EVERY)
def test_something_else_than_an_array_is_named(call: str, name: str) -> None:
    function, arguments = CALLS[call]
    with pytest.raises(ValueError, match=rf"^{name} must be a NumPy array or a torch tensor, got list"):
        function(**{**arguments, name: arguments[name].tolist()})


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"H": 192}, "hidden .*H must be a multiple of 128, got 192"),
        ({"K": 160}, "recurrent_state .*K must be at most 128, got 160"),
        ({"V": 129}, "recurrent_state .*V must be at most 128, got 129"),
        ({"K_win": 9}, "conv_weight .*K_win must be 2 to 8, got 9"),
        ({"K_win": 1}, "conv_weight .*K_win must be 2 to 8, got 1"),
    ],
)
def test_consistent_shapes_that_the_kernel_does_not_take_are_refused(dims: dict[str, int], message: str) -> None:
    """Built by hand, as BlockDims would refuse them first."""
    sizes = {"H": 256, "Hk": 2, "Hv": 4, "K": 32, "V": 16, "K_win": 4, **dims}
    conv_dim = 2 * sizes["Hk"] * sizes["K"] + sizes["Hv"] * sizes["V"]
    symbols = {**sizes, "B": 2, "conv_dim": conv_dim, "value_dim": sizes["Hv"] * sizes["V"]}
    template = CALLS["block"][1]
    arguments = {
        name: np.zeros([symbols.get(str(s), s) for s in shape], template[name].dtype)
        for name, shape in gdn_kernels.dims.BLOCK_SHAPES.items()
    }
    with pytest.raises(ValueError, match=message):
        gdn_block_tkg(**arguments)


def test_hv_that_is_no_multiple_of_hk_is_refused() -> None:
    arguments = block_arguments(BlockDims(128, 1, 5, 32, 16, 4), 1)
    for name, axis in (("W_in_qkv", 1), ("conv_weight", 0), ("conv_state", 1)):
        array = arguments[name]
        extra = np.repeat(np.take(array, [0], axis), 64, axis)  # a second key head
        arguments[name] = np.ascontiguousarray(np.concatenate([extra, array], axis))
    with pytest.raises(ValueError, match="Hv must be a multiple of Hk, got Hv = 5, Hk = 2"):
        gdn_block_tkg(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_eps": 0.0}, "norm_eps must be a number from"),
        ({"norm_eps": -1e-6}, "norm_eps must be a number from"),
        ({"norm_eps": float("nan")}, "norm_eps must be a number from"),
        ({"norm_eps": "1e-6"}, "norm_eps must be a number from"),
        ({"lnc": 3}, "lnc must be 1, 2 or None, got 3"),
        ({"lnc": True}, "lnc must be 1, 2 or None, got True"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    for call in ("block", "tkg"):
        function, arguments = CALLS[call]
        with pytest.raises(ValueError, match=message):
            function(**arguments, **options)


def test_a_window_of_k_win_minus_1_columns_is_refused() -> None:
    function, arguments = CALLS["block"]
    with pytest.raises(ValueError, match=r"conv_state must have shape .*got .*3"):
        function(**{**arguments, "conv_state": np.ascontiguousarray(arguments["conv_state"][..., 1:])})


@pytest.mark.runs
def test_an_unknown_or_unavailable_backend_says_so() -> None:
    function, arguments = CALLS["tkg"]
    with pytest.raises(ValueError, match="backend must be auto, trn2, simulate or interpreter, got 'gpu'"):
        function(**arguments, backend="gpu")
    for backend in backends.available():
        if not backend.available:
            with pytest.raises(BackendUnavailable, match=rf"{backend.name}' is not available: .*install"):
                function(**arguments, backend=backend.name)


@pytest.mark.runs
@pytest.mark.parametrize("call", CALLS)
def test_torch_in_torch_out_with_the_same_bytes(call: str) -> None:
    torch = pytest.importorskip("torch")
    from gdn_kernels.interpreter.torch_arrays import to_numpy, to_torch

    function, arguments = CALLS[call]
    tensors = {name: to_torch(array.copy()) for name, array in arguments.items()}
    results = function(**tensors)
    for result, expected in zip(results, function(**arguments), strict=True):
        assert isinstance(result, torch.Tensor)
        assert to_numpy(result).tobytes() == expected.tobytes()
    per_row = ("x", "conv_state", "hidden", "recurrent_state")
    empty = {name: tensor[:0] if name in per_row else tensor for name, tensor in tensors.items()}
    if call != "tkg":
        assert all(isinstance(result, torch.Tensor) and result.shape[0] == 0 for result in function(**empty))


def test_a_mix_of_numpy_and_torch_and_strided_tensors_are_named() -> None:
    pytest.importorskip("torch")
    from gdn_kernels.interpreter.torch_arrays import to_torch

    function, arguments = CALLS["block"]
    with pytest.raises(ValueError, match="A_log must be a numpy array like the other arguments, got a torch one"):
        function(**{**arguments, "A_log": to_torch(arguments["A_log"])})
    tensors = {name: to_torch(array) for name, array in arguments.items()}
    with pytest.raises(ValueError, match="W_in_z must be C-contiguous"):
        function(**{**tensors, "W_in_z": tensors["W_in_z"].T.contiguous().T})
    with pytest.raises(ValueError, match="conv_weight must be float32, got bfloat16"):
        function(**{**tensors, "conv_weight": tensors["conv_weight"].bfloat16()})
