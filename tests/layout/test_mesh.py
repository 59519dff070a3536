"""`jzero.mesh` on simulated hosts and slices, and what is said to cross the network."""

from __future__ import annotations

import dataclasses
import random
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jzero
from jzero.layout.topology import HostPosition, hosts_of, span
from jzero.proof.network import what_crosses


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh asks of a device."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "fake"
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def gpus(hosts, per_host=8):
    """One process per host; no slices."""
    return [Device(i, i // per_host) for i in range(hosts * per_host)]


def tpus(slices, side=4):
    """Slices of `side` x `side` chips, four to a host."""
    return [
        Device(n, n // 4, s, "tpu", "TPU v5 lite", (x, y, 0))
        for s in range(slices)
        for y in range(side)
        for x in range(side)
        for n in [(s * side + y) * side + x]
    ]


def along(mesh, axis):
    """The hosts of the first group along an axis."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    return [d.process_index for d in devices.reshape(-1, devices.shape[-1])[0]]


def ids(mesh):
    return [d.id for d in mesh.devices.flat]


@pytest.mark.unit
def test_all_devices_by_default():
    mesh = jzero.mesh()
    assert mesh == Mesh(np.array(jax.devices()), ("data",))
    assert mesh.axis_types == (AxisType.Auto,)


@pytest.mark.unit
@pytest.mark.parametrize("shuffled", [False, True])
def test_axes_on_the_boundaries_of_hosts(shuffled):
    devices = gpus(4)
    if shuffled:
        random.Random(0).shuffle(devices)
    for mesh in (
        jzero.mesh({"replica": "hosts", "data": "host"}, devices=devices),
        jzero.mesh(replica="rest", data="host", devices=devices),
        jzero.mesh({"replica": -1, "data": 8}, devices=devices),
        jzero.mesh({"replica": 4}, data=8, devices=devices),
    ):
        assert dict(mesh.shape) == {"replica": 4, "data": 8}
        assert along(mesh, "data") == [0] * 8
        assert along(mesh, "replica") == [0, 1, 2, 3]
        assert ids(mesh) == list(range(32))


@pytest.mark.unit
def test_an_axis_stands_where_its_word_says_wherever_it_is_listed():
    mesh = jzero.mesh({"data": "host", "replica": "hosts"}, devices=gpus(4))
    assert mesh.axis_names == ("data", "replica")
    assert along(mesh, "data") == [0] * 8
    assert along(mesh, "replica") == [0, 1, 2, 3]


@pytest.mark.unit
def test_numbers_fill_hosts_from_the_last_axis():
    mesh = jzero.mesh({"data": 16, "model": 4}, devices=gpus(8))
    assert along(mesh, "model") == [0] * 4
    assert along(mesh, "data") == [n // 2 for n in range(16)]
    within = jzero.mesh({"replica": "hosts", "data": 2, "model": -1}, devices=gpus(8))
    assert dict(within.shape) == {"replica": 8, "data": 2, "model": 4}
    assert along(within, "data") == [0, 0]


@pytest.mark.unit
def test_slices():
    devices = [dataclasses.replace(d, slice_index=d.process_index // 2) for d in gpus(4)]
    mesh = jzero.mesh({"replica": "slices", "data": "hosts", "model": "host"}, devices=devices)
    assert dict(mesh.shape) == {"replica": 2, "data": 2, "model": 8}
    assert along(mesh, "replica") == [0, 2]
    assert along(mesh, "data") == [0, 1]
    assert dict(jzero.mesh({"all": "hosts", "data": "host"}, devices=devices).shape) == {"all": 4, "data": 8}
    assert "8         2 hosts" not in what_crosses(mesh, {})
    lines = what_crosses(mesh, {}).splitlines()
    assert lines[0] == "{'replica': 2, 'data': 2, 'model': 8} over 4 hosts x 8 devices in 2 slices: fake"
    assert [re.split(r"  +", line)[2:] for line in lines[3:]] == [
        ["2 hosts, 2 slices", "cross between slices"],
        ["2 hosts", "cross between hosts"],
        ["1 host", "stay within a host"],
    ]


@pytest.mark.unit
def test_one_process_per_gpu_has_its_machine_as_host():
    devices = [Device(i, i, i // 8) for i in range(16)]  # jax numbers the machines as slices
    assert jzero.mesh(replica="hosts", data="host", devices=devices).shape["data"] == 8
    unnumbered = [Device(i, i) for i in range(16)]
    mesh = jzero.mesh(replica="hosts", data="host", devices=unnumbered, devices_per_host=8)
    assert dict(mesh.shape) == {"replica": 2, "data": 8}
    assert "16 devices" not in what_crosses(mesh, {}, devices_per_host=8)
    assert span(mesh, ["data"], devices_per_host=8).hosts == 1
    assert span(mesh, ["data"]).hosts == 8
    assert hosts_of(unnumbered[:2]) == [HostPosition(0, 0), HostPosition(0, 1)]


@pytest.mark.unit
def test_tpus_keep_to_their_torus():
    """Within a slice neighbours along an axis are neighbours on the torus; across slices the outermost axis."""
    mesh = jzero.mesh({"data": 4, "model": 4}, devices=tpus(1))
    for row in mesh.devices:
        assert len({d.coords[1] for d in row}) == 1 or len({d.coords[0] for d in row}) == 1
    for mesh in (
        jzero.mesh({"data": 8, "model": 4}, devices=tpus(2)),
        jzero.mesh({"replica": "slices", "data": 4, "model": 4}, devices=tpus(2)),
    ):
        assert [d.slice_index for d in mesh.devices.reshape(-1, 4)[:, 0]] == [0] * 4 + [1] * 4
    with pytest.raises(ValueError, match="of 1 devices, does not divide by 2 slices"):
        jzero.mesh({"data": 1, "model": 32}, devices=tpus(2))


ERRORS = {
    "product": (
        {"data": 16, "model": 8}, gpus(8),
        "16 (data) x 8 (model) = 128 devices, but there are 8 hosts x 8 = 64.\nThe sizes must multiply to 64; one of",
    ),
    "rest": ({"data": -1, "model": 5}, gpus(8), "? (data) x 5 (model) = 5 devices, but there are 8 hosts x 8 = 64.\n"
             "The sizes must divide 64"),
    "two rests": ({"data": -1, "model": "rest"}, gpus(1), "'data' and 'model' both have 'rest'"),
    "two hosts": ({"data": "host", "model": "host"}, gpus(1), "'data' and 'model' both have 'host'"),
    "word": ({"data": "hots"}, gpus(1), "the size of axis 'data' is 'hots'. Did you mean 'hosts'? Pass a number"),
    "zero": ({"data": 0}, gpus(1), "the size of axis 'data' is 0; it must be at least 1, or -1."),
    "uneven axis": ({"rest": -1, "data": 3}, gpus(3),
                    "2 axes lie unevenly over the 3 hosts:\n  'rest'  groups of 8  on hosts of 8\n"
                    "  'data'  groups of 3  on hosts of 8\nSome of"),
    "uneven hosts": ({"data": -1}, gpus(2)[:-1],
                     "the 2 hosts have different numbers of devices:\n  host 0 of slice 0  8 devices\n"
                     "  host 1 of slice 0  7 devices\nAn axis could not keep to their boundaries. Pass devices= with"),
    "uneven slices": ({"data": -1}, [dataclasses.replace(d, slice_index=d.process_index // 2) for d in gpus(3)],
                      "the 2 slices have different numbers of hosts:\n  slice 0  2 hosts\n  slice 1  1 host"),
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    axes, devices, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(f"jzero.mesh: {message}")):
        jzero.mesh(axes, devices=devices)


@pytest.mark.unit
def test_wrong_kinds():
    with pytest.raises(TypeError, match=r"the size of axis 'data' must be an int or a word, got 2\.0"):
        jzero.mesh(data=2.0)  # type: ignore[arg-type]
    for wrong in (["data"], "data", 8, [("data", 8)]):
        with pytest.raises(TypeError, match="axes must be a mapping of sizes by name"):
            jzero.mesh(wrong)
    for wrong in (1, ""):
        with pytest.raises(TypeError, match="an axis is named by a word, not"):
            jzero.mesh({wrong: 8})
    with pytest.raises(ValueError, match="devices is empty"):
        jzero.mesh(devices=[])
    with pytest.raises(TypeError, match=r"devices must be JAX devices \(jax.devices\(\)\), not 1"):
        jzero.mesh(devices=[1, 2])
    with pytest.raises(ValueError, match="8 devices were passed, 4 different ones"):
        jzero.mesh(devices=jax.devices()[:4] * 2)
    with pytest.raises(TypeError, match=r"pod must be a jzero\.Pod, not 'h200'"):
        jzero.mesh(pod="h200")
    with pytest.raises(ValueError, match="axis 'data' is given twice"):
        jzero.mesh({"data": 4}, data=2)
    with pytest.raises(TypeError, match=r"'device_per_host' is not an option\. Did you mean 'devices_per_host'"):
        jzero.mesh(replica="hosts", data="host", device_per_host=4)
    assert jzero.mesh(model=2, pipe=-1).shape == {"model": 2, "pipe": 4}  # not taken for pod=
    with pytest.raises(ValueError, match="devices_per_host=3"):
        jzero.mesh(devices_per_host=3)


@pytest.mark.unit
def test_what_a_step_sends_over_the_network():
    """P bytes of params on 2 hosts x 4 devices; a ring over hosts leaves each of them once."""
    mesh = jzero.mesh({"replica": 2, "data": 4}, devices_per_host=4)
    shapes, size = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}, 2**22

    def leaves(**fields):
        text = jzero.estimate(jzero.make_plan(shapes, mesh=mesh, **fields)).network(devices_per_host=4)
        rows = [re.split(r"  +", line) for line in text.splitlines()]
        return {r[0]: r[-2:] for r in rows if r[0] in ("replica", "data", "replica+data") and len(r) == 6}

    both = ("replica", "data")
    sent = {"data": 3 * size * 3 / 4, "replica": 2 * size / 4 / 2, "replica+data": 3 * size * 7 / 8}
    mb = {k: f"{v / 1e6:.2f} MB" for k, v in sent.items()}
    hsdp = leaves(stage=3, axis="data", batch_axis=both)
    assert hsdp == {
        "data": [mb["data"], "0 B"],
        "replica": [mb["replica"], f"{4 * sent['replica'] / 1e6:.2f} MB"],
    }
    assert leaves(stage=3, axis=both) == {"replica+data": [mb["replica+data"], mb["replica+data"]]}


@pytest.mark.pod
def test_pods():
    pod = jzero.pod("h200", hosts=2)
    mesh = jzero.mesh({"replica": "hosts", "data": "host"}, pod=pod)
    assert mesh == pod.mesh({"replica": 2, "data": 8}) == pod.mesh({"replica": "hosts", "data": "host"})
    assert jzero.mesh(pod=jzero.pod("h200", hosts=2, gpus_per_host=1), all=-1, data="host").shape["all"] == 2
