"""Latency of the block: modelled from published costs, or measured on a device; every row says which."""
