"""Which queue issues a DMA. Generating descriptors keeps a hardware queue for about 600 ns a transfer, and a queue
issues in program order, so what a transfer waits for holds back everything behind it.

- Weights, states and windows stream in through the Sync queue, which does nothing else and so runs ahead.
- The few small tensors of the start go through the Scalar queue, beside the first weights instead of before them.
- Results leave through GpSimd, whose own work they wait for anyway.
- Rows that a vector of indices chooses need software descriptors, which GpSimd makes.

The last three take an address known at run time. What an index out of bounds names, such as -1, is left out.
"""

import nki.isa as nisa

__nki_wrapper__ = True  # traces and errors name the line that asked for the transfer


def load(dst, src):
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)


def load_aside(dst, src):
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)


def store(dst, src):
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.swdge)


def load_at(dst, src):
    nisa.dma_copy(dst=dst, src=src, oob_mode=nisa.oob_mode.skip, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)


def gather(dst, src):
    nisa.dma_copy(dst=dst, src=src, oob_mode=nisa.oob_mode.skip, dge_mode=nisa.dge_mode.swdge)


def store_at(dst, src):
    nisa.dma_copy(dst=dst, src=src, oob_mode=nisa.oob_mode.skip, dge_mode=nisa.dge_mode.swdge)
