"""Tuned capacity profiles for MegaMoE: kernels that exchange tokens and run the experts in one launch.

`staging.stage_profiles` tells the story of a start; `profiles.MegaMoEProfiles` is what serving uses.
"""
