"""What several instances of Megatron-Core's distributed optimizer AllReduce, with its own classes (lab/megatron.py),
seen by one rank whose others need no process. Megatron-Core is of the extra `dev`, no requirement of ours."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flowcheck
from flowcheck.errors import UserError
from flowcheck.trainer.describe.described import check_gradients, group_options
from flowcheck.trainer.describe.description import Watch, entries
from flowcheck.trainer.describe.megatron import Megatron
from flowcheck.trainer.describe.megatron_pieces import instances
from flowcheck.trainer.describe.optimizers import optimizer_of
from flowcheck.trainer.describe.wrapped import parts_of
from flowcheck.trainer.ranges import Source
from flowcheck.trainer.recover.recovered import Recovered
from lab.megatron import Places, as_cuda, make

from ..hand_node import TOKEN, HandNode, until
from ..pair import join, leave
from .described import call, refusal
from .training import COMMUNICATOR, FLOW

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron-Core and of what it imports
WIDTH, SMALL = 24, 600  # 576 weights of a layer and a few more make a bucket


class Chain(torch.nn.Module):
    """Two layers of one size, in either order, a frozen tensor and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.tensor(0))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.two, self.one) if self.turned else (self.one, self.two)
        return layers[1](layers[0](x))


class Job:
    """One rank of two instances of two ranks, and a training loop as Megatron-LM has it (train_step)."""

    def __init__(self, rank: int = 0, dtype: torch.dtype = torch.bfloat16, *, reduce_float32: bool = True,
                 clip: float = 0.0, bucket_elements: int = SMALL, config: dict[str, Any] | None = None,
                 **settings: Any) -> None:
        leave()
        join(rank, 4)
        instance, shard = divmod(rank, 2)
        torch.manual_seed(1)
        self.places = Places(
            dist.new_group([shard, shard + 2]), dist.new_group([2 * instance, 2 * instance + 1]),
            dist.new_group([0, 1, 2, 3]), dist.new_group([rank]),
        )
        self.model, self.optimizer = make(
            Chain().to(dtype), self.places, instances=2, bucket_elements=bucket_elements,
            reduce_float32=reduce_float32, clip=clip, optimizer={"lr": 0.01, "weight_decay": 0.1} | (config or {}),
            **settings)
        self.inner = optimizer_of(self.optimizer)
        self.dtype = dtype
        self.wires: list[torch.Tensor] = self.places.across.reduced  # what is AllReduced across instances

    def part(self) -> Any:
        (part,) = parts_of([self.model], self.optimizer)
        return part

    def backward(self, scale: float = 1.0) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        x = torch.linspace(-1.0, 1.0, 4 * WIDTH).view(4, WIDTH).to(self.dtype)
        (self.model(x).float().square().mean() * scale * self.optimizer.get_loss_scale().item()).backward()
        self.model.finish_grad_sync()

    def step(self, scale: float = 1.0) -> list[torch.Tensor]:
        """An iteration; what it AllReduced."""
        self.wires.clear()
        self.backward(scale)
        wires = list(self.wires)
        self.optimizer.step()
        return wires

    def calls(self) -> list[dict[str, Any]]:
        return [call("AllReduce", one.numel(), str(one.dtype).removeprefix("torch.")) for one in self.wires]


class Gpt(Job):
    """Of Megatron-Core's own model and groups, as one rank of Megatron-LM has them."""

    def __init__(self, rank: int) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        leave()
        join(rank, 4)
        self._state = parallel_state
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2,
                                                 create_gloo_process_groups=False)
        # It keeps states of a GPU's generator for dropout, which there is none of here.
        tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
        torch.manual_seed(1)
        plain = ("bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion",
                 "bias_activation_fusion", "persist_layer_norm")
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, bf16=True,
            params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, attention_dropout=0.0, hidden_dropout=0.0,
            **dict.fromkeys(plain, False))
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16,
                         share_embeddings_and_output_weights=True)
        settings = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=5000, grad_reduce_in_fp32=True,
                                                  **settings), Float16Module(config, model))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, clip_grad=0.1, bf16=True,
                            use_distributed_optimizer=True), [self.model], use_gloo_process_groups=False)
        self.inner, self.dtype = optimizer_of(self.optimizer), torch.bfloat16
        self.wires = parallel_state.get_inter_distributed_optimizer_instance_group().reduced

    def backward(self, scale: float = 1.0) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        text, places = torch.arange(32).view(2, 16) * 7 % 64, torch.arange(16).expand(2, 16)
        unseen = torch.ones(1, 1, 16, 16).triu(1).bool()
        (self.model(text, places, unseen, labels=text.roll(1)).float().mean() * scale).backward()
        finalize_model_grads([self.model], None)

    def close(self) -> None:
        self._state.destroy_model_parallel()


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    """What takes two seconds to import is imported by the process that runs these tests, not by all that collect."""
    pytest.importorskip("megatron.core", reason="Megatron-Core (extra `dev`) is not installed")
    with as_cuda():
        yield
    leave()


def watched(job: Job, times: int = 3) -> tuple[Any, Any, Any]:
    """(part, described, manifest) after iterations."""
    part = job.part()
    described, said = entries(part, job.inner), []
    watch = Watch(part, job.inner, described, lambda since: said[since:], lambda: COMMUNICATOR, "", 0)
    manifest = None
    for _ in range(times):
        job.step()
        said += job.calls()
        part.check()
        part.over()
        part.said()
        manifest = watch.look()
    return part, described, manifest


def equal_to_torchs(job: Job, wire_type: str) -> int:
    """Gradients cut out of the AllReduces by the manifest, what a record says, and torch's own optimizer: after each
    step the bits of Megatron-Core's main parameters, and those of its model are these, rounded. In how many of four
    steps gradients were clipped."""
    part, described, manifest = watched(job)
    assert manifest.gradients.dtype == wire_type
    assert manifest.gradients.divisor == 1 and not manifest.narrow
    held = {name: value.clone() for name, value in part.state_dict().items() if name in described.names.values()}
    kind: Any = torch.optim.Adam if manifest.optimizer.name == "adam" else torch.optim.AdamW
    mine = kind([{"params": [held[name] for name in group.params]} for group in manifest.optimizer.groups], lr=1.0)
    mine.load_state_dict({**mine.state_dict(), "state": copy.deepcopy(job.inner.state_dict()["state"])})
    clipped = 0
    for number in range(4):
        for group in job.inner.param_groups:
            group["lr"] = 0.01 / (number + 1)
        wires = job.step(scale=number + 1.0)
        part.check()
        factor, scale, skipped = part.said()
        part.over()
        assert not part.changed and not skipped
        for group, options in zip(mine.param_groups, group_options(described, job.inner), strict=True):
            group.update(options)
        assert [wire.numel() for wire in wires] == [one.count for one in manifest.collectives.steady]
        for wire, bucket in zip(wires, manifest.buckets.steady, strict=True):
            for piece in bucket.slices:
                gradient = wire.flatten()[piece.offset : piece.offset + piece.length].float()
                if scale is not None:
                    gradient = gradient * torch.tensor(scale).double().reciprocal().float()
                held[piece.name].grad = gradient if factor is None else gradient * torch.tensor(factor)
        clipped += factor is not None and factor < 1.0
        mine.step()
        for name, value in held.items():
            assert torch.equal(part.state_dict()[name], value), (number, name)
            parameter, _, places = name[:-1].partition("[")
            start, end = map(int, places.split(":"))
            narrow = job.model.module.state_dict()[parameter].flatten()[start:end]
            assert torch.equal(narrow, value.to(job.dtype))
    return clipped


def test_an_entry_is_what_a_rank_steps_of_a_parameter() -> None:
    """The pieces of both ranks of an instance are all elements of all parameters, each once, cut where buckets are."""
    covered: dict[str, list[int]] = {}
    cut = False
    for rank in (0, 1):
        job = Job(rank)
        part = job.part()
        assert (part.name, part.by) == (f"shard{rank}", "Megatron-Core's DistributedDataParallel")
        assert dist.get_process_group_ranks(part.group) == [rank, rank + 2]
        found = {entry.name: entry for entry in entries(part, job.inner).entries}
        assert (found["count"].kind, found["frozen"].kind) == ("buffer", "constant")
        held = part.state_dict()
        for name, entry in found.items():
            if name not in ("count", "frozen"):
                parameter, _, places = name[:-1].partition("[")
                start, end = map(int, places.split(":"))
                assert (entry.kind, entry.dtype, entry.shape) == ("optimized", "float32", [end - start])
                whole = job.model.module.get_parameter(parameter).detach().flatten()
                assert torch.equal(held[name], whole[start:end].float())
                covered.setdefault(parameter, []).extend(range(start, end))
                cut = cut or start > 0 or end < whole.numel()
    assert cut
    assert {name: sorted(places) for name, places in covered.items()} == {
        name: list(range(value.numel())) for name, value in Chain().named_parameters() if value.requires_grad}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("dtype", "reduce_float32", "clip", "config"), [
    (torch.bfloat16, True, 0.0, {}), (torch.bfloat16, False, 0.01, {}), (torch.float32, True, 0.01, {}),
    (torch.float32, True, 1e6, {}), (torch.bfloat16, True, 0.01, {"decoupled_weight_decay": False}),
    (torch.float16, False, 0.01, {"initial_loss_scale": 1024.0}),
    (torch.bfloat16, True, 0.01, {"loss_scale": 8.0}),
])
def test_the_wire_and_the_record_make_what_the_rank_has(
    rank: int, dtype: torch.dtype, reduce_float32: bool, clip: float, config: dict[str, Any]
) -> None:
    job = Job(rank, dtype, reduce_float32=reduce_float32, clip=clip, config=config)
    assert equal_to_torchs(job, "float32" if reduce_float32 else str(dtype).removeprefix("torch.")) == (
        4 if clip == 0.01 else 0)


@pytest.mark.parametrize("settings", [
    {"average_in_collective": True}, {"overlap_param_gather": True}, {"overlap_grad_reduce": False},
    {"bucket_elements": 1 << 20},
], ids=lambda settings: next(iter(settings)))
def test_settings_of_its_ddp_change_nothing_of_that(settings: dict[str, Any]) -> None:
    assert equal_to_torchs(Job(1, clip=0.01, **settings), "float32") == 4


def test_a_rank_that_has_padding_alone_is_refused_and_the_others_are_followed() -> None:
    assert refusal(Job(1, pad_buckets_for_high_nccl_busbw=True).part) == (
        "optimizer", "steps nothing on this rank: what it has of each bucket is padding")
    assert equal_to_torchs(Job(0, clip=0.01, pad_buckets_for_high_nccl_busbw=True), "float32") == 4


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_its_own_gpt_in_groups_of_its_own(rank: int) -> None:
    """Float16Module and GPTModel of layers without Transformer Engine, groups of parallel_state, and
    finalize_model_grads."""
    with contextlib.closing(Gpt(rank)) as job:
        part = job.part()
        assert dist.get_process_group_ranks(part.group) == [rank % 2, rank % 2 + 2]
        assert part.name == f"shard{rank % 2}"
        part.close()
        equal_to_torchs(job, "float32")


def test_a_bucket_is_one_call_in_the_order_of_the_calls_with_its_padding() -> None:
    part, described, manifest = watched(Job())
    wide = [one.count for one in manifest.collectives.steady]
    assert len(wide) == 2 and all(count % 64 == 0 for count in wide)
    names = [[piece.name.partition("[")[0] for piece in bucket.slices] for bucket in manifest.buckets.steady]
    assert names[0][0].startswith("two.") and names[1][-1].startswith("one.")
    assert sum(piece.length for bucket in manifest.buckets.steady for piece in bucket.slices) < sum(wide)
    assert part.layout(described.names)[2] == "float32"


def test_buckets_that_change_places_are_seen_although_their_calls_are_the_same() -> None:
    job = Job()
    part, _, _ = watched(job)
    part.known(True)
    for turned in (False, True, False):
        job.model.module.turned = turned
        job.step()
        part.over()
        assert part.changed is turned
    job.model.module.turned = True
    part.known(False)
    job.step()
    part.over()
    assert not part.changed


def test_an_overflow_is_a_step_that_was_skipped() -> None:
    job = Job(dtype=torch.float16, reduce_float32=False, clip=1.0, config={"initial_loss_scale": 1024.0})
    part = job.part()
    job.step()
    assert part.said() == (pytest.approx(1.0), 1024.0, False)
    before = {name: value.clone() for name, value in part.state_dict().items()}
    job.step(scale=float("inf"))
    assert part.said() == (None, 1024.0, True)
    assert all(torch.equal(value, before[name]) for name, value in part.state_dict().items())
    assert part.said() is None  # it was forgotten


def test_a_norm_that_is_no_number_is_a_factor_that_is_none() -> None:
    job = Job(clip=1.0)
    part = job.part()
    job.step(scale=float("nan"))
    factor, _, _ = part.said()
    assert factor != factor


@pytest.mark.parametrize(("change", "what"), [
    (lambda job: job.model.scale_gradients(0.5), "gradients were changed between their AllReduce"),
    (lambda job: job.model.module.two.bias.main_grad.add_(1.0), "gradients were changed between their AllReduce"),
    (lambda job: job.optimizer.step(), "the optimizer steps with gradients that nobody has reduced"),
])
def test_gradients_that_the_wire_did_not_have_are_refused(change: Callable[[Job], Any], what: str) -> None:
    job = Job()
    part = job.part()
    if "nobody" not in what:
        job.backward()
    change(job)
    if "nobody" not in what:
        job.optimizer.step()
    where, said = refusal(part.check)
    assert where == "Megatron-Core" and said.startswith(what)


def test_two_steps_in_one_iteration_are_refused() -> None:
    job = Job()
    part = job.part()
    job.step()
    job.step()
    assert refusal(part.said)[1].startswith("the optimizer stepped more than once")
    part.over()
    assert part.layout({}) is None  # each bucket was reduced twice


def test_an_accumulation_reduces_once() -> None:
    job = Job()
    part, described, _ = watched(job)
    job.model.zero_grad_buffer()
    with job.model.no_sync():
        job.model(torch.ones(1, WIDTH, dtype=job.dtype)).sum().backward()
    job.model(torch.ones(1, WIDTH, dtype=job.dtype)).sum().backward()
    job.model.finish_grad_sync()
    job.optimizer.step()
    part.check()
    part.over()
    assert part.layout(described.names) is not None


# -- refused by name -----------------------------------------------------------------------------------------


def _fused(job: Job) -> None:
    fused = type("FusedAdam", (torch.optim.AdamW,), {"__module__": "transformer_engine.pytorch.optimizers.fused_adam"})
    job.optimizer.chained_optimizers[0].optimizer.__class__ = fused


def _other(job: Job) -> None:
    job.optimizer.chained_optimizers[0].optimizer.__class__ = type("Lion", (torch.optim.AdamW,), {})


def _chain(job: Job) -> None:
    job.optimizer.chained_optimizers *= 2


def _experts(job: Job) -> None:
    job.model.expert_parallel_bucket_groups = job.model.bucket_groups


def _tokens(job: Job) -> None:
    job.model.config.calculate_per_token_loss = True


def _sequence(job: Job) -> None:
    job.model.config.sequence_parallel = True
    job.model.tp_group = job.places.inside


def _embedding(job: Job) -> None:
    job.model.module.one.weight.shared_embedding = True
    job.model.pp_group = [job.places.inside]


def _group(job: Job) -> None:
    job.model.bucket_groups[0].buckets *= 2


def _moved(job: Job) -> None:
    parameter = job.model.bucket_groups[0].buckets[0].params_list[0]
    parameter.main_grad = parameter.main_grad.clone()


def _lacks(job: Job) -> None:
    del job.model.inter_dist_opt_group


def _precise(job: Job) -> None:
    job.optimizer.chained_optimizers[0].shard_fp32_from_float16_groups[0][0] = None


def _chunks(job: Job) -> None:
    job.optimizer.chained_optimizers[0].model_chunks.append(job.model.module)


def _stub(job: Job) -> None:
    job.optimizer.chained_optimizers[0].is_stub_optimizer = True


@pytest.mark.parametrize(("alter", "where", "what"), [
    (_fused, "optimizer", "is stepped by FusedAdam of transformer_engine, which rounds in an order of its own"),
    (_other, "optimizer", "is stepped by Lion, which is not followed"),
    (_chain, "optimizer", "is a chain of 2 optimizers (DistributedOptimizer, DistributedOptimizer)"),
    (_experts, "model", "has experts of their own data-parallel ranks"),
    (_tokens, "model", "has calculate_per_token_loss"),
    (_sequence, "model", "has tensor parallelism with sequence_parallel"),
    (_embedding, "model", "shares an embedding with another pipeline stage"),
    (_group, "model", "reduces 2 buckets in one group of NCCL's calls"),
    (_moved, "Megatron-Core", "is another one than is known: gradients lie elsewhere"),
    (_lacks, "Megatron-Core", "is another one than is known: its DistributedDataParallel has no inter_dist_opt_group"),
    (_precise, "optimizer", "steps parameters without float32 ones"),
    (_chunks, "optimizer", "steps 2 chunks of a model, and 1 are given"),
    (_stub, "optimizer", "steps nothing on this rank"),
])
def test_what_cannot_be_followed_is_refused_by_name(alter: Callable[[Job], None], where: str, what: str) -> None:
    job = Job()
    alter(job)
    assert refusal(job.part)[0] == where
    assert refusal(job.part)[1].startswith(what)


def test_one_instance_and_an_optimizer_of_torch_are_refused() -> None:
    job = Job()
    assert refusal(lambda: parts_of(job.model, job.inner))[1].startswith("is a AdamW, and Megatron-Core's")
    job.model.ddp_config.num_distributed_optimizer_instances = 1
    assert instances(job.model) == 1
    where, what = refusal(lambda: parts_of(job.model, job.optimizer))
    assert where == "model" and what.endswith(": ReduceScatter for its distributed optimizer puts no reduced gradient"
                                              " on the wire. Its ranks can send theirs: attach(source=\"feed\")"
                                              " (docs/use/feed.md)")
    outside = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert "is a chain of Megatron-Core's optimizers" in refusal(lambda: parts_of(outside, job.optimizer))[1]


# -- an attachment -------------------------------------------------------------------------------------------


@pytest.fixture
def attached(hand_node: HandNode) -> Iterator[tuple[Job, list[dict[str, Any]], Any]]:
    """A job that clips, the calls across instances (to be added to), and its attachment."""
    job, said = Job(clip=0.01), []
    attachment = flowcheck.attach(
        [job.model], job.optimizer, node="{}:{}".format(*hand_node.address), token=TOKEN.decode(), max_stall_s=0.0,
        topology=lambda: {"communicator": COMMUNICATOR, "flows": [FLOW]}, collectives=lambda since: said[since:])
    yield job, said, attachment
    attachment.close(0.0)
    for owner, name in ((job.optimizer, "step"), (job.optimizer.chained_optimizers[0], "prepare_grads"),
                        *((group, "start_grad_sync") for group in job.model.bucket_groups)):
        assert name not in vars(owner)  # nothing is left in the job's objects
    job.step()


def test_an_attachment_hears_the_step(hand_node: HandNode, attached: tuple[Job, list[dict[str, Any]], Any]) -> None:
    job, said, attachment = attached
    peer = hand_node.welcome()
    until(lambda: attachment._senders[0].connected and not attachment._senders[0]._again.is_set())
    for _ in range(3):
        job.step()
        said.extend(job.calls())
        attachment.step()
    peer.expect("flows")
    entries_of = peer.expect("manifest")["job"]["model"]
    assert {entry["name"].partition("[")[0] for entry in entries_of} >= {"two.weight", "count", "frozen"}
    peer.send("joined", iteration=3)
    until(lambda: attachment.state == "attached")
    for number in (3, 4):
        job.step()
        said.extend(job.calls())
        attachment.step()
        record, payload = peer.receive()
        assert (record["type"], record["iteration"]) == ("record", number) and payload  # the buffer
        assert 0.0 < record["clip"] < 1.0 and not record.get("skipped") and record.get("scale") is None
        assert torch.tensor(record["clip"]).item() == record["clip"]  # a float32


def test_a_factor_that_the_script_says_besides_is_refused(attached: tuple[Job, list[dict[str, Any]], Any]) -> None:
    job, _, attachment = attached
    job.step()
    attachment.step(clip=0.5)
    assert attachment.state == "refused" and "clips and scales itself" in attachment.why


def test_what_the_part_makes_of_a_step_never_becomes_an_error_of_it() -> None:
    job = Job(clip=1.0)
    part: Megatron = job.part()
    part._buffers = [SimpleNamespace()]
    job.step()
    assert "is not understood: AttributeError" in refusal(part.check)[1]


def test_ranges_of_pieces_are_given() -> None:
    job = Job()
    part, described, _ = watched(job)
    source = Source(part, job.inner, described)
    name = next(iter(described.names.values()))
    from flowcheck.control.messages import Ranges

    wish = source.prepare(Ranges(1, [(name, 2, 5), ("frozen", 0, 3)]), 1 << 20)
    patch, copies = source.answer(wish, 3)
    assert not patch.refused and copies is not None
    given = copies.on_host()
    assert torch.equal(given[f"model.{name}"], part.state_dict()[name][2:7])
    assert {key for key in given if key.startswith(f"optimizer.{name}.")} == {
        f"optimizer.{name}.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    job.backward()
    job.optimizer.chained_optimizers[0].prepare_grads()
    check_gradients(described, job.inner)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_version_is_loaded_into_main_parameters_states_and_model(dtype: torch.dtype) -> None:
    job = Job(dtype=dtype)
    part, described, _ = watched(job)
    model = {name: value.clone() for name, value in part.state_dict().items()}
    optimizer = {"state": {number: {key: value.clone() for key, value in held.items()}
                           for number, held in job.inner.state_dict()["state"].items()},
                 "param_groups": job.inner.state_dict()["param_groups"]}
    whole = [value.detach().clone() for value in job.model.module.parameters()]
    recovered = Recovered(3, 1, "run", "shard0", model, optimizer, source="a node")
    for _ in range(2):
        job.step()
    assert not torch.equal(part.state_dict()[next(iter(described.names.values()))],
                           model[next(iter(described.names.values()))])
    recovered.load(job.model, job.optimizer)
    assert all(torch.equal(value, model[name]) for name, value in part.state_dict().items())
    again = job.inner.state_dict()["state"]
    assert all(torch.equal(value, again[number][key]) for number, held in optimizer["state"].items()
               for key, value in held.items())
    here = [value.detach() for value in job.model.module.parameters()]
    mine = list(described.names.values())
    for name in mine:
        parameter, _, places = name[:-1].partition("[")
        start, end = map(int, places.split(":"))
        at = [one for one, _ in job.model.module.named_parameters()].index(parameter)
        assert torch.equal(here[at].flatten()[start:end], whole[at].flatten()[start:end])
    del model[mine[0]]
    with pytest.raises(UserError, match="or others"):
        Recovered(3, 1, "run", "shard0", model, optimizer, source="a node").load(job.model, job.optimizer)
