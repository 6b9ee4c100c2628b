"""The NKI source. These modules import `nki` plainly: import them where it is installed, or inside
`gdn_kernels.interpreter.installed()`; `gdn_kernels.backends` does either."""
