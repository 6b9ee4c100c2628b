"""The drift lab: what many thousand decode steps do to the numbers, for a backend or for a rounding policy."""
