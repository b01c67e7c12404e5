"""Which optimizers and options are taken: each option at the edges of its range, and each refusal in full."""
import math
import subprocess
import sys

import pytest
import torch

from updater.errors import LayoutError, NoFreeSlot, OptimizerError, ReplicaError, UpdaterError
from updater.optimizers import Group, OptimizerSpec, pack, packed, unpack

LARGEST = 3.4028234663852886e38  # the largest float of 32 bits
ABOVE = math.nextafter(LARGEST, math.inf)


def check(name, options, **kwargs):
    return OptimizerSpec.check(name, [(["a"], options)], **kwargs).groups[0].options


def refusal(name, options, **kwargs):
    with pytest.raises(OptimizerError) as caught:
        check(name, options, **kwargs)
    return str(caught.value)


def test_a_spec_is_names_and_checked_options():
    spec = OptimizerSpec.check("adam", [(["a", "b"], {"lr": 0.1, "betas": [0.5, 0.9]}), (("c",), {"lr": 1})])
    assert spec == OptimizerSpec(
        "adam", (Group(("a", "b"), {"lr": 0.1, "betas": (0.5, 0.9)}), Group(("c",), {"lr": 1}))
    )
    assert spec.params == ["a", "b", "c"]
    assert spec.to_dict() == {"name": "adam", "groups": [
        {"params": ["a", "b"], "options": {"lr": 0.1, "betas": (0.5, 0.9)}}, {"params": ["c"], "options": {"lr": 1}},
    ]}


# -- each option at its edges ------------------------------------------------------------------------------

TAKEN = [
    ("sgd", "lr", [0, 0.0, 5e-324, 1, LARGEST]), ("sgd", "momentum", [0.0, 0.9, 1.0, LARGEST]),
    ("sgd", "weight_decay", [0.0, LARGEST]), ("sgd", "dampening", [-LARGEST, -0.5, 0.0, 1.0, LARGEST]),
    ("sgd", "nesterov", [False]), ("sgd", "maximize", [False, True]),
    ("adam", "lr", [0, LARGEST]), ("adam", "eps", [0, 1e-8, LARGEST]), ("adam", "weight_decay", [0, LARGEST]),
    ("adam", "betas", [(0.0, 0.0), (0.0, math.nextafter(1, 0)), (math.nextafter(1, 0), 0.0)]),
    ("adam", "amsgrad", [False, True]), ("adam", "maximize", [False, True]),
    ("adam", "decoupled_weight_decay", [False, True]), ("adamw", "amsgrad", [True]), ("adamw", "weight_decay", [0]),
]


@pytest.mark.parametrize(("name", "key", "values"), TAKEN, ids=lambda v: v if isinstance(v, str) else "")
def test_values_that_are_taken_as_they_are(name, key, values):
    for value in values:
        assert check(name, {"lr": 0.5, key: value}) == {"lr": 0.5, key: value}


@pytest.mark.parametrize(
    ("name", "key"),
    [("sgd", "lr"), ("sgd", "momentum"), ("sgd", "weight_decay"), ("adam", "lr"), ("adam", "eps"),
     ("adam", "weight_decay"), ("adamw", "weight_decay")],
)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (-5e-324, "is not negative, found -5e-324"), (-1, "is not negative, found -1"),
        (math.nan, "is a finite number, found nan"), (math.inf, "is a finite number, found inf"),
        (-math.inf, "is a finite number, found -inf"), (True, "is a finite number, found True"),
        ("1", "is a finite number, found '1'"), (None, "is a finite number, found None"),
        (ABOVE, f"is too large for a 32-bit float: {ABOVE!r}"),
        (-ABOVE, f"is too large for a 32-bit float: {-ABOVE!r}"),
    ],
)
def test_numbers_that_are_refused(name, key, value, why):
    assert refusal(name, {"lr": 0.5, key: value}) == f"{name} group 0: {key} {why}"


def test_dampening_may_be_negative_and_not_infinite():
    assert refusal("sgd", {"lr": 1, "dampening": math.inf}) == "sgd group 0: dampening is a finite number, found inf"
    assert refusal("sgd", {"lr": 1, "dampening": -ABOVE}) == (
        f"sgd group 0: dampening is too large for a 32-bit float: {-ABOVE!r}"
    )


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (0.9, "is a pair of numbers, found 0.9"), ((0.9,), "is a pair of numbers, found (0.9,)"),
        ([0.9] * 3, "is a pair of numbers, found [0.9, 0.9, 0.9]"), ("ab", "is a pair of numbers, found 'ab'"),
        ((0.9, "x"), "is a finite number, found 'x'"), ((-0.1, 0.9), "is not negative, found -0.1"),
    ],
)
def test_betas_that_are_refused(value, why):
    assert refusal("adam", {"lr": 1, "betas": value}) == f"adam group 0: betas {why}"


@pytest.mark.parametrize(
    ("name", "key"), [("sgd", "nesterov"), ("sgd", "maximize"), ("adam", "amsgrad"), ("adam", "maximize"),
                      ("adam", "decoupled_weight_decay"), ("adamw", "amsgrad")],
)
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_flags_are_true_or_false(name, key, value):
    assert refusal(name, {"lr": 1, key: value}) == f"{name} group 0: {key} is true or false, found {value!r}"


@pytest.mark.parametrize(
    ("name", "options"),
    [("adam", {"betas": (0.9, 1.0)}), ("adam", {"betas": (1.0, 0.9)}), ("adamw", {"betas": (0.9, 1.0)}),
     ("sgd", {"nesterov": True}), ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.1})],
)
def test_what_torch_itself_refuses_is_refused_with_its_words(name, options):
    groups = [(["a"], {"lr": 1}), (["b"], {"lr": 1, **options})]
    with pytest.raises(OptimizerError, match=rf"^{name} group 1: torch refuses the options: (Invalid beta|Nesterov)"):
        OptimizerSpec.check(name, groups)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("sgd", "lr, momentum, dampening, weight_decay, nesterov, maximize"),
        ("adam", "lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay"),
        ("adamw", "lr, betas, eps, weight_decay, amsgrad, maximize"),
    ],
)
def test_options_that_nobody_knows(name, known):
    assert refusal(name, {"lr": 1, "beta3": 1}) == f"{name} group 0: unknown option 'beta3'; known: {known}"


def test_the_learning_rate_has_to_be_given():
    assert refusal("adam", {}) == "adam group 0: lr is not given"
    with pytest.raises(OptimizerError, match=r"^sgd group 1: lr is not given$"):
        OptimizerSpec.check("sgd", [(["a"], {"lr": 1}), (["b"], {})])


def test_unknown_optimizers_and_names_twice_or_never():
    for name, groups, why in [
        ("lion", [(["a"], {"lr": 1})], "optimizer 'lion' is not one of sgd, adam, adamw"),
        ("sgd", [(["a", "b"], {"lr": 1}), (["b"], {"lr": 1})], "sgd: parameter 'b' is in two groups"),
        ("sgd", [(["a", "a"], {"lr": 1})], "sgd: parameter 'a' is in two groups"),
        ("sgd", [([], {"lr": 1})], "sgd: no group names a parameter"),
        ("adam", [], "adam: no group names a parameter"),
    ]:
        with pytest.raises(OptimizerError) as caught:
            OptimizerSpec.check(name, groups)
        assert str(caught.value) == why


# -- orders of rounding that an option asks for ------------------------------------------------------------


@pytest.mark.parametrize("key", ["capturable", "differentiable"])
@pytest.mark.parametrize("fused", [False, True])
def test_orders_without_a_kernel_are_refused_in_any_rounding_mode(key, fused):
    assert check("adam", {"lr": 1, key: False}, fused=fused) == {"lr": 1}
    assert refusal("adam", {"lr": 1, key: True}, fused=fused) == (
        f"adam group 0: {key}=True is computed in another rounding mode than that of this job;"
        " a replica would not equal the trainer"
    )


def test_fused_is_taken_in_a_fused_rounding_mode_alone():
    assert check("adam", {"lr": 1, "fused": True}, fused=True) == {"lr": 1}
    for value in (False, None):
        assert check("adam", {"lr": 1, "fused": value}) == check("adam", {"lr": 1, "fused": value}, fused=True)
    assert refusal("adam", {"lr": 1, "fused": True}).startswith("adam group 0: fused=True is computed in another")
    assert refusal("adam", {"lr": 1, "fused": True}, fused=False).startswith("adam group 0: fused=True")


def test_foreach_and_what_makes_adamw_say_nothing():
    for value in (None, False, True):
        assert check("adamw", {"foreach": value, "lr": 1, "decoupled_weight_decay": True}) == {"lr": 1}
    for value in (False, 1):
        assert refusal("adamw", {"lr": 1, "decoupled_weight_decay": value}) == (
            "adamw group 0: unknown option 'decoupled_weight_decay';"
            " known: lr, betas, eps, weight_decay, amsgrad, maximize"
        )
    assert check("adam", {"lr": 1, "decoupled_weight_decay": True})["decoupled_weight_decay"] is True


@pytest.mark.parametrize("key", ["foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"])
def test_what_says_nothing_may_come_first(key):
    """What follows it is read and checked all the same."""
    first = {key: key == "decoupled_weight_decay"}
    assert check("adamw", {**first, "lr": 1, "eps": 2}) == {"lr": 1, "eps": 2}
    assert refusal("adamw", {**first, "lr": -1}) == "adamw group 0: lr is not negative, found -1"


# -- states and the values of one step ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "states"),
    [
        ("sgd", {}, ()), ("sgd", {"momentum": 0.0}, ()), ("sgd", {"momentum": 1e-9}, ("momentum_buffer",)),
        ("adam", {}, ("exp_avg", "exp_avg_sq")), ("adam", {"amsgrad": False}, ("exp_avg", "exp_avg_sq")),
        ("adamw", {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    ],
)
def test_arrays_of_state(name, options, states):
    spec = OptimizerSpec.check(name, [(["a"], {"lr": 1, **options})])
    assert spec.states(spec.groups[0].options) == states


ADAM = OptimizerSpec.check("adam", [(["a"], {"lr": 0.5, "eps": 0.25}), (["b"], {"lr": 1, "amsgrad": True})], fused=True)


def test_the_values_of_a_step_replace_what_they_name():
    own = ({"lr": 0.5, "eps": 0.25}, {"lr": 1, "amsgrad": True})
    assert ADAM.with_values(()) == own == ADAM.with_values(({}, {}))
    assert ADAM.with_values(({"lr": 0.125, "betas": [0.5, 0.75]}, {"weight_decay": 2})) == (
        {"lr": 0.125, "eps": 0.25, "betas": (0.5, 0.75)}, {"lr": 1, "amsgrad": True, "weight_decay": 2}
    )
    assert ADAM.with_values(({"fused": True}, {})) == own, "torch lists it among a group's values"
    assert own == tuple(group.options for group in ADAM.groups), "a step changes nothing for the next"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (({},), "adam has 2 groups, the step has values for 1"),
        (({}, {}, {}), "adam has 2 groups, the step has values for 3"),
        (({}, {"lr": -1}), "adam group 1: lr is not negative, found -1"),
        (({"beta3": 1}, {}),
         "adam group 0: unknown option 'beta3'; known: lr, betas, eps, weight_decay, amsgrad, maximize,"
         " decoupled_weight_decay"),
        (({"capturable": True}, {}),
         "adam group 0: capturable=True is computed in another rounding mode than that of this job;"
         " a replica would not equal the trainer"),
        (({"betas": (0.9, 1.0)}, {}), "adam group 0: betas are below 1, found (0.9, 1.0)"),
        (({}, {"betas": [1, 0.5]}), "adam group 1: betas are below 1, found (1, 0.5)"),
        (({"amsgrad": True}, {}), "adam group 0: amsgrad or momentum cannot be switched in mid-run"),
        (({}, {"amsgrad": False}), "adam group 1: amsgrad or momentum cannot be switched in mid-run"),
    ],
)
def test_values_of_a_step_that_are_refused(values, why):
    with pytest.raises(OptimizerError) as caught:
        ADAM.with_values(values)
    assert str(caught.value) == why


def test_momentum_may_change_and_not_begin_or_end():
    spec = OptimizerSpec.check("sgd", [(["a"], {"lr": 1, "momentum": 0.5})])
    assert spec.with_values(({"momentum": 0.25},)) == ({"lr": 1, "momentum": 0.25},)
    with pytest.raises(OptimizerError, match="switched in mid-run"):
        spec.with_values(({"momentum": 0.0},))


def test_errors_are_kinds_of_value_errors():
    assert issubclass(UpdaterError, ValueError) and issubclass(NoFreeSlot, ReplicaError)
    for kind in (LayoutError, OptimizerError, ReplicaError):
        assert issubclass(kind, UpdaterError)
    assert not issubclass(ReplicaError, OptimizerError)


def test_options_are_checked_without_torchs_compiler():
    """It takes a second to load, and a node would pay that when its first job comes."""
    code = 'import sys; from updater import optimizers as o; o.OptimizerSpec.check("adam", [(["a"], {"lr": 1})]); '
    code += 'sys.exit("torch._dynamo" in sys.modules)'
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_torch_and_we_know_the_same_options():
    """An option that torch adds has to be thought about: taken with a kernel for it, or refused."""
    ours = {
        "sgd": {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"},
        "adam": {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"},
        "adamw": {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"},
    }
    orders = {"foreach", "capturable", "differentiable", "fused"}
    for name, cls in {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.items():
        theirs = set(cls([torch.zeros(1)], lr=1).defaults)
        assert ours[name] == theirs - orders


# -- as numbers ----------------------------------------------------------------------------------------------


NAN = math.nan
EVERY = {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-8, "weight_decay": 0.25, "amsgrad": True, "maximize": False}


@pytest.mark.parametrize(("name", "options", "numbers"), [
    ("sgd", {"lr": 0.1}, [0.1, NAN, NAN, NAN, NAN, NAN]),
    ("sgd", {"lr": 2.0, "momentum": 0.5, "dampening": -1.0, "weight_decay": 3.0, "nesterov": True, "maximize": False},
     [2.0, 0.5, -1.0, 3.0, 1.0, 0.0]),
    ("adamw", {}, [NAN] * 7),
    ("adamw", EVERY, [0.1, 0.5, 0.9, 1e-8, 0.25, 1.0, 0.0]),
    ("adam", {"betas": (0.0, 0.5), "decoupled_weight_decay": True}, [NAN, 0.0, 0.5, NAN, NAN, NAN, NAN, 1.0]),
    ("adam", EVERY, [0.1, 0.5, 0.9, 1e-8, 0.25, 1.0, 0.0, NAN]),
])
def test_options_as_numbers_and_back(name, options, numbers):
    """NaN is an option that was not given; a version keeps its own options so, in a fixed order."""
    found = pack(name, options)
    assert all(isinstance(number, float) for number in found) and packed(name) == len(found)
    assert [None if math.isnan(number) else number for number in found] == [
        None if math.isnan(number) else number for number in numbers
    ]
    back = unpack(name, found)
    assert back == options
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in options.items()}
