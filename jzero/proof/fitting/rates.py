"""How fast a pod is: arithmetic, memory and links, by the GPU's data sheet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jzero.core.errors import check_kind, check_number, nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Per second.

    Attributes:
      flops: of a GPU's matmuls in 16 bits, dense.
      reached: the part of `flops` that a model's matmuls reach.
      memory: bytes of a GPU's own memory.
      within_host: bytes that a GPU sends to others of its host, in one direction (NVLink).
      between_hosts: bytes that a host sends to others, in one direction (all of its network cards).
      pcie: bytes between a GPU and host memory, in each direction.
      hidden: the part of the shorter of arithmetic and wire that runs beside the longer one.
    """

    flops: float
    memory: float
    within_host: float
    between_hosts: float
    pcie: float
    reached: float = 0.5
    hidden: float = 0.9

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, part = getattr(self, field.name), field.name in ("reached", "hidden")
            rule = "a number above 0 and at most 1" if part else "a number per second above 0"
            check_number(value, field.name, rule, lambda x: x > 0, where="jzero.fit: rates")
            if part and value > 1:
                raise ValueError(f"jzero.fit: rates: {field.name} must be {rule}, got {value!r}.")


GPUS = {
    # NVIDIA's data sheets; hosts with one network card of 200 (A100) or 400 Gbit/s for each of eight GPUs
    "a100-80gb": Rates(flops=312e12, memory=2.04e12, within_host=300e9, between_hosts=200e9, pcie=25e9),
    "h100": Rates(flops=989e12, memory=3.35e12, within_host=450e9, between_hosts=400e9, pcie=50e9),
    "h200": Rates(flops=989e12, memory=4.8e12, within_host=450e9, between_hosts=400e9, pcie=50e9),
    "b200": Rates(flops=2250e12, memory=8.0e12, within_host=900e9, between_hosts=400e9, pcie=50e9),
}


def rates_of(gpu: str, rates: Mapping[str, float] | None) -> Rates:
    """Those of a GPU, with others in place of some.

    Raises:
      TypeError, ValueError: `rates` is not a mapping from names of `Rates` to numbers in their range.
    """
    check_kind(rates, "rates", Mapping, 'a mapping such as {"between_hosts": 50e9}', where="jzero.fit", optional=True)
    names = [field.name for field in dataclasses.fields(Rates)]
    for name in rates or {}:
        if name not in names:
            raise ValueError(f"jzero.fit: rates has no {name!r}.{nearest(str(name), names)} Known: {', '.join(names)}.")
    return dataclasses.replace(GPUS[gpu], **(rates or {}))
