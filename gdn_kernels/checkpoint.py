"""A checkpoint folder: what config.json says about its GDN layers, and one layer's tensors, read when asked for.

Of a file of tensors its header is read, and the bytes of that layer, however large the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from gdn_kernels.dims import MODELS, BlockDims, ModelPreset
from gdn_kernels.dtypes import Array
from gdn_kernels.packing import FP8_BLOCK
from gdn_kernels.tensor_file import DamagedFile, Entry, read_header, read_tensor

# Qwen3.5 publishes multimodal checkpoints (dimensions in text_config) and text-only ones. The layers of the
# multi-token prediction, `mtp.*`, are none of these.
PREFIXES = ("model.language_model.layers.{}.", "model.layers.{}.")

_DTYPES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}  # NumPy's names, safetensors' names


class CheckpointError(ValueError):
    """A checkpoint folder lacks something, or holds something else than a GDN layer has there."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What config.json says about the GDN layers.

    Attributes:
        dims: their dimensions.
        norm_eps: epsilon of their gated norm.
        layer_types: one a layer, "linear_attention" for a GDN layer.
        fp8_block: rows and columns that share a scale, where projections are stored in FP8.
    """

    dims: BlockDims
    norm_eps: float
    layer_types: tuple[str, ...]
    fp8_block: tuple[int, int] = FP8_BLOCK

    @classmethod
    def read(cls, folder: Path) -> CheckpointConfig:
        """From the folder's config.json; CheckpointError names the entry that is missing or out of range."""
        file = folder / "config.json"
        outer = _read_json(file)
        config = outer.get("text_config", outer)
        if not isinstance(config, dict):
            raise CheckpointError(f"{file}: expected an object under 'text_config', found {config!r}")

        def value(name: str) -> Any:
            found = config.get(name)
            if not isinstance(found, (int, float)) or isinstance(found, bool):
                raise CheckpointError(f"{file}: expected a number under {name!r}, found {found!r}")
            return found

        try:
            dims = BlockDims(
                H=value("hidden_size"),
                Hk=value("linear_num_key_heads"),
                Hv=value("linear_num_value_heads"),
                K=value("linear_key_head_dim"),
                V=value("linear_value_head_dim"),
                K_win=value("linear_conv_kernel_dim"),
            )
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from error
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise CheckpointError(f"{file}: expected silu under 'hidden_act', found {config['hidden_act']!r}")
        layer_types = config.get("layer_types")
        if layer_types is None:  # transformers' own default: every fourth layer is full attention
            interval = config.get("full_attention_interval", 4)
            layers = range(1, value("num_hidden_layers") + 1)
            layer_types = ["linear_attention" if i % interval else "full_attention" for i in layers]
        if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
            raise CheckpointError(f"{file}: expected a list of names under 'layer_types', found {layer_types!r:.80}")
        return cls(dims, float(value("rms_norm_eps")), tuple(layer_types), _fp8_block(file, outer))

    def check_is_gdn(self, layer: int) -> None:
        """CheckpointError unless `layer` is the number of a GDN layer."""
        count = len(self.layer_types)
        if not 0 <= layer < count:
            raise CheckpointError(f"layer: expected 0 to {count - 1}, this checkpoint has {count} layers, got {layer}")
        if self.layer_types[layer] != "linear_attention":
            gdn = [str(i) for i in self.gdn_layers]
            some = ", ".join(gdn if len(gdn) <= 6 else [*gdn[:5], "..."])
            raise CheckpointError(
                f"layer {layer} is a {self.layer_types[layer]} layer; "
                f"GDN layers of this checkpoint are {some or 'none'}"
            )

    @property
    def gdn_layers(self) -> list[int]:
        """The numbers of the GDN layers."""
        return [i for i, kind in enumerate(self.layer_types) if kind == "linear_attention"]


def model_preset(path: str | PathLike[str]) -> ModelPreset:
    """The model in the checkpoint folder `path`, by its config.json.

    The published model of those dimensions and layers, or, if none has them, a preset under the folder's name. Where
    several published models share them (Qwen3.5-27B, Qwen3.6-27B and Qwen3.8-27B do), the one that the folder is named
    after, else the first.

    Raises:
        CheckpointError: if config.json is missing, or isn't that of a model with GDN layers.
    """
    folder = Path(path)
    config = CheckpointConfig.read(folder)
    if not config.gdn_layers:
        raise CheckpointError(f"{folder / 'config.json'}: expected linear_attention under 'layer_types', found none")
    found = ModelPreset(folder.resolve().name, config.dims, len(config.layer_types), len(config.gdn_layers))
    same = [
        preset
        for preset in MODELS.values()
        if (preset.dims, preset.layers, preset.gdn_layers) == (found.dims, found.layers, found.gdn_layers)
    ]
    named = [preset for preset in same if preset.name.lower() in found.name.lower()]
    return [*named, *same, found][0]


@dataclass(frozen=True)
class LayerTensors:
    """One layer's tensors in a checkpoint: where each is (its name after `linear_attn.` -> file), and its reading."""

    prefix: str
    files: Mapping[str, Path]
    source: Path  # the file that lists the tensors, for messages

    @classmethod
    def find(cls, folder: Path, layer: int) -> LayerTensors:
        """CheckpointError if the folder has no tensors of that layer."""
        source, files = _tensor_files(folder)
        for prefix in (p.format(layer) + "linear_attn." for p in PREFIXES):
            found = {name.removeprefix(prefix): file for name, file in files.items() if name.startswith(prefix)}
            if found:
                return cls(prefix, found, source)
        expected = " or ".join(p.format(layer) + "linear_attn.*" for p in PREFIXES)
        raise CheckpointError(f"{source}: expected tensors named {expected}, found none")

    @classmethod
    def whole(cls, folder: Path) -> LayerTensors:
        """All tensors of the folder, under their full names."""
        source, files = _tensor_files(folder)
        return cls("", files, source)

    def has(self, name: str) -> bool:
        return name in self.files

    def place(self, name: str) -> str:
        return f"{self.files.get(name, self.source)}: {self.prefix}{name}"

    def error(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.place(name)}: {message}")

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Array:
        """The tensor `name` as stored, in one of `dtypes`; both are checked before its bytes are read."""
        full_name = self.prefix + name
        if name not in self.files:
            raise CheckpointError(f"{self.source}: expected {full_name} of shape {list(shape)}, found no such tensor")
        file = self.files[name]
        header = _header(file)
        if full_name not in header:
            raise CheckpointError(f"{file}: expected {full_name}, as {self.source.name} says, found no such tensor")
        entry, wanted = header[full_name], [_DTYPES[dtype] for dtype in dtypes]
        if entry.shape != shape:
            raise self.error(name, f"expected shape {list(shape)} by config.json, found {list(entry.shape)}")
        if entry.dtype not in wanted:
            scale = " without a weight_scale_inv" if entry.dtype == "F8_E4M3" else ""
            raise self.error(name, f"expected dtype {' or '.join(wanted)}, found {entry.dtype}{scale}")
        try:
            return read_tensor(file, entry)
        except (DamagedFile, OSError) as error:
            raise self.error(name, f"could not read it: {error}") from error


def _fp8_block(file: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    quantisation = config.get("quantization_config") or {}
    block = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else quantisation
    if block is None:
        return FP8_BLOCK
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise CheckpointError(
            f"{file}: expected two positive numbers under 'quantization_config.weight_block_size', found {block!r}"
        )
    return block[0], block[1]


def _tensor_files(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The file that lists the checkpoint's tensors, and the file each tensor is in."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():  # first, as in transformers
        return single, dict.fromkeys(_header(single), single)
    if not index.is_file():
        raise CheckpointError(f"{folder}: expected model.safetensors or model.safetensors.index.json, found neither")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        found = f"{weight_map!r:.80}"
        raise CheckpointError(f"{index}: expected an object under 'weight_map', tensor -> file, found {found}")
    return index, {name: folder / file for name, file in weight_map.items()}


def _header(file: Path) -> dict[str, Entry]:
    """The tensors in a file; CheckpointError when there is no such file or it is damaged."""
    try:
        return read_header(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: expected a safetensors file, found none") from error
    except (DamagedFile, OSError) as error:
        raise CheckpointError(f"{file}: expected a whole safetensors file, could not read it: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: expected a checkpoint's JSON file, could not read it: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON, could not parse it: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
