"""What trainers do around the optimizer, against torch doing it: clipping, AMP, groups, schedules."""
import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.errors import OptimizerError, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.step import StepValues

from .bits import bits

SHAPES = {"a": (37, 5), "b": (129,), "c": (64,)}


def one_bucket(shapes=SHAPES):
    slices, reach = [], 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        slices.append(BucketSlice(name, reach, size))
        reach += size
    return Layout([slices], shapes, [reach])


class Pair:
    """A replica and torch.optim on the same start, compared after every step."""

    def __init__(self, name="adamw", dtype=torch.float32, options=({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-3}),
                 fused=False, **kwargs):
        generator = torch.Generator().manual_seed(1)
        start = {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
        self.generator, groups = generator, ([["a", "b"], ["c"]])
        spec = OptimizerSpec.check(name, list(zip(groups, options, strict=True)))
        rounding = RoundingMode("torch-cpu-fused" if fused else "torch-cpu")
        self.replica = Replica(start, spec, rounding=rounding, **kwargs)
        self.twins = {n: t.float().clone().requires_grad_(True) for n, t in start.items()}
        self.optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name](
            [{"params": [self.twins[n] for n in part], **o} for part, o in zip(groups, options, strict=True)],
            fused=fused,
        )

    def gradients(self, dtype=torch.float32):
        return {n: torch.randn(s, generator=self.generator).to(dtype) for n, s in SHAPES.items()}

    def step(self, gradients, values=None, layout=None):
        layout = layout or one_bucket()
        slot = self.replica.build(self.replica.current.step + 1, layout, values)
        data = torch.cat([gradients[s.name].reshape(-1) for s in layout.buckets[0]])
        slot.apply(0, data)
        self.replica.publish(slot)

    def check(self):
        now = self.replica.current
        values = now.masters or now.parameters
        for n, twin in self.twins.items():
            assert bits(values[n]) == bits(twin), n
            theirs = self.optimizer.state.get(twin, {})
            mine = {k: v for k, v in now.optimizer_state.get(n, {}).items() if k != "master"}
            assert {k: bits(v) for k, v in mine.items()} == {k: bits(v) for k, v in theirs.items() if v is not None}


@pytest.mark.parametrize("fused", [False, True])
def test_schedules_and_clipping(fused):
    pair = Pair(fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(pair.optimizer, lambda t: 1 / (1 + t) ** 0.5)
    for _ in range(6):
        g = pair.gradients()
        for n, twin in pair.twins.items():
            twin.grad = g[n].clone()
        norm = torch.nn.utils.clip_grad_norm_(pair.twins.values(), 3.0)
        coefficient = float(torch.clamp(3.0 / (norm + 1e-6), max=1.0))
        rates = tuple({"lr": group["lr"]} for group in pair.optimizer.param_groups)
        pair.optimizer.step()
        scheduler.step()
        pair.step(g, StepValues(groups=rates, clip=coefficient))
        pair.check()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_schedules_of_betas_momentum_and_decay(name):
    """OneCycleLR moves beta1 or momentum with the rate; the decay is changed by hand, as some recipes do."""
    extra = ({"momentum": 0.9}, {"momentum": 0.8}) if name == "sgd" else ({}, {})
    pair = Pair(name, options=tuple({"lr": 1e-2, **each} for each in extra))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(pair.optimizer, [0.1, 0.01], total_steps=12)
    seen = set()
    for t in range(10):
        for group in pair.optimizer.param_groups:
            group["weight_decay"] = 0.05 * (t % 3)
        keys = ("lr", "weight_decay", "momentum" if name == "sgd" else "betas")
        values = tuple({key: group[key] for key in keys} for group in pair.optimizer.param_groups)
        seen.add(str(values))
        g = pair.gradients()
        for n, twin in pair.twins.items():
            twin.grad = g[n].clone()
        pair.optimizer.step()
        scheduler.step()
        pair.step(g, StepValues(groups=values))
        pair.check()
    assert len(seen) == 10


def test_amp_unscale_then_clip():
    pair = Pair("adamw", options=({"lr": 1e-2}, {"lr": 1e-3}))
    scaler = torch.amp.GradScaler("cpu", init_scale=3000.0)
    for _ in range(4):
        g = pair.gradients()
        scaler.scale(torch.zeros((), requires_grad=True))
        for n, twin in pair.twins.items():
            twin.grad = g[n].clone()
        scaler.unscale_(pair.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(pair.twins.values(), 1e-3)
        scale = scaler.get_scale()
        scaler.step(pair.optimizer)
        scaler.update()
        clip = float(torch.clamp(1e-3 / (norm + 1e-6), max=1.0))
        assert clip < 1
        pair.step(g, StepValues(loss_scale=scale, clip=clip))
        pair.check()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_amp_unscales_and_skips(name):
    options = ({"lr": 1e-2, "momentum": 0.9}, {"lr": 1e-3}) if name == "sgd" else ({"lr": 1e-2}, {"lr": 1e-3})
    pair = Pair(name, options=options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
    for t in range(6):
        g = pair.gradients()
        if t == 2:
            g["b"][3] = float("inf")
        scale = scaler.get_scale()
        scaler.scale(torch.zeros((), requires_grad=True))  # the scaler creates its scale lazily
        for n, twin in pair.twins.items():
            twin.grad = g[n].clone()
        scaler.step(pair.optimizer)
        scaler.update()
        pair.step(g, StepValues(loss_scale=scale, skip=t == 2))
        pair.check()
    assert pair.replica.current.step == 6
    if name == "adamw":
        assert float(pair.replica.current.optimizer_state["a"]["step"]) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_in_fp32_and_the_derived_copy(dtype):
    pair = Pair(dtype=dtype, threads=1)
    for _ in range(4):
        g = pair.gradients(dtype)
        for n, twin in pair.twins.items():
            twin.grad = g[n].float()
        pair.optimizer.step()
        pair.step(g)
        pair.check()
        now = pair.replica.current
        for n, twin in pair.twins.items():
            assert now.parameters[n].dtype == dtype and torch.equal(now.parameters[n], twin.detach().to(dtype))
            assert bits(now.optimizer_state[n]["master"]) == bits(twin)
    again = Replica(now.parameters, pair.replica.optimizer, step=4, rounding=pair.replica.rounding,
                    optimizer_state=now.optimizer_state)
    assert all(bits(again.current.masters[n]) == bits(pair.twins[n]) for n in SHAPES)


def test_tied_names_buffers_and_constants():
    weight = torch.randn(6, 3)
    tensors = {"emb": weight, "mask": torch.arange(4), "mean": torch.zeros(2), "head": weight.clone()}
    spec = OptimizerSpec.check("sgd", [(["emb"], {"lr": 0.5})])
    replica = Replica(tensors, spec, buffers=frozenset(["mean"]), tied={"head": "emb"})
    layout = Layout([[BucketSlice("emb", 0, 18)]], {"emb": (6, 3)}, [18])
    for step, value in ((1, 3.0), (2, None)):
        buffers = {} if value is None else {"mean": torch.full((2,), value)}
        slot = replica.build(step, layout, StepValues(buffers=buffers))
        slot.apply(0, torch.ones(18))
        replica.publish(slot)
    now = replica.current.parameters
    assert list(now) == list(tensors) and torch.equal(now["mean"], torch.full((2,), 3.0))
    assert torch.equal(now["emb"], weight - 0.5 - 0.5) and now["head"].data_ptr() == now["emb"].data_ptr()
    assert len({slot.parameters["mask"].data_ptr() for slot in replica.slots}) == 1, "constants are kept once"
    with pytest.raises(ReplicaError, match="'mask' is not a buffer"):
        replica.build(3, layout, StepValues(buffers={"mask": torch.arange(4)}))
    with pytest.raises(ReplicaError, match="differs from it"):
        Replica({**tensors, "head": weight + 1}, spec, tied={"head": "emb"})


@pytest.mark.parametrize(("name", "values", "message"), [
    ("adam", {"weight_decay": 0.1}, "fused Adam on CUDA rounds the product"),
    ("adamw", {"betas": (0.8, 0.999)}, "no corrections of the GPU's powf for a beta of 0.8"),
])
def test_what_a_schedule_makes_of_a_fused_optimizer_on_a_gpu(name, values, message):
    """Without a kernel nothing is begun, and the next step is free to be built."""
    rounding = RoundingMode("torch-cuda-fused", "2.11.0", corrections={"0.9": {}, "0.999": {}})
    spec = OptimizerSpec.check(name, [(["w"], {"lr": 0.1})], fused=True)
    with pytest.raises(OptimizerError, match=message):
        Replica({"w": torch.ones(4)}, spec, rounding=rounding, values=[values])
    replica = Replica({"w": torch.ones(4)}, spec, rounding=rounding, slots=2)
    layout = Layout([[BucketSlice("w", 0, 4)]], {"w": (4,)}, [4])
    with pytest.raises(OptimizerError, match=message):
        replica.build(1, layout, StepValues(groups=(values,)))
    assert replica.building is None
    slot = replica.build(1, layout, StepValues(groups=({"lr": 0.2},)))
    slot.apply(0, torch.ones(4))
    replica.publish(slot)
    assert replica.current.step == 1
