"""Why a layer of a transformers model can't be replaced by the block, found before anything is changed."""

from __future__ import annotations

import torch
from torch import nn

from gdn_kernels.torch_layer import MODULES

FORMS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def reason_against(module: nn.Module, backend: str) -> str:
    """Why the block can't stand for this layer, or an empty string. The dimensions are for `BlockWeights` to judge."""
    kind = type(module)
    if kind.__name__ not in MODULES or not kind.__module__.startswith("transformers."):
        return f"expected one of transformers' {', '.join(MODULES)}, got {kind.__module__}.{kind.__name__}"
    if module.training:
        return "in training mode, and the block has no gradient; call model.eval()"
    return _parts(module) or _weights(module, backend)


def _parts(module: nn.Module) -> str:
    """What the block replaces has to be what it was: plain layers without hooks. out_proj is called as it is."""
    for name, part in module.named_modules():
        kind = type(part)
        if (name.startswith("in_proj") and kind is not nn.Linear) or (name == "conv1d" and kind is not nn.Conv1d):
            return f"{name} must be a plain {'Conv1d' if name == 'conv1d' else 'Linear'}, not {kind.__name__}"
        if name and not name.startswith("out_proj") and (part._forward_hooks or part._forward_pre_hooks):
            return f"{name} has forward hooks, which the block would not call"
        if "_hf_hook" in part.__dict__:
            return f"{name or 'the layer'} has an accelerate hook (offloaded or dispatched)"
    return ""


def _weights(module: nn.Module, backend: str) -> str:
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        device = parameter.device.type
        if device == "meta":
            return f"{name} is on the meta device: offloaded or not loaded"
        if device != "cpu" and backend != "trn2":
            return f"{name} is on device {device}, and backend {backend!r} runs on the CPU"
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}, not a plain parameter (quantised or distributed)"
        if parameter.dtype not in FORMS:
            return f"{name} must be bf16 or fp32, not {str(parameter.dtype).removeprefix('torch.')}"
    projections = {name: p.dtype for name, p in parameters.items() if name.startswith(("in_proj", "out_proj"))}
    if len(set(projections.values())) > 1:
        found = ", ".join(f"{name} {FORMS[dtype]}" for name, dtype in projections.items())
        return f"the projections must be all bf16 or all fp32, not {found}"
    return ""
