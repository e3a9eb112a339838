"""The startup autotune stage.

The folder sees its engine only through `host.Host`; `stage.run_stage` tells the whole story in order. `bench/` alone
knows this tree's engine, since it measures whole ones; nothing else here imports it.
"""
