"""Topologies by name, their figures, and the meshes laid over them."""

import os

import pytest

from swerve.planning.topology import DEVICES, check_mesh, environment, parse_topology
from swerve.types import SwerveError


def test_devices_are_counted_as_jax_counts_them():
    assert parse_topology("tpu7x:4x4x8").num_devices == 256
    assert parse_topology("v5p:4x4x8").num_devices == 128
    assert parse_topology("v6e:16x16").num_devices == 256
    assert parse_topology("cpu:8").num_devices == 8
    assert not parse_topology("cpu:8").is_tpu


def test_the_benchmark_has_its_budget():
    assert parse_topology("tpu7x:4x4x8").device.budget_mib == 84_992
    assert all(device.budget_mib * 2**20 < device.hbm_bytes * 1.01 for device in DEVICES.values())


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("v7x:4x4x8", "known: tpu7x, v6e, v5p, v5e, cpu"),
        ("tpu7x", "expected tpu7x:AxBxC, for example tpu7x:4x4x8"),
        ("tpu7x:4x4", "expected tpu7x:AxBxC"),
        ("v6e:4x4x4", "expected v6e:AxB, for example v6e:16x16"),
        ("cpu:2x2", "expected cpu:N, for example cpu:8"),
        ("cpu:0", "expected cpu:N"),
        ("", "nothing is not a known accelerator"),
    ],
)
def test_other_names_are_refused_with_those_that_are_known(name, wanted):
    with pytest.raises(SwerveError, match=wanted):
        parse_topology(name)


def test_figures_can_be_given_and_must_be_positive():
    topology = parse_topology("v5p:2x2x2").with_figures(budget_mib=1000, peak_tflops=2, hbm_gbps=3)
    assert (topology.device.budget_mib, topology.device.peak_flops_per_s) == (1000, 2e12)
    assert topology.device.hbm_bytes_per_s == 3e9
    assert topology.device.ici_bytes_per_s == DEVICES["v5p"].ici_bytes_per_s
    with pytest.raises(SwerveError, match="must be a positive number, not 0"):
        topology.with_figures(peak_tflops=0)


def test_a_mesh_takes_all_devices():
    topology = parse_topology("tpu7x:4x4x8")
    check_mesh(topology, {"fsdp": 32, "context": 4, "expert": 2, "tensor": 1})
    with pytest.raises(SwerveError, match="fsdp 32 x expert 2 is 64 devices, and tpu7x:4x4x8 has 256"):
        check_mesh(topology, {"fsdp": 32, "expert": 2})


def test_the_environment_of_a_compile_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag=1")
    before = dict(os.environ)
    tpu = environment(parse_topology("tpu7x:2x2x1"), tmp_path)
    assert (tpu["JAX_PLATFORMS"], tpu["TPU_SKIP_MDS_QUERY"], tpu["TPU_LOG_DIR"]) == ("cpu", "1", str(tmp_path))
    assert "XLA_FLAGS" not in tpu
    cpu = environment(parse_topology("cpu:8"), tmp_path)
    assert cpu["XLA_FLAGS"] == "--xla_some_flag=1 --xla_force_host_platform_device_count=8"
    assert dict(os.environ) == before
