"""DMA: the only way between HBM and SBUF."""

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.isa.enums import DgeMode, Engine
from gdn_kernels.interpreter.isa.operands import check_initialised, check_overlap, instruction, round_to
from gdn_kernels.interpreter.memory import PSUM
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor


@instruction
def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = src, element by element in row-major order of both views, cast when dtypes differ."""
    op = "dma_copy"
    for role, view in (("dst", dst), ("src", src)):
        if not isinstance(view, NkiTensor):
            refuse("objects-not-strings", f"expected a tensor, got {view!r}", op, role)
        if view.buffer is PSUM:
            refuse("memory-space", f"{view!r}: DMA can't reach PSUM", op, role)
    if dst.size != src.size:
        refuse("dma", f"{dst.shape} has {dst.size} elements, src {src.shape} has {src.size}", op, "dst")
    if dge_mode is DgeMode.hwdge and dst.dtype != src.dtype:
        refuse("dma", f"a hardware-generated DMA can't cast {src.dtype} to {dst.dtype}", op, "dge_mode")
    if engine is not Engine.unknown and (dge_mode is not DgeMode.hwdge or engine not in (Engine.sync, Engine.scalar)):
        refuse(
            "dma",
            f"engine {engine.name} with {dge_mode.name}: only hwdge is issued from a chosen engine, sync or scalar",
            op,
            "engine",
        )
    if 0 in dst.strides:
        refuse("pattern", f"strides {dst.strides} write an element more than once", op, "dst")
    check_initialised(op, "src", src)
    check_overlap(op, dst, (src,))
    values = src.array.reshape(dst.shape)
    if dst.dtype != src.dtype:
        values = round_to(values.astype(np.float32), dst.dtype)
    dst.array[...] = values
    dst.mark_written()
    machine.current().record(op, "dma", (src,), (dst,), name, issued_by=engine.name, dge_mode=dge_mode.name)
