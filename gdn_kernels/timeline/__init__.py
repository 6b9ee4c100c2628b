"""A timeline from published costs: when every engine is busy, and how far from the DMA floor. All of it is modelled."""
