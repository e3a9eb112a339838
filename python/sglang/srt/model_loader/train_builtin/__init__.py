"""Makes the built-in model: its corpus, its training loop and its checkpoint files.

The checkpoint in the package was written by

    python -m sglang.srt.model_loader.train_builtin --device cuda --output python/sglang/srt/model_loader/builtin

in 291 s on one H200: 5000 steps of 4096 tokens, seed 0, 1000 of 1000 held-out questions right in BF16. A
step takes 0.3 s on two CPU cores, which makes half an hour. The same seed, device, thread count and
torch give the same weights.
"""
