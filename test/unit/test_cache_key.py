"""Where records lie: geometry decides, the mount and unrelated flags do not, and no name escapes the root."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace

import pytest

from sglang.srt.autotune.records.cache_key import (
    CacheIdentity,
    CachePath,
    RankPlace,
    new_run_id,
    safe_part,
)
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS, cpu_model_name

STAMP = {name: "1" for name in ENVIRONMENT_FIELDS} | {
    "flashinfer_version": "0.7.2.post1",
    "gpu": "NVIDIA H200",
}
IDENTITY = CacheIdentity(
    model={"model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128, "layers": ("moe",)},
    dtype="bfloat16",
    environment=STAMP,
    backends={"moe": "flashinfer_cutlass", "attention": "flashinfer"},
    parallel={"tp": 1, "pp": 1, "ep": 1, "attn_dp": 1},
    skip_ops=("a", "b"),
)

CHANGES = {
    "geometry": {"model": {**IDENTITY.model, "hidden_size": 4096}},
    "dtype": {"dtype": "float16"},
    "quantization": {"quantization": "fp8"},
    "kv dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "backend": {"backends": {**IDENTITY.backends, "moe": "reference"}},
    "parallel size": {"parallel": {**IDENTITY.parallel, "tp": 2}},
    "skip list": {"skip_ops": ("a",)},
    "draft": {"draft": True},
    "gpu": {"environment": {**STAMP, "gpu": "NVIDIA H100"}},
    "cudnn": {"environment": {**STAMP, "cudnn_version": "2"}},
    "cpu": {"environment": {**STAMP, "cpu": "another model"}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_the_answer_changes_the_path(what):
    assert replace(IDENTITY, **CHANGES[what]).digest() != IDENTITY.digest()


def test_orders_repetitions_and_spellings_do_not_matter():
    same = CacheIdentity(
        model=dict(reversed(IDENTITY.model.items())) | {"layers": ["moe"]},
        dtype="torch.bfloat16",
        environment=dict(reversed(STAMP.items())),
        backends=dict(reversed(IDENTITY.backends.items())),
        parallel=dict(reversed(IDENTITY.parallel.items())),
        skip_ops=("b", "a", "b"),
    )
    assert same.digest() == IDENTITY.digest()
    assert len(IDENTITY.digest()) == 16 and int(IDENTITY.digest(), 16) >= 0


def test_the_path_reads_as_documented(tmp_path):
    where = CachePath(tmp_path, IDENTITY, "sm90")
    expected = tmp_path / "flashinfer" / "autotune" / "0.7.2.post1" / "sm90" / IDENTITY.digest()
    assert where.records(RankPlace()) == expected / "rank_tp0_pp0_dp0.json"
    place = RankPlace(1, 2, 3, draft=True, gpu_uuid="GPU-12ab")
    assert where.records(place) == expected / "rank_tp1_pp2_dp3_draft_gpuGPU-12ab.json"
    assert where.fresh_records(RankPlace(), "t-1") == expected / "runs" / "t-1" / "rank_tp0_pp0_dp0.json"


def test_no_two_ranks_share_a_file(tmp_path):
    where = CachePath(tmp_path, IDENTITY, "sm90")
    places = [
        RankPlace(tp, pp, dp, draft, gpu)
        for tp, pp, dp, draft, gpu in itertools.product(
            range(4), range(4), range(4), (False, True), (None, "GPU-1")
        )
    ]
    assert len({where.records(place) for place in places}) == len(places)


@pytest.mark.parametrize(
    "name", ["../../etc", "a/b", "..", "", "\0", ".hidden", "x" * 5000, "NVIDIA H200", "..\\.."]
)
def test_no_name_escapes_its_directory(tmp_path, name):
    part = safe_part(name)
    assert part and "/" not in part and "\0" not in part and not part.startswith(".") and len(part) <= 96
    hostile = replace(IDENTITY, environment={**STAMP, "flashinfer_version": name})
    path = CachePath(tmp_path, hostile, name).fresh_records(RankPlace(gpu_uuid=name), name)
    assert os.path.commonpath([tmp_path, os.path.normpath(path)]) == str(tmp_path)


def test_another_gpus_file_of_the_same_rank_is_the_fallback(tmp_path):
    where = CachePath(tmp_path, IDENTITY, "sm90")
    place = RankPlace(0, 0, 0, gpu_uuid="GPU-new")
    assert where.fallback(place) is None
    where.directory.mkdir(parents=True)
    for name in ("rank_tp0_pp0_dp0.json", "rank_tp1_pp0_dp0_gpuGPU-x.json", "rank_tp0_pp0_dp0_draft_gpuGPU-x.json",
                 "rank_tp0_pp0_dp0_gpuGPU-x.json.bad-empty-1", "rank_tp0_pp0_dp0_gpuGPU-x.json.lock"):  # fmt: skip
        (where.directory / name).write_text("{}")
    assert where.fallback(place) is None
    for age, uuid in ((200, "GPU-old"), (100, "GPU-recent")):
        sibling = where.records(replace(place, gpu_uuid=uuid))
        sibling.write_text("{}")
        os.utime(sibling, (1e9 - age, 1e9 - age))
    assert where.fallback(place) == where.records(replace(place, gpu_uuid="GPU-recent"))
    assert where.fallback(replace(place, gpu_uuid=None)) is None
    where.records(place).write_text("{}")
    assert where.fallback(place) is None


def test_the_identity_is_described_once_for_people(tmp_path):
    where = CachePath(tmp_path, IDENTITY, "sm90")
    where.describe()
    described = json.loads((where.directory / "identity.json").read_text())
    assert described["model"]["hidden_size"] == 2048 and described["skip_ops"] == ["a", "b"]
    (where.directory / "identity.json").write_text("mine")
    where.describe()
    assert (where.directory / "identity.json").read_text() == "mine"
    (tmp_path / "file").write_text("")
    CachePath(tmp_path / "file", IDENTITY, "sm90").describe()


def test_run_ids_are_safe_parts():
    assert safe_part(new_run_id()) == new_run_id()


def test_the_cpu_has_a_model():
    assert cpu_model_name()
