"""Whether the stage runs, and the words when it does not."""

import pytest

from sglang.srt.autotune.decision import decide

USUAL = dict(
    disabled=False,
    deterministic=False,
    device="cuda",
    capability=(9, 0),
    tunable_ops=("gemm1", "gemm2"),
    skip_ops=(),
    moe_backend="flashinfer_cutlass",
)


def test_tuning_is_on_by_default():
    assert decide(**USUAL).run


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"disabled": True}, "--disable-flashinfer-autotune"),
        ({"deterministic": True}, "--enable-deterministic-inference"),
        ({"capability": (8, 9)}, "8.9 is below 9.0"),
        ({"tunable_ops": ()}, "--moe-runner-backend flashinfer_cutlass"),
        ({"skip_ops": ("gemm2", "gemm1", "other")}, "--flashinfer-autotune-skip-ops"),
    ],
)
def test_each_reason_to_skip_names_its_cause(change, word):
    decision = decide(**{**USUAL, **change})
    assert not decision.run
    assert word in decision.reason


def test_cpu_has_no_capability_to_be_too_low():
    assert decide(**{**USUAL, "device": "cpu", "capability": None}).run


def test_one_skipped_op_of_two_leaves_something_to_tune():
    assert decide(**{**USUAL, "skip_ops": ("gemm1",)}).run
