"""The engine on a GPU: FlashInfer's attention, decode graphs, tuned kernels inside of them, and memory.

Against what: the same model on the CPU in float32, and eager forwards. The built-in model has heads of 64; a model
of random weights has heads of 128, where other kernels serve.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.served_model import read_model_config
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.managers.worker_environment import prepare_environment
from sglang.srt.model_executor.decode_graphs import covering_size
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.builtin import BUILTIN_MODEL_PATH
from sglang.srt.server_args import ServerArgs
from sglang.test.arithmetic import few_shot_prompt, held_out_questions
from support.sequences import Sequence, decode_batch, extend_batch

MAX_REQUESTS = 32
TRITON_PRODUCTS = ("first_gemv", "second_gemv", "first_tiles", "second_tiles")
NEWLINE = 10
RELATIVE_ERROR = 0.02
"""Of logits in BF16 against float32: norm of the difference over norm. Attention and MoE measured 0.2-0.6% each."""


def start_runner(model_path: str, device: str, **flags: object) -> ModelRunner:
    if device == "cuda":
        prepare_environment()
    defaults: dict[str, object] = {
        "device": device,
        "max_running_requests": MAX_REQUESTS,
        "chunked_prefill_size": 1024,
        "max_total_tokens": 16384,
    }
    args = ServerArgs(model_path=model_path, **{**defaults, **flags})  # type: ignore[arg-type]
    config = read_model_config(args, device)
    return ModelRunner(args, config, ParallelState.single())


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Records of this module's runners, away from the user's."""
    path = tmp_path_factory.mktemp("records")
    before = os.environ.get("SGLANG_CACHE_DIR")
    os.environ["SGLANG_CACHE_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["SGLANG_CACHE_DIR"]
    else:
        os.environ["SGLANG_CACHE_DIR"] = before


@pytest.fixture(scope="module")
def gpu(cache_dir: Path) -> ModelRunner:
    """The built-in model in BF16, tuned and captured."""
    return start_runner(BUILTIN_MODEL_PATH, "cuda")


@pytest.fixture(scope="module")
def cpu() -> ModelRunner:
    return start_runner(BUILTIN_MODEL_PATH, "cpu", disable_flashinfer_autotune=True)


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory whose heads are 128 wide, in groups of eight; it has a config and no weights."""
    config = json.loads(Path(BUILTIN_MODEL_PATH, "config.json").read_text())
    config.update(head_dim=128, num_attention_heads=16, num_key_value_heads=2, num_hidden_layers=2)
    path = tmp_path_factory.mktemp("wide-heads")
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def sequences(gpu: ModelRunner) -> Iterator[list[Sequence]]:
    """`MAX_REQUESTS` sequences of different lengths whose prompts have been run."""
    started = [Sequence.start(gpu) for _ in range(MAX_REQUESTS)]
    for number, sequence in enumerate(started):
        gpu.forward(extend_batch(gpu, [(sequence, prompt_ids(5 + 7 * number))]))
    yield started
    for sequence in started:
        sequence.end()


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def relative_error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    ours, wanted = ours.float().cpu(), wanted.float().cpu()
    return float((ours - wanted).norm() / wanted.norm())


def eager(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    """The logits of a decode batch without the graphs."""
    graphs, runner.decode_graphs = runner.decode_graphs, None
    try:
        return runner.forward(batch)
    finally:
        runner.decode_graphs = graphs


def greedy_answers(runner: ModelRunner, prompts: list[str]) -> list[str]:
    """What the model says up to the newline, all prompts as one batch."""
    started = [Sequence.start(runner) for _ in prompts]
    ids = [list(prompt.encode()) for prompt in prompts]
    tokens = []
    for sequence, piece in zip(started, ids, strict=True):
        tokens.append(int(runner.forward(extend_batch(runner, [(sequence, piece)])).argmax()))
    said = [[token] for token in tokens]
    for _ in range(4):
        batch = decode_batch(runner, list(zip(started, tokens, strict=True)))
        tokens = runner.forward(batch).argmax(-1).tolist()
        for one, token in zip(said, tokens, strict=True):
            one.append(token)
    for sequence in started:
        sequence.end()
    return [bytes(t for t in one if t < 256).split(bytes([NEWLINE]))[0].decode("latin-1") for one in said]


def kernel_names(run: Callable[[], object]) -> list[str]:
    """The MoE's products that `run` launches, by the names in a profiler trace; CUTLASS has tile shapes in them."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    names = sorted({event.name for event in profile.events()})
    cutlass = [name for name in names if "cutlass" in name.lower() and "gemm" in name.lower()]
    return cutlass + [name for name in names if name in TRITON_PRODUCTS]


def test_the_start_tunes_captures_and_leaves_no_fallback(gpu: ModelRunner) -> None:
    report = gpu.autotune_report
    assert report.status == "completed", report.reason
    assert report.fallbacks == 0
    assert gpu.decode_graphs is not None
    assert gpu.decode_graphs.sizes == gpu.limits.decode_batch_sizes


def test_answers_are_those_of_the_cpu_in_float32(gpu: ModelRunner, cpu: ModelRunner) -> None:
    questions = held_out_questions(24, 3, seed=1)
    prompts = [few_shot_prompt(question, shots) for question, shots in questions]
    ours, wanted = greedy_answers(gpu, prompts), greedy_answers(cpu, prompts)
    same = sum(one == other for one, other in zip(ours, wanted, strict=True))
    right = sum(one == str(q.answer) for one, (q, _) in zip(ours, questions, strict=True))
    assert same >= 0.9 * len(prompts), list(zip(ours, wanted, strict=True))
    assert right >= 0.8 * len(prompts), ours


def test_prefill_logits_are_close_to_float32(gpu: ModelRunner, cpu: ModelRunner) -> None:
    for length in (1, 2, 63, 300):
        logits = []
        for runner in (gpu, cpu):
            sequence = Sequence.start(runner)
            logits.append(runner.forward(extend_batch(runner, [(sequence, prompt_ids(length))])))
            sequence.end()
        assert relative_error(*logits) < RELATIVE_ERROR, length


def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(gpu: ModelRunner) -> None:
    ids = prompt_ids(700, seed=3)
    whole, cut = Sequence.start(gpu), Sequence.start(gpu)
    wanted = gpu.forward(extend_batch(gpu, [(whole, ids)]))
    for start in range(0, len(ids), 256):
        logits = gpu.forward(extend_batch(gpu, [(cut, ids[start : start + 256])]))
    whole.end()
    cut.end()
    assert relative_error(logits, wanted) < RELATIVE_ERROR


def test_several_prompts_in_one_forward_are_as_each_alone(gpu: ModelRunner) -> None:
    prompts = [prompt_ids(length, seed=length) for length in (3, 90, 17)]
    alone = []
    for ids in prompts:
        sequence = Sequence.start(gpu)
        alone.append(gpu.forward(extend_batch(gpu, [(sequence, ids)])))
        sequence.end()
    started = [Sequence.start(gpu) for _ in prompts]
    together = gpu.forward(extend_batch(gpu, list(zip(started, prompts, strict=True))))
    for sequence in started:
        sequence.end()
    assert relative_error(together, torch.cat(alone)) < RELATIVE_ERROR


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 4, 7, 8, 12, 13, 16, 23, 24, 31, 32])
def test_a_replay_gives_the_logits_of_the_eager_forward(
    gpu: ModelRunner, sequences: list[Sequence], num_seqs: int
) -> None:
    assert gpu.decode_graphs is not None
    batch = decode_batch(gpu, [(sequence, 50 + i) for i, sequence in enumerate(sequences[:num_seqs])])
    assert gpu.decode_graphs.covers(batch)
    replayed = gpu.forward(batch).clone()
    assert relative_error(replayed, eager(gpu, batch)) < RELATIVE_ERROR
    again = gpu.forward(batch)
    assert relative_error(again, replayed) < 1e-3


def test_replays_of_growing_sequences_follow_them(gpu: ModelRunner, sequences: list[Sequence]) -> None:
    for token in range(40, 60):
        batch = decode_batch(gpu, [(sequence, token) for sequence in sequences[:5]])
        assert relative_error(gpu.forward(batch).clone(), eager(gpu, batch)) < RELATIVE_ERROR


def test_a_replay_runs_the_tuned_kernels(gpu: ModelRunner, sequences: list[Sequence]) -> None:
    import flashinfer

    differs = []
    for num_seqs in (1, 8, 32):
        batch = decode_batch(gpu, [(sequence, 65) for sequence in sequences[:num_seqs]])
        assert covering_size(gpu.limits.decode_batch_sizes, num_seqs) == num_seqs
        replayed = kernel_names(lambda batch=batch: gpu.forward(batch))
        tuned = kernel_names(lambda batch=batch: eager(gpu, batch))
        with flashinfer.autotune(False, skip_ops=set(gpu.moe_runner.op_names)):
            default = kernel_names(lambda batch=batch: eager(gpu, batch))
        assert replayed, "the trace shows no product of an MoE"
        assert replayed == tuned, num_seqs
        differs.append(replayed != default)
    assert any(differs), "at every size the tuned choice is the default"


def test_batches_above_the_captured_sizes_run_eagerly(cache_dir: Path) -> None:
    runner = start_runner(BUILTIN_MODEL_PATH, "cuda", cuda_graph_max_bs_decode=4)
    assert runner.decode_graphs is not None and runner.decode_graphs.sizes == (1, 2, 4)
    started = [Sequence.start(runner) for _ in range(6)]
    for sequence in started:
        runner.forward(extend_batch(runner, [(sequence, prompt_ids(9))]))
    batch = decode_batch(runner, [(sequence, 70) for sequence in started])
    assert not runner.decode_graphs.covers(batch)
    logits = runner.forward(batch)
    assert torch.isfinite(logits).all() and relative_error(logits, logits[:1].expand_as(logits)) < 0.01


def test_disable_cuda_graph_captures_nothing(cache_dir: Path) -> None:
    runner = start_runner(
        BUILTIN_MODEL_PATH, "cuda", disable_cuda_graph=True, disable_flashinfer_autotune=True
    )
    assert runner.decode_graphs is None


def test_a_longer_prefill_than_any_before_does_not_disturb_the_graphs(
    gpu: ModelRunner, sequences: list[Sequence]
) -> None:
    batch = decode_batch(gpu, [(sequence, 66) for sequence in sequences[:3]])
    before = gpu.forward(batch).clone()
    long = Sequence.start(gpu) if gpu.req_to_token_pool.available() else sequences[-1]
    gpu.forward(extend_batch(gpu, [(long, prompt_ids(min(1500, gpu.limits.prefill_ceiling)))]))
    if long is not sequences[-1]:
        long.end()
    torch.cuda.empty_cache()
    scratch = torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")  # overwrites what was freed
    assert relative_error(gpu.forward(batch), before) < 1e-3
    del scratch


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_heads_of_128_decode_and_prefill_with_both_caches(
    wide_heads: str, cache_dir: Path, kv_cache_dtype: str
) -> None:
    runner = start_runner(wide_heads, "cuda", load_format="dummy", kv_cache_dtype=kv_cache_dtype)
    reference = start_runner(
        wide_heads,
        "cuda",
        load_format="dummy",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        disable_flashinfer_autotune=True,
    )
    bound = RELATIVE_ERROR if kv_cache_dtype == "auto" else 0.1
    lengths = (1, 40, 333)
    logits = []
    for one in (runner, reference):
        started = [Sequence.start(one) for _ in lengths]
        pieces = [(s, prompt_ids(n, seed=n)) for s, n in zip(started, lengths, strict=True)]
        prefill = one.forward(extend_batch(one, pieces)).clone()
        chunk = one.forward(extend_batch(one, [(s, prompt_ids(5)) for s in started])).clone()
        decode = one.forward(decode_batch(one, [(s, 77) for s in started])).clone()
        logits.append((prefill, chunk, decode))
    for ours, wanted in zip(*logits, strict=True):
        assert relative_error(ours, wanted) < bound


def test_the_largest_forwards_stay_within_the_static_fraction(cache_dir: Path) -> None:
    fraction = 0.2
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken_before = total - free
    # None: the pool takes all that is left of the fraction.
    runner = start_runner(
        BUILTIN_MODEL_PATH,
        "cuda",
        mem_fraction_static=fraction + taken_before / total,
        max_total_tokens=None,
        chunked_prefill_size=8192,
    )
    ids = torch.zeros(8192, dtype=torch.int64, device="cuda")
    runner.forward(ForwardBatch.dummy(ForwardMode.EXTEND, [2048] * 4, ids))
    runner.forward(ForwardBatch.dummy(ForwardMode.DECODE, [1] * MAX_REQUESTS, ids[:MAX_REQUESTS]))
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    used = total - free - taken_before
    assert used <= fraction * total, f"{used / 2**30:.2f} GiB of {fraction * total / 2**30:.2f}"
    assert used >= 0.8 * fraction * total, "the reserve is far too large"


def test_too_little_memory_is_one_line(cache_dir: Path) -> None:
    torch.cuda.empty_cache()
    with pytest.raises(ValueError, match="--mem-fraction-static") as caught:
        start_runner(BUILTIN_MODEL_PATH, "cuda", mem_fraction_static=0.001, max_total_tokens=None)
    assert "\n" not in str(caught.value)


def test_float32_is_refused_in_one_line(cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        start_runner(BUILTIN_MODEL_PATH, "cuda", dtype="float32", moe_runner_backend="torch_grouped")


def test_two_deterministic_starts_say_the_same(cache_dir: Path) -> None:
    questions = held_out_questions(8, 3, seed=2)
    prompts = [few_shot_prompt(question, shots) for question, shots in questions]
    said = []
    for _ in range(2):
        runner = start_runner(BUILTIN_MODEL_PATH, "cuda", enable_deterministic_inference=True)
        said.append(greedy_answers(runner, prompts))
    assert said[0] == said[1]
