"""The timeline against devices: kernels whose profiles the vendor published, and predicted beside published."""
