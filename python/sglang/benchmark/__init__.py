"""The load generator behind `python -m sglang.bench_serving`."""
