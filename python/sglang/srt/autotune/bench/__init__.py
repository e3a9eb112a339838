"""What startup tuning is worth on this GPU: `python -m sglang.srt.autotune.bench`.

A piece is a few minutes of measurement and one JSON file; pieces are run, repeated and resumed one by one. Every
ratio is formed inside one piece, which measures its own bounds first: clocks and neighbours differ between runs.
"""
