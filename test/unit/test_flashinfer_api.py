"""What the stage leans on in FlashInfer: each test fails when FlashInfer changes it."""

import json
import logging

import pytest
import torch
from flashinfer.autotuner import AutoTuner

from sglang.srt.autotune import flashinfer_api
from sglang.srt.layers.moe.base import MoEShape
from sglang.srt.layers.moe.portfolio import OP_NAME
from sglang.srt.layers.moe.reference import ReferenceMoERunner
from sglang.srt.layers.moe.topk import typical_topk_ids


@pytest.fixture(autouse=True)
def fresh_tuner():
    AutoTuner.get().clear_cache()
    yield
    AutoTuner.get().clear_cache()


@pytest.fixture
def moe():
    runner = ReferenceMoERunner(MoEShape(16, 8, 4, 4, 2, torch.float32, 64))
    w13, w2 = torch.randn(4, 16, 16), torch.randn(4, 16, 8)

    def inputs(num_tokens):
        ids = typical_topk_ids(num_tokens, 2, 4, torch.device("cpu"))
        return [torch.randn(num_tokens, 16), ids, torch.full((num_tokens, 2), 0.5), w13, w2]

    return runner, inputs


def file_winner(runner, inputs, tactic):
    op = runner.op
    return flashinfer_api.file_winner(OP_NAME, op.runners[0], op.config, inputs, tactic)


def test_the_environment_stamp_has_flashinfers_seven_fields():
    stamp = flashinfer_api.environment()
    assert set(stamp) == {
        "flashinfer_version",
        "cuda_version",
        "cublas_version",
        "cudnn_version",
        "cudnn_frontend_version",
        "cutlass_dsl_version",
        "gpu",
    }
    assert stamp["flashinfer_version"] == flashinfer_api.version()


def test_a_lookup_without_a_record_is_counted_as_a_fallback_with_its_op_and_key(moe):
    runner, inputs = moe
    with flashinfer_api.observed() as lookups:
        runner.run(*inputs(3))
    (fallback,) = lookups.fallbacks
    assert fallback.op_name == OP_NAME
    assert "(3, 16)" in fallback.shapes
    assert fallback.key is not None and "(4, 16)" in fallback.key, "the key names the bucket"


def test_a_filed_winner_serves_its_whole_bucket_and_only_it(moe):
    runner, inputs = moe
    file_winner(runner, inputs(4), 1)
    with flashinfer_api.observed() as lookups:
        for num_tokens in (3, 4):
            assert runner.op.choose(inputs(num_tokens))[1] == 1
        assert not lookups.fallbacks
        assert runner.op.choose(inputs(5))[1] == -1
    assert len(lookups.fallbacks) == 1


def test_winners_come_out_and_go_in_through_flashinfers_own_file(moe, tmp_path):
    runner, inputs = moe
    key = file_winner(runner, inputs(8), 1)
    entries = flashinfer_api.stored_entries()
    assert entries[key][:2] == ["SortedMoE", 1]
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"_metadata": flashinfer_api.environment(), **entries}))
    flashinfer_api.forget_everything()
    assert flashinfer_api.stored_entries() == {}
    assert flashinfer_api.load_records(path)
    assert runner.op.choose(inputs(7))[1] == 1


def test_one_question_has_one_live_winner_whichever_runner_it_names(moe):
    runner, inputs = moe
    first, second = runner.op.runners
    for winner, tactic in ((first, 1), (second, 0), (first, 0), (second, 1)):
        key = flashinfer_api.file_winner(OP_NAME, winner, runner.op.config, inputs(8), tactic)
        assert runner.op.choose(inputs(7)) == (winner, tactic)
        assert set(flashinfer_api.stored_entries()) == {key}


def test_a_live_winner_stands_over_a_loaded_record_of_any_runner(moe, tmp_path):
    runner, inputs = moe
    first, second = runner.op.runners
    for loaded, live in ((first, second), (second, first)):
        flashinfer_api.forget_everything()
        flashinfer_api.file_winner(OP_NAME, loaded, runner.op.config, inputs(8), 0)
        path = tmp_path / "records.json"
        stamp = flashinfer_api.environment()
        path.write_text(json.dumps({"_metadata": stamp, **flashinfer_api.stored_entries()}))
        flashinfer_api.forget_everything()
        assert flashinfer_api.load_records(path)
        key = flashinfer_api.file_winner(OP_NAME, live, runner.op.config, inputs(8), 1)
        assert runner.op.choose(inputs(8)) == (live, 1)
        assert set(flashinfer_api.stored_entries()) == {key}


def test_records_of_another_environment_are_refused(moe, tmp_path):
    runner, inputs = moe
    file_winner(runner, inputs(8), 1)
    stamp = {**flashinfer_api.environment(), "flashinfer_version": "0.0.1"}
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"_metadata": stamp, **flashinfer_api.stored_entries()}))
    flashinfer_api.forget_everything()
    assert not flashinfer_api.load_records(path)


def test_only_defaults_ignores_even_a_stored_winner(moe):
    runner, inputs = moe
    file_winner(runner, inputs(8), 1)
    with flashinfer_api.observed() as lookups, flashinfer_api.only_defaults([OP_NAME]):
        assert runner.op.choose(inputs(8))[1] == -1
    assert lookups.skipped_ops == {OP_NAME} and not lookups.fallbacks
    assert runner.op.choose(inputs(8))[1] == 1


def test_one_bucket_is_tuned_at_a_time_and_covered_lookups_do_not_profile(moe):
    runner, inputs = moe
    file_winner(runner, inputs(8), 1)
    with flashinfer_api.observed(), flashinfer_api.tuning(8, ()):
        assert runner.op.choose(inputs(8))[1] == 1
    if not torch.cuda.is_available():  # its profiler needs CUDA: a miss in tuning mode cannot pass unseen
        with flashinfer_api.observed(), flashinfer_api.tuning(16, ()), pytest.raises(RuntimeError):
            runner.op.choose(inputs(16))


def test_tuning_leaves_no_mode_or_override_behind(moe):
    runner, inputs = moe
    with pytest.raises(RuntimeError, match="inside"), flashinfer_api.tuning(16, ("x",)):
        raise RuntimeError("inside")
    assert not AutoTuner.get().is_tuning_mode
    file_winner(runner, inputs(8), 1)
    assert runner.op.choose(inputs(8))[1] == 1


def test_observing_keeps_flashinfers_own_handlers_quiet_and_restores_them(moe, capsys):
    runner, inputs = moe
    logger = flashinfer_api._jit_logger()
    before = (logger.level, [handler.level for handler in logger.handlers])
    with flashinfer_api.observed():
        runner.run(*inputs(3))
        logging.getLogger("flashinfer.jit").warning("unrelated")
    assert (logger.level, [handler.level for handler in logger.handlers]) == before
    assert "fallback" not in capsys.readouterr().err


def test_a_missing_flashinfer_says_what_to_do(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(flashinfer_api.TuningUnavailable, match="--disable-flashinfer-autotune"):
        flashinfer_api.version()


def test_without_a_gpu_the_timing_module_is_missing_by_name(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("it loads here")
    with pytest.raises(flashinfer_api.TuningUnavailable, match="timing module"):
        flashinfer_api.load_timing_module()


def test_tuning_waits_less_before_each_tactic_and_puts_the_delay_back():
    before = flashinfer_api.tuner().stream_delay_micro_secs
    with flashinfer_api.tuning(8, ()):
        assert flashinfer_api.tuner().stream_delay_micro_secs == flashinfer_api.STREAM_DELAY_US < before
    assert flashinfer_api.tuner().stream_delay_micro_secs == before


def test_near_ties_are_settled_where_flashinfer_can_and_nothing_is_passed_where_it_cannot(monkeypatch):
    import flashinfer

    plain, passed = flashinfer.autotune, []

    def later(tune_mode=True, *, tie_tolerance=None, **options):
        """`autotune` as FlashInfer 0.7.4 has it."""
        passed.append(tie_tolerance)
        return plain(tune_mode, **options)

    with flashinfer_api.tuning(8, []):
        assert AutoTuner.get().is_tuning_mode
    monkeypatch.setattr(flashinfer, "autotune", later)
    with flashinfer_api.tuning(8, []):
        assert AutoTuner.get().is_tuning_mode
    assert passed == [flashinfer_api.TIE_TOLERANCE] and 0 < flashinfer_api.TIE_TOLERANCE < 0.03
