"""Flags become per-rank limits."""

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.limits import derive_limits, standard_batch_sizes
from sglang.srt.server_args import ServerArgs


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_path(ServerArgs().model_path)


def test_four_attention_replicas_share_the_requests_and_the_chunk(config):
    args = ServerArgs(
        tp_size=4,
        attn_dp_size=4,
        ep_size=4,
        max_running_requests=64,
        chunked_prefill_size=4096,
        cuda_graph_max_bs_decode=64,
    )
    limits = derive_limits(args, config, "cuda")
    assert limits.max_running_requests == 16
    assert limits.prefill_ceiling == 1024
    assert limits.decode_batch_sizes == (1, 2, 4, 8, 12, 16)
    assert limits.max_op_tokens == 4096
    assert "--max-running-requests 64 over 4" in limits.origins["max_running_requests"]


def test_without_chunking_a_prefill_is_bounded_by_the_batch_limit_and_the_context(config):
    args = ServerArgs(chunked_prefill_size=-1, max_prefill_tokens=512)
    assert derive_limits(args, config, "cpu").prefill_ceiling == max(512, config.context_length)


def test_captured_sizes_that_no_batch_reaches_are_dropped(config):
    args = ServerArgs(cuda_graph_bs_decode=[64, 4, 1], max_running_requests=8)
    assert derive_limits(args, config, "cuda").decode_batch_sizes == (1, 4)


def test_captured_sizes_all_too_large_are_refused_by_name(config):
    args = ServerArgs(cuda_graph_bs_decode=[64], max_running_requests=8)
    with pytest.raises(ValueError, match="--cuda-graph-bs-decode.*--max-running-requests"):
        derive_limits(args, config, "cuda")


def test_the_standard_list_grows_by_8_then_16_then_32():
    assert standard_batch_sizes(24) == [1, 2, 4, 8, 12, 16, 24]
    sizes = standard_batch_sizes(600)
    assert {256, 272, 496, 512, 544, 576} <= set(sizes) and max(sizes) == 576
