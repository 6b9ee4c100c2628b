"""Reading a layer from checkpoints that the tests write: K != V, several layers, both name prefixes, other packings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels import reference
from gdn_kernels.checkpoint import model_preset
from gdn_kernels.dims import MODELS, BlockDims
from gdn_kernels.dtypes import bfloat16, to_fp32
from gdn_kernels.packing import dequantise, unpack_qkvz
from gdn_kernels.weights import BlockWeights, CheckpointError, PrecisionWarning

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

DIMS = BlockDims(H=128, Hk=2, Hv=6, K=16, V=8, K_win=3)
TEXT_CONFIG = {
    "hidden_size": DIMS.H,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": DIMS.Hk,
    "linear_num_value_heads": DIMS.Hv,
    "linear_key_head_dim": DIMS.K,
    "linear_value_head_dim": DIMS.V,
    "linear_conv_kernel_dim": DIMS.K_win,
    "rms_norm_eps": 1e-5,
}
MULTIMODAL, TEXT_ONLY = "model.language_model.layers.", "model.layers."


def layer_tensors(seed: int = 0) -> Tensors:
    """One layer's tensors as a checkpoint stores them."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int, dtype: Any = None) -> Array:
        return generator.standard_normal(shape).astype(dtype or bfloat16())

    return {
        "in_proj_qkv.weight": normal(DIMS.conv_dim, DIMS.H),
        "in_proj_z.weight": normal(DIMS.value_dim, DIMS.H),
        "in_proj_a.weight": normal(DIMS.Hv, DIMS.H),
        "in_proj_b.weight": normal(DIMS.Hv, DIMS.H),
        "conv1d.weight": normal(DIMS.conv_dim, 1, DIMS.K_win),
        "A_log": normal(DIMS.Hv, dtype=np.float32),
        "dt_bias": normal(DIMS.Hv),
        "norm.weight": normal(DIMS.V, dtype=np.float32),
        "out_proj.weight": normal(DIMS.H, DIMS.value_dim),
    }


def write(folder: Path, layers: dict[int, Tensors], prefix: str = MULTIMODAL, shards: int = 1, **config: Any) -> Path:
    """A checkpoint folder: the layers' tensors dealt out to `shards` files; `config` changes TEXT_CONFIG."""
    from safetensors.numpy import save_file

    named = {f"{prefix}{n}.linear_attn.{name}": t for n, tensors in layers.items() for name, t in tensors.items()}
    named["model.embed_tokens.weight"] = np.zeros((4, DIMS.H), bfloat16())
    text = {name: value for name, value in {**TEXT_CONFIG, **config}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"text_config": text} if prefix == MULTIMODAL else text))
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(sorted(named))}
    for file in files:
        save_file({name: t for name, t in named.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(path: Path, layer: int = 0) -> str:
    with pytest.raises(CheckpointError) as error:
        BlockWeights.from_checkpoint(path, layer)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("prefix", [MULTIMODAL, TEXT_ONLY])
@pytest.mark.parametrize("shards", [1, 3])
def test_reads_the_layer_asked_for(tmp_path: Path, prefix: str, shards: int) -> None:
    layers = {n: layer_tensors(n) for n in (0, 1, 5)}
    weights = BlockWeights.from_checkpoint(str(write(tmp_path, layers, prefix, shards)), 5)
    stored = layers[5]
    assert weights.dims == DIMS
    assert weights.norm_eps == 1e-5
    for name, field in (("qkv", weights.W_in_qkv), ("z", weights.W_in_z), ("a", weights.W_in_a), ("b", weights.W_in_b)):
        assert field.dtype == bfloat16()
        np.testing.assert_array_equal(field, stored[f"in_proj_{name}.weight"].T)
    assert weights.out_proj is not None
    np.testing.assert_array_equal(weights.out_proj, stored["out_proj.weight"].T)
    np.testing.assert_array_equal(weights.conv_weight, to_fp32(stored["conv1d.weight"])[:, 0, :])
    for name, field in (("A_log", weights.A_log), ("dt_bias", weights.dt_bias), ("norm.weight", weights.norm_weight)):
        np.testing.assert_array_equal(field, to_fp32(stored[name]))
    for name in ("conv_weight", "A_log", "dt_bias", "norm_weight"):
        assert getattr(weights, name).dtype == np.float32
    for array in (*weights.arguments().values(), weights.out_proj):
        assert array.flags.c_contiguous


def test_arguments_are_those_of_the_block(tmp_path: Path) -> None:
    arguments = BlockWeights.from_checkpoint(write(tmp_path, {0: layer_tensors()}), 0).arguments()
    d = DIMS
    rest = {"hidden": (1, 1, d.H), "conv_state": (1, d.conv_dim, d.K_win), "recurrent_state": (1, d.Hv, d.K, d.V)}
    assert len(arguments) == 8
    assert BlockDims.from_shapes(**{name: array.shape for name, array in arguments.items()}, **rest) == DIMS


def test_fp32_form_has_the_same_values(tmp_path: Path) -> None:
    weights = BlockWeights.from_checkpoint(write(tmp_path, {0: layer_tensors()}), 0)
    fp32 = weights.astype_fp32()
    assert fp32.out_proj is not None and fp32.out_proj.dtype == np.float32
    for name, array in fp32.arguments().items():
        assert array.dtype == np.float32 and array.flags.c_contiguous
        np.testing.assert_array_equal(array, to_fp32(getattr(weights, name)))
    assert (fp32.dims, fp32.norm_eps) == (weights.dims, weights.norm_eps)


def test_fp32_checkpoint_gives_the_fp32_form(tmp_path: Path) -> None:
    tensors = {name: tensor.astype(np.float32) for name, tensor in layer_tensors().items()}
    weights = BlockWeights.from_checkpoint(write(tmp_path, {0: tensors}), 0)
    assert {array.dtype for array in weights.arguments().values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("gain", [0.01, 1.0])
def test_gain_is_read_plainly(tmp_path: Path, gain: float) -> None:
    # The other norms of the same checkpoint are stored as w for a gain of 1 + w; this one is not.
    tensors = layer_tensors() | {"norm.weight": np.full(DIMS.V, gain, np.float32)}
    weights = BlockWeights.from_checkpoint(write(tmp_path, {0: tensors}), 0)
    np.testing.assert_array_equal(weights.norm_weight, np.float32(gain))


def test_bf16_A_log_is_upcast_with_a_warning(tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["A_log"] = tensors["A_log"].astype(bfloat16())
    with pytest.warns(PrecisionWarning, match=r"layers\.0\.linear_attn\.A_log: stored in bf16") as caught:
        weights = BlockWeights.from_checkpoint(write(tmp_path, {0: tensors}), 0)
    assert caught[0].filename == __file__
    assert weights.A_log.dtype == np.float32
    np.testing.assert_array_equal(weights.A_log, to_fp32(tensors["A_log"]))


def test_only_this_layers_shards_are_opened(tmp_path: Path) -> None:
    write(tmp_path, {0: layer_tensors(0), 1: layer_tensors(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    weight_map = {f"{MULTIMODAL}0.linear_attn.{name}": "a.safetensors" for name in layer_tensors()}
    weight_map |= {f"{MULTIMODAL}1.linear_attn.{name}": "absent.safetensors" for name in layer_tensors()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    BlockWeights.from_checkpoint(tmp_path, 0)
    assert "absent.safetensors: expected a safetensors file, found none" in refused(tmp_path, 1)


def test_full_attention_layer_is_refused_by_name(tmp_path: Path) -> None:
    message = "layer 3 is a full_attention layer; GDN layers of this checkpoint are 0, 1, 2, 4, 5, 6"
    assert refused(write(tmp_path, {0: layer_tensors()}), 3) == message
    assert refused(write(tmp_path, {0: layer_tensors()}, layer_types=None), 3) == message
    long = write(tmp_path, {0: layer_tensors()}, layer_types=None, full_attention_interval=2, num_hidden_layers=40)
    assert refused(long, 1).endswith("0, 2, 4, 6, 8, ...")


@pytest.mark.parametrize("layer", [-1, 8, 100])
def test_layer_out_of_range_is_refused(tmp_path: Path, layer: int) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}), layer)
    assert message == f"layer: expected 0 to 7, this checkpoint has 8 layers, got {layer}"


def test_layer_without_tensors_is_refused(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}), 1)
    assert "model.language_model.layers.1.linear_attn.* or model.layers.1.linear_attn.*, found none" in message


def packed(tensors: Tensors, dims: BlockDims = DIMS) -> Tensors:
    """The tensors with Qwen3-Next's two projections, row by row: key head j, then what reads it."""
    qkv, z = tensors["in_proj_qkv.weight"], tensors["in_proj_z.weight"]
    b, a = tensors["in_proj_b.weight"], tensors["in_proj_a.weight"]
    qkvz_rows, ba_rows = [], []
    for j in range(dims.Hk):
        heads = range(j * dims.gqa, (j + 1) * dims.gqa)
        qkvz_rows += [qkv[j * dims.K + i] for i in range(dims.K)]
        qkvz_rows += [qkv[dims.key_dim + j * dims.K + i] for i in range(dims.K)]
        qkvz_rows += [qkv[2 * dims.key_dim + h * dims.V + i] for h in heads for i in range(dims.V)]
        qkvz_rows += [z[h * dims.V + i] for h in heads for i in range(dims.V)]
        ba_rows += [b[h] for h in heads] + [a[h] for h in heads]
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("in_proj")}
    return rest | {"in_proj_qkvz.weight": np.stack(qkvz_rows), "in_proj_ba.weight": np.stack(ba_rows)}


def same_weights(got: BlockWeights, expected: BlockWeights) -> bool:
    """Whether every array has the same bytes."""
    pairs = [(got.out_proj, expected.out_proj)]
    pairs += [(array, expected.arguments()[name]) for name, array in got.arguments().items()]
    return all(x is not None and y is not None and x.tobytes() == y.tobytes() for x, y in pairs)


def test_packed_projections_are_unpacked(tmp_path: Path) -> None:
    plain = BlockWeights.from_checkpoint(write(tmp_path / "plain", {0: layer_tensors()}), 0)
    folder = write(tmp_path / "packed", {0: packed(layer_tensors())}, TEXT_ONLY)
    weights = BlockWeights.from_checkpoint(folder, 0)
    assert same_weights(weights, plain)
    assert all(array.flags.c_contiguous for array in weights.arguments().values())


def test_heads_taken_in_another_order_are_noticed(tmp_path: Path) -> None:
    # The faults: value heads tiled over the key heads, a and b swapped, and rows taken as [q | k | v | z] of the whole.
    plain = BlockWeights.from_checkpoint(write(tmp_path / "plain", {0: layer_tensors()}), 0)
    tensors = packed(layer_tensors())
    order = [j * DIMS.gqa + i for i in range(DIMS.gqa) for j in range(DIMS.Hk)]
    z = layer_tensors()["in_proj_z.weight"].reshape(DIMS.Hv, DIMS.V, DIMS.H)[order].reshape(-1, DIMS.H)
    tiled = packed(layer_tensors() | {"in_proj_z.weight": z})
    assert not same_weights(BlockWeights.from_checkpoint(write(tmp_path / "tiled", {0: tiled}), 0), plain)
    swapped = tensors | {"in_proj_ba.weight": tensors["in_proj_ba.weight"][::-1].copy()}
    assert not same_weights(BlockWeights.from_checkpoint(write(tmp_path / "ab", {0: swapped}), 0), plain)
    rows = np.concatenate([layer_tensors()["in_proj_qkv.weight"], layer_tensors()["in_proj_z.weight"]])
    assert not np.array_equal(unpack_qkvz(rows, DIMS)[0], rows[: DIMS.conv_dim])


@pytest.mark.parametrize("name", ["in_proj_qkvz.weight", "in_proj_ba.weight"])
def test_packed_projection_of_wrong_shape_or_missing_is_named(tmp_path: Path, name: str) -> None:
    tensors = packed(layer_tensors())
    shape = list(tensors[name].shape)
    tensors[name] = tensors[name][:-1]
    assert f"linear_attn.{name}: expected shape {shape} by config.json" in refused(write(tmp_path, {0: tensors}))
    del tensors[name]
    assert "found no such tensor" in refused(write(tmp_path, {0: tensors}))


# 384 = 3 * 128 and 192 = 128 + 64 rows, so that the last block is ragged; with blocks of 96 x 80, the columns are too.
FP8_DIMS = BlockDims(H=256, Hk=2, Hv=6, K=48, V=32, K_win=3)
FP8_CONFIG = {
    "hidden_size": FP8_DIMS.H,
    "linear_key_head_dim": FP8_DIMS.K,
    "linear_value_head_dim": FP8_DIMS.V,
}


def quantised(matrix: Array, block: tuple[int, int], scale_dtype: Any) -> tuple[Array, Array, Array]:
    """FP8 and its scales, block by block, and what they stand for: one rounding of their fp32 product to bf16."""
    import ml_dtypes

    rows, columns = matrix.shape
    fp8 = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty((-(-rows // block[0]), -(-columns // block[1])), scale_dtype)
    meant = np.empty(matrix.shape, bfloat16())
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        values = to_fp32(matrix[part])
        scales[i, j] = np.abs(values).max() / 448
        fp8[part] = (values / np.float32(scales[i, j])).astype(ml_dtypes.float8_e4m3fn)
        meant[part] = (fp8[part].astype(np.float32) * np.float32(scales[i, j])).astype(bfloat16())
    return fp8, scales, meant


def fp8_tensors(block: tuple[int, int], scale_dtype: Any) -> tuple[Tensors, Tensors]:
    """One layer as an FP8 checkpoint stores it, and the tensors it stands for; a and b are not quantised."""
    generator = np.random.default_rng(3)
    d = FP8_DIMS

    def normal(*shape: int) -> Array:
        return (generator.standard_normal(shape) * np.exp(generator.standard_normal(shape[0]))[:, None]).astype(
            bfloat16()
        )

    plain = layer_tensors() | {
        "in_proj_qkv.weight": normal(d.conv_dim, d.H),
        "in_proj_z.weight": normal(d.value_dim, d.H),
        "in_proj_a.weight": normal(d.Hv, d.H),
        "in_proj_b.weight": normal(d.Hv, d.H),
        "out_proj.weight": normal(d.H, d.value_dim),
        "conv1d.weight": normal(d.conv_dim, d.K_win)[:, None, :],
        "norm.weight": np.ones(d.V, np.float32),
    }
    stored = dict(plain)
    for name in ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"):
        stored[name], stored[f"{name}_scale_inv"], plain[name] = quantised(plain[name], block, scale_dtype)
    return stored, plain


def write_fp8(folder: Path, tensors: Tensors, block: tuple[int, int] | None = None, prefix: str = MULTIMODAL) -> Path:
    """`write` for tensors among which are FP8 ones, which safetensors' NumPy writer does not know."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    def tensor(array: Array) -> Any:
        if array.dtype.name not in ("bfloat16", "float8_e4m3fn"):
            return torch.from_numpy(array.copy())
        raw = {1: np.uint8, 2: np.uint16}[array.itemsize]
        return torch.from_numpy(array.copy().view(raw)).view(getattr(torch, array.dtype.name))

    write(folder, {0: layer_tensors()}, prefix, **FP8_CONFIG)
    save_file({f"{prefix}0.linear_attn.{name}": tensor(t) for name, t in tensors.items()}, folder / "model.safetensors")
    if block is not None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [None, (96, 80)])
def test_fp8_becomes_bf16(tmp_path: Path, block: tuple[int, int] | None, scale_dtype: str) -> None:
    stored, plain = fp8_tensors(block or (128, 128), bfloat16() if scale_dtype == "bfloat16" else np.float32)
    weights = BlockWeights.from_checkpoint(write_fp8(tmp_path, stored, block), 0)
    assert weights.dims == FP8_DIMS
    for name, field in (("qkv", weights.W_in_qkv), ("z", weights.W_in_z), ("a", weights.W_in_a), ("b", weights.W_in_b)):
        assert field.dtype == bfloat16() and field.flags.c_contiguous
        np.testing.assert_array_equal(to_fp32(field), to_fp32(plain[f"in_proj_{name}.weight"]).T)
    assert weights.out_proj is not None and weights.out_proj.dtype == bfloat16()
    np.testing.assert_array_equal(to_fp32(weights.out_proj), to_fp32(plain["out_proj.weight"]).T)


def test_packed_fp8_becomes_bf16(tmp_path: Path) -> None:
    _, plain = fp8_tensors((128, 128), bfloat16())
    stored = packed(plain, FP8_DIMS)
    name = "in_proj_qkvz.weight"
    stored[name], stored[f"{name}_scale_inv"], meant = quantised(stored[name], (128, 128), bfloat16())
    weights = BlockWeights.from_checkpoint(write_fp8(tmp_path, stored, prefix=TEXT_ONLY), 0)
    qkv, z = unpack_qkvz(meant, FP8_DIMS)
    np.testing.assert_array_equal(weights.W_in_qkv, qkv.T)
    np.testing.assert_array_equal(weights.W_in_z, z.T)
    # The fault: the blocks are those of the packed matrix, not of what comes out of it.
    assert not np.array_equal(dequantise(*quantised(qkv, (128, 128), bfloat16())[:2]), qkv)


def test_fp8_without_its_scales_or_with_others_is_refused(tmp_path: Path) -> None:
    stored, _ = fp8_tensors((128, 128), bfloat16())
    name = "in_proj_z.weight_scale_inv"
    scales = stored.pop(name)
    message = refused(write_fp8(tmp_path, stored))
    assert "in_proj_z.weight: expected dtype BF16 or F32, found F8_E4M3 without a weight_scale_inv" in message
    message = refused(write_fp8(tmp_path, stored | {name: scales[:, :1]}))
    assert f"{name}: expected shape [2, 2] by config.json, found [2, 1]" in message
    message = refused(write_fp8(tmp_path, stored | {name: scales.astype(np.float32).astype(np.float64)}))
    assert f"{name}: expected dtype BF16 or F32, found F64" in message
    message = refused(
        write_fp8(tmp_path, stored | {name: scales, "in_proj_z.weight": np.zeros((192, 256), np.float32)})
    )
    assert "in_proj_z.weight: expected dtype F8_E4M3, found F32" in message
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text()[:-1] + ', "quantization_config": {"weight_block_size": 128}}'
    )
    assert "expected two positive numbers under 'quantization_config.weight_block_size', found 128" in refused(tmp_path)


@pytest.mark.parametrize("name", layer_tensors())
@pytest.mark.parametrize("shards", [1, 2])
def test_missing_tensor_is_named(tmp_path: Path, name: str, shards: int) -> None:
    tensors = layer_tensors()
    shape = list(tensors.pop(name).shape)
    message = refused(write(tmp_path, {0: tensors}, shards=shards))
    assert str(tmp_path / "model.safetensors") in message
    assert f"expected {MULTIMODAL}0.linear_attn.{name} of shape {shape}, found no such tensor" in message


@pytest.mark.parametrize("name", layer_tensors())
@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t[None]], ids=["size", "rank"])
def test_wrong_shape_is_named(tmp_path: Path, name: str, change: Callable[[Array], Array]) -> None:
    tensors = layer_tensors()
    right, tensors[name] = tensors[name].shape, np.ascontiguousarray(change(tensors[name]))
    message = refused(write(tmp_path, {0: tensors}))
    full_name = f"{MULTIMODAL}0.linear_attn.{name}"
    shapes = f"expected shape {list(right)} by config.json, found {list(tensors[name].shape)}"
    assert message == f"{tmp_path / 'model.safetensors'}: {full_name}: {shapes}"


def test_transposed_projection_is_refused(tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["in_proj_z.weight"] = np.ascontiguousarray(tensors["in_proj_z.weight"].T)
    assert "in_proj_z.weight: expected shape [48, 128] by config.json, found [128, 48]" in refused(
        write(tmp_path, {0: tensors})
    )


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    tensors = layer_tensors()
    tensors["in_proj_z.weight"] = tensors["in_proj_z.weight"].astype(np.float32).astype(dtype)
    assert "in_proj_z.weight: expected dtype BF16 or F32, found" in refused(write(tmp_path, {0: tensors}))


def test_projections_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["in_proj_b.weight"] = tensors["in_proj_b.weight"].astype(np.float32)
    message = refused(write(tmp_path, {0: tensors}))
    assert "expected one dtype for all projections" in message and "in_proj_b.weight float32" in message


@pytest.mark.parametrize("length", [0, 5, 300, -1])
def test_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    file = write(tmp_path, {0: layer_tensors()}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert refused(tmp_path).startswith(f"{file}: expected a whole safetensors file, could not read it: ")


def test_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    index = write(tmp_path, {0: layer_tensors()}, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"] = {name: files[file == files[0]] for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    assert "as model.safetensors.index.json says, found no such tensor" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '"weight_map"', "{}", '{"weight_map": []}'])
def test_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    index = write(tmp_path, {0: layer_tensors()}, shards=2) / "model.safetensors.index.json"
    index.write_text(text)
    assert refused(tmp_path).startswith(f"{index}: expected ")


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'absent' / 'config.json'}: expected" in refused(tmp_path / "absent")
    (write(tmp_path, {0: layer_tensors()}) / "model.safetensors").unlink()
    assert refused(tmp_path) == f"{tmp_path}: expected model.safetensors or model.safetensors.index.json, found neither"
    (tmp_path / "config.json").write_text("{")
    assert refused(tmp_path).startswith(f"{tmp_path / 'config.json'}: expected JSON, could not parse it: ")


@pytest.mark.parametrize("name", [name for name in TEXT_CONFIG if "layer" not in name])
@pytest.mark.parametrize("value", [None, "256"])
def test_missing_or_wrong_config_entry_is_named(tmp_path: Path, name: str, value: Any) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}, **{name: value}))
    assert message == f"{tmp_path / 'config.json'}: expected a number under {name!r}, found {value!r}"


def test_dimensions_out_of_range_are_refused(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}, linear_num_value_heads=5))
    assert message.startswith(f"{tmp_path / 'config.json'}: Hv must be a multiple of Hk")


def bytes_read() -> int:
    """What this process has read from files since it started; skips where the system does not count it."""
    counts = Path("/proc/self/io")
    if not counts.exists():
        pytest.skip("no count of the bytes read here")
    return int(counts.read_text().split("rchar: ")[1].split()[0])


def stretch(file: Path, hole: int) -> None:
    """Put other tensors of `hole` bytes before and behind those of the file; they take no room on the disk."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    end = len(content) - 8 - length
    for entry in header.values():
        entry["data_offsets"] = [hole + offset for offset in entry["data_offsets"]]
    for n, begin in enumerate((0, hole + end)):
        header[f"model.layers.{n + 8}.mlp"] = {"dtype": "U8", "shape": [hole], "data_offsets": [begin, begin + hole]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.seek(hole, 1)
        out.write(content[8 + length :])
        out.truncate(8 + len(text) + 2 * hole + end)


def test_only_this_layers_bytes_are_read(tmp_path: Path) -> None:
    write(tmp_path, {0: layer_tensors(0), 1: layer_tensors(1)})
    expected = BlockWeights.from_checkpoint(tmp_path, 0)
    stretch(tmp_path / "model.safetensors", 1 << 36)  # twice 64 GiB, which no test could read
    stored = sum(tensor.nbytes for tensor in layer_tensors().values())
    before = bytes_read()
    weights = BlockWeights.from_checkpoint(tmp_path, 0)
    read = bytes_read() - before
    assert same_weights(weights, expected)
    assert stored <= read < 1.5 * stored + (12 << 13)  # each tensor once, and its file's header, in whole pages


def test_other_layers_and_mtp_are_left_alone(tmp_path: Path) -> None:
    expected = BlockWeights.from_checkpoint(write(tmp_path / "alone", {1: layer_tensors(1)}), 1)
    write(tmp_path, {n: layer_tensors(n) for n in (1, 10, 11)}, num_hidden_layers=12, layer_types=None, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= {f"mtp.layers.1.linear_attn.{name}": "absent.safetensors" for name in layer_tensors()}
    content["weight_map"] |= {f"mtp.{MULTIMODAL}1.linear_attn.{name}": "absent.safetensors" for name in layer_tensors()}
    index.write_text(json.dumps(content))
    assert same_weights(BlockWeights.from_checkpoint(tmp_path, 1), expected)


def test_bf16_norm_is_upcast_with_a_warning(tmp_path: Path) -> None:
    tensors = {name: tensor.astype(bfloat16()) for name, tensor in layer_tensors().items()}
    with pytest.warns(PrecisionWarning, match=r"A_log and norm\.weight: stored in bf16"):
        weights = BlockWeights.from_checkpoint(write(tmp_path, {0: tensors}), 0)
    np.testing.assert_array_equal(weights.norm_weight, to_fp32(tensors["norm.weight"]))


def test_bf16_A_log_moves_the_state(tmp_path: Path) -> None:
    # Why the warning: with rounded logs the decay is another, far beyond an fp32 rounding of the state.
    tensors = layer_tensors() | {"A_log": np.linspace(-7.1, 0.3, DIMS.Hv).astype(np.float32)}
    rounded = tensors | {"A_log": tensors["A_log"].astype(bfloat16())}
    exact = BlockWeights.from_checkpoint(write(tmp_path / "exact", {0: tensors}), 0)
    with pytest.warns(PrecisionWarning):
        other = BlockWeights.from_checkpoint(write(tmp_path / "rounded", {0: rounded}), 0)
    generator = np.random.default_rng(1)
    states = [generator.standard_normal((2, DIMS.Hv, DIMS.K, DIMS.V)).astype(np.float32)] * 2
    conv_state = np.zeros((2, DIMS.conv_dim, DIMS.K_win), bfloat16())
    for _ in range(20):
        hidden = generator.standard_normal((2, 1, DIMS.H)).astype(bfloat16())
        for i, weights in enumerate((exact, other)):
            states[i] = reference.gdn_block_tkg(
                hidden, conv_state=conv_state, recurrent_state=states[i], **weights.arguments()
            )[2]
    error = np.linalg.norm(states[1] - states[0]) / np.linalg.norm(states[0])
    assert error > 1e-4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "its header would end after"),
        ((2).to_bytes(8, "little") + b"[]", "no header of a safetensors file"),
        ((5).to_bytes(8, "little") + b"{oops", "no header of a safetensors file"),
        ((9).to_bytes(8, "little") + b'{"x": {}}', "no header of a safetensors file"),
    ],
)
def test_foreign_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    file = write(tmp_path, {0: layer_tensors()}) / "model.safetensors"
    file.write_bytes(content)
    message = refused(tmp_path)
    assert message.startswith(f"{file}: expected a whole safetensors file, could not read it: ") and reason in message


def test_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {0: layer_tensors()}) / "model.safetensors"
    content = file.read_bytes()
    assert content.count(b"[48,128]") == 1  # in_proj_z
    file.write_bytes(content.replace(b"[48,128]", b"[49,128]"))
    assert "in_proj_z.weight would take 12544 bytes, its header gives it 12288" in refused(tmp_path)


@pytest.mark.parametrize("value", ["linear_attention", [1, 2], {}])
def test_odd_layer_types_are_refused(tmp_path: Path, value: Any) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}, layer_types=value))
    assert message == f"{tmp_path / 'config.json'}: expected a list of names under 'layer_types', found {value!r}"


def test_other_activation_is_refused(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}, hidden_act="gelu"))
    assert message == f"{tmp_path / 'config.json'}: expected silu under 'hidden_act', found 'gelu'"


@pytest.mark.parametrize("name", MODELS)
def test_preset_is_found_by_config(tmp_path: Path, name: str) -> None:
    preset = MODELS[name]
    config = {
        "hidden_size": preset.dims.H,
        "num_hidden_layers": preset.layers,
        "layer_types": None,
        "linear_num_key_heads": preset.dims.Hk,
        "linear_num_value_heads": preset.dims.Hv,
        "linear_key_head_dim": preset.dims.K,
        "linear_value_head_dim": preset.dims.V,
        "linear_conv_kernel_dim": preset.dims.K_win,
    }
    assert model_preset(write(tmp_path / f"{name}-Instruct", {}, **config)) == preset
    other = model_preset(write(tmp_path / "snapshot", {}, **config))
    assert (other.dims, other.layers, other.gdn_layers) == (preset.dims, preset.layers, preset.gdn_layers)
    assert other.name in MODELS


def test_unknown_model_is_a_preset_of_its_own(tmp_path: Path) -> None:
    preset = model_preset(write(tmp_path / "tiny", {}))
    assert (preset.name, preset.dims, preset.layers, preset.gdn_layers) == ("tiny", DIMS, 8, 6)
    with pytest.raises(CheckpointError, match="expected linear_attention under 'layer_types', found none"):
        model_preset(write(tmp_path / "none", {}, layer_types=["full_attention"] * 4))


def test_nothing_heavy_is_imported_with_the_module() -> None:
    import subprocess

    code = "import sys, gdn_kernels.weights; sys.exit(bool({'ml_dtypes', 'torch', 'safetensors'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
