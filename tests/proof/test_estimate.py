"""`estimate`: closed forms against the numbers of the papers, and against programs that XLA compiled."""

from __future__ import annotations

import jax
import optax
import pytest

import jzero
from jzero.proof.transformer import Transformer

VALUES = 1024 * 512
LEAF = {"w": jax.ShapeDtypeStruct((1024, 512), "bfloat16")}


def plan_of(stage, axes=None, **fields):
    """A plan for one bf16 leaf of VALUES values on the simulated devices."""
    axes = {"data": 8} if axes is None else axes
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    return jzero.make_plan(LEAF, stage=stage, mesh=mesh, **fields)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stage", "params", "grads", "state"), [(0, 2, 2, 12), (1, 2, 2, 1.5), (2, 2, 0.25, 1.5), (3, 0.25, 0.25, 1.5)]
)  # fmt: skip
def test_states_are_those_of_the_paper(stage, params, grads, state):
    e = jzero.estimate(plan_of(stage))
    assert (e.params, e.grads, e.opt_state) == (params * VALUES, grads * VALUES, state * VALUES)
    assert e.total == e.states == (params + grads + state) * VALUES
    assert e.wire_psi == (3 if stage == 3 else 2)


@pytest.mark.unit
def test_any_optimizer_is_counted_from_its_own_state():
    plan = plan_of(2)
    assert jzero.estimate(plan, tx=optax.sgd(1e-2)).opt_state == 4 * VALUES // 8
    assert jzero.estimate(plan, tx=optax.adamw(1e-2)).opt_state == 12 * VALUES // 8 + 4
    assert jzero.estimate(plan, tx=optax.lion(1e-2)).opt_state == 8 * VALUES // 8 + 4
    rows_and_columns = jzero.estimate(plan, tx=optax.adafactor(1e-2)).opt_state
    assert 4 * VALUES // 8 < rows_and_columns < 4.2 * VALUES // 8 + 4 * (1024 + 512)


@pytest.mark.unit
@pytest.mark.parametrize(("stage", "psi"), [(0, 2), (1, 2), (2, 5), (3, 12)])
def test_accumulation(stage, psi):
    """Whole gradients are reduced once; split ones once per micro-batch; both are summed in fp32."""
    e = jzero.estimate(plan_of(stage), accumulate=4)
    assert e.wire_psi == psi
    assert e.grads == 4 * VALUES // (1 if stage < 2 else 8)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stage", "uses", "psi"),
    [
        (1, ["lookup", "matmul"], 2),  # one gradient, reduced by the update
        (2, ["lookup", "matmul"], 2), (2, ["lookup"], 2),  # the same: all gradients are less than a bucket
        (3, ["matmul"], 3), (3, ["lookup"], 2), (3, ["lookup", "matmul"], 5), (3, ["matmul", "matmul"], 6),
    ],
)  # fmt: skip
def test_each_use_is_gathered_and_reduced_by_itself(stage, uses, psi):
    assert jzero.estimate(plan_of(stage), uses={"['w']": uses}).wire_psi == psi
    if (stage, len(uses)) == (2, 2):  # reduced by each, where they are made
        assert jzero.estimate(plan_of(stage, bucket_bytes=2**10), uses={"['w']": uses}).wire_psi == psi + 1


@pytest.mark.unit
def test_weights_that_are_kept_are_gathered_once():
    kept = plan_of(3, reshard_after_forward=False)
    assert jzero.estimate(kept).wire_psi == 2
    assert jzero.estimate(kept, accumulate=4).wire_psi == 8
    assert jzero.estimate(kept, uses={"['w']": ["lookup", "matmul"]}).wire_psi == 3  # reduced by each
    model = {"layers": 2, "width": 64, "heads": 2, "seq": 64}
    more = jzero.estimate(kept, model=model).working - jzero.estimate(plan_of(3), model=model).working
    assert (more, jzero.estimate(kept).states) == (
        0,
        jzero.estimate(plan_of(3)).states,
    )  # one weight: all is largest


@pytest.mark.unit
def test_uses_that_are_wrong():
    with pytest.raises(ValueError, match=r"uses= names 'w', which is not a param of the plan\."):
        jzero.estimate(plan_of(3), uses={"w": ["lookup"]})
    for wrong in ("lookup", [], ["embed"]):
        with pytest.raises(ValueError, match="Pass a word for each use: 'matmul' or 'lookup'"):
            jzero.estimate(plan_of(3), uses={"['w']": wrong})


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stage", "fields", "expected"),
    [
        # gradients: a reduce-scatter inside, an all-reduce of the shard across; params: gathered inside
        (2, {"axis": "data", "batch_axis": ("replica", "data")}, {"data": 2 * 3 / 4, "replica": 2 * 1 / 2 / 4}),
        (3, {"axis": "data", "batch_axis": ("replica", "data")}, {"data": 3 * 3 / 4, "replica": 2 * 1 / 2 / 4}),
        # hpZ: the state over all, params inside; new params cross once, uses stay inside
        (3, {"axis": ("replica", "data"), "param_axis": "data"},
         {"replica+data": 7 / 8, "replica": 1 / 2 / 4, "data": 2 * 3 / 4}),
    ],
)  # fmt: skip
def test_hybrids_by_axis(stage, fields, expected):
    e = jzero.estimate(plan_of(stage, {"replica": 2, "data": 4}, **fields))
    assert dict(e.wire_by_axes) == {axes: round(share * 2 * VALUES) for axes, share in expected.items()}
    assert e.wire == sum(e.wire_by_axes.values())
    assert "over replica" in str(e)


@pytest.mark.unit
def test_tensor_parallelism_takes_its_part_first():
    mesh = jax.make_mesh((2, 4), ("model", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plan = jzero.make_plan(LEAF, stage=2, mesh=mesh, param_specs={"w": jax.P(None, "model")})
    e = jzero.estimate(plan)
    assert (e.params, e.grads, e.opt_state) == (VALUES, VALUES // 4, 12 * VALUES // 8)
    assert dict(e.wire_by_axes) == {"data": 2 * 3 * VALUES // 4}


@pytest.mark.unit
def test_a_transformer_counts_activations_as_korthikanti_does():
    """34 s b h + 5 a s^2 b bytes per layer in 16 bits (arXiv:2205.05198, equation 1), and one input with remat."""
    s, b, h, a, layers = 2048, 3, 6144, 64, 5
    sizes = {"layers": layers, "width": h, "heads": a, "seq": s, "batch": b}
    kept = Transformer(**sizes, remat=False)
    assert kept.saved == layers * (34 * s * b * h + 5 * a * s * s * b)
    remat = Transformer(**sizes, vocab=50304)
    assert remat.saved == layers * 2 * s * b * h
    assert remat.working == max(kept.saved // layers, 8 * s * b * 50304)
    assert Transformer(**sizes, flash=True).working == 34 * s * b * h
    tiled = Transformer(**sizes, remat=False, mlp_tiles=4)  # hidden values of the MLP: 16 s b h bytes
    assert tiled.saved == kept.saved - 80 * s * b * h
    assert (tiled.recomputed, tiled.working) == (80 * s * b * h, 4 * s * b * h)
    assert Transformer(**sizes, flash=True, mlp_tiles=4).working == 22 * s * b * h


@pytest.mark.unit
def test_of_a_head_in_pieces_two_are_alive():
    sizes = {"layers": 1, "width": 8192, "heads": 64, "seq": 512, "vocab": 256000, "flash": True, "tiled_loss": True}
    head = {"head": jax.ShapeDtypeStruct((8192, 256000), "bfloat16")}
    kept, cut = (
        jzero.make_plan(head, stage=stage, mesh=jax.make_mesh((8,), ("data",))) for stage in (2, 3)
    )
    tile, one = 3 * 2**26, cut.whole_bytes // 4  # of a piece in bf16
    assert jzero.estimate(kept, model=sizes).working == tile + 4 * 8192 * 256000
    assert jzero.estimate(cut, model=sizes).working == tile + 2 * 2 * one + 4 * 512 * 8192 + 2 * 2 * one


@pytest.mark.unit
def test_saved_inputs_are_split_or_on_the_host():
    sizes = {"layers": 12, "width": 1024, "heads": 16, "seq": 512}
    one = 2 * 512 * 1024
    plain, split = Transformer(**sizes), Transformer(**sizes, partition=4)
    away, both = (Transformer(**sizes, offload=True, partition=n) for n in (1, 4))
    assert [m.saved for m in (plain, split, away, both)] == [12 * one, 3 * one, 2 * one, one // 2]
    assert [m.host for m in (plain, split, away, both)] == [0, 0, 12 * one, 3 * one]
    assert plain.recomputed == both.recomputed == 12 * (plain.block - one)
    assert Transformer(**sizes, remat=False).recomputed == 0
    e = jzero.estimate(plan_of(2), model=away, accumulate=2)
    assert (e.activations, e.activations_host, e.recomputed) == (2 * one, 12 * one, away.recomputed)
    assert e.to_host == e.to_device == 2 * 12 * one
    assert e.host_per_process == 12 * one * e.devices_per_process
    assert "activations on the host" in str(e)
    with pytest.raises(ValueError, match=r"jzero\.estimate: model: with remat=False"):
        jzero.estimate(plan_of(2), model={**sizes, "remat": False, "offload": True})


@pytest.mark.unit
def test_a_model_adds_activations_and_what_is_gathered():
    model = Transformer(layers=2, width=64, heads=2, seq=16)
    split, whole = (jzero.estimate(plan_of(stage), model=model) for stage in (3, 2))
    assert whole.working == model.working
    assert (
        split.working == model.working + 2 * 2 * VALUES
    )  # the weight, and its gradient before it is reduced
    assert split.total == split.states + split.activations + split.working
    assert "activations" in str(split)


@pytest.mark.unit
def test_bad_input():
    plan = plan_of(2)
    with pytest.raises(TypeError, match=r"plan must be a jzero.Plan, not dict\. Pass jzero\.plan_of"):
        jzero.estimate(LEAF)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"model must be a mapping of sizes, .* or None, not int"):
        jzero.estimate(plan, model=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"jzero\.estimate\(accumulate=0\)"):
        jzero.estimate(plan, accumulate=0)
    with pytest.raises(TypeError, match="must be an integer"):
        jzero.estimate(plan, accumulate=True)
    with pytest.raises(ValueError, match=r"jzero\.estimate: model\(layers=0\)"):
        jzero.estimate(plan, model={"layers": 0, "width": 1, "heads": 1, "seq": 1})
    with pytest.raises(TypeError, match=r"model has no size 'layer'\. Did you mean 'layers'"):
        jzero.estimate(plan, model={"layer": 2})
    with pytest.raises(TypeError, match="model lacks width, heads, seq"):
        jzero.estimate(plan, model={"layers": 2})
