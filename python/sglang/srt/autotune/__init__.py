"""The startup autotune stage.

The folder sees its engine only through `host.Host`; `stage.run_stage` tells the whole story in order.
"""
