"""The profile adds up what really ran, under the families that a reader knows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from diffkern import ops
from diffkern.bench.profile import Profile, family, markdown, profiled, ranges


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNN", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64", "conv"),
        ("void diffkern::rope::(anonymous namespace)::token_kernel<1>(diffkern::rope::RopeParams)", "rope"),
        ("void diffkern::row_kernel<4>(diffkern::ModulateParams)", "norm, modulate"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl", "activation"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<", "copies"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16", "copies"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float", "elementwise"),
        ("triton_poi_fused__to_copy_add_mul_3", "elementwise"),
        ("triton_red_fused_rsqrt_mean_pow_1", "norm, modulate"),
        ("aten::addmm", "GEMM"),
        ("something new", "other"),
    ],
)
def test_kernels_of_every_library_are_known_by_their_names(kernel: str, expected: str) -> None:
    assert family(kernel) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_profile_counts_what_ran_and_writes_a_trace(tmp_path: Path) -> None:
    x, weight = torch.randn(1, 4, 16, 16), torch.randn(4, 4, 3, 3)
    with torch.no_grad(), profiled(torch.device("cpu"), tmp_path / "new" / "trace.json.gz") as profile:
        F.conv2d(x, weight)
        torch.mm(x[0, 0], x[0, 1])
        torch.mm(x[0, 0], x[0, 2])
    assert profile.unit == "operators"
    assert profile.launches["GEMM"] == 2
    assert profile.milliseconds["conv"] > 0
    with gzip.open(tmp_path / "new" / "trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 2


@pytest.mark.filterwarnings("ignore")
def test_ranges_name_the_ops_of_every_provider_inside_of_the_block_alone() -> None:
    x = torch.randn(4, 64)

    def recorded() -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ops.rms_norm(x, provider="eager")
        return [event.key for event in profile.key_averages() if event.key.startswith("diffkern::")]

    assert recorded() == []
    with ranges():
        assert recorded() == ["diffkern::rms_norm"]
    assert recorded() == []


def test_the_table_has_a_row_for_every_family_that_occurs_and_one_for_all() -> None:
    before = Profile("kernels", {"GEMM": 2.0, "copies": 1.0}, {"GEMM": 10, "copies": 20})
    after = Profile("kernels", {"GEMM": 2.0}, {"GEMM": 10})
    assert markdown({"stock": before, "fast": after}).splitlines() == [
        "| family | stock, ms | stock, kernels | fast, ms | fast, kernels |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| GEMM | 2.00 | 10 | 2.00 | 10 |",
        "| copies | 1.00 | 20 | 0.00 | 0 |",
        "| all | 3.00 | 30 | 2.00 | 10 |",
    ]
