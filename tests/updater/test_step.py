"""The values of one step: what a job that declares none has, and each value at the edges of its range."""
import math

import pytest
import torch

from updater.errors import ReplicaError
from updater.step import StepValues


def test_the_values_of_a_job_that_declares_none():
    values = StepValues()
    assert (values.groups, values.clip, values.loss_scale, values.skip) == ((), None, None, False)
    assert values.buffers == {}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"clip": math.nan}, "the clip coefficient of a step is a finite 32-bit number of at least 0, found nan"),
        ({"clip": math.inf}, "the clip coefficient of a step is a finite 32-bit number of at least 0, found inf"),
        ({"clip": -5e-324}, "the clip coefficient of a step is a finite 32-bit number of at least 0, found -5e-324"),
        ({"loss_scale": math.nan}, "the loss scale of a step is a finite 32-bit number of at least 0, found nan"),
        ({"loss_scale": -1.0}, "the loss scale of a step is a finite 32-bit number of at least 0, found -1.0"),
        ({"clip": 3.41e38}, "the clip coefficient of a step is a finite 32-bit number of at least 0, found 3.41e+38"),
        ({"loss_scale": 3.41e38}, "the loss scale of a step is a finite 32-bit number of at least 0, found 3.41e+38"),
        ({"loss_scale": 0.0}, "a loss scale of 0 cannot be undone"),
        ({"loss_scale": 0}, "a loss scale of 0 cannot be undone"),
        ({"loss_scale": 1e-45}, "a loss scale of 0 cannot be undone"),
    ],
)
def test_clip_and_loss_scale_that_cannot_be_meant(values, why):
    with pytest.raises(ReplicaError) as caught:
        StepValues(**values)
    assert str(caught.value) == why


def test_clip_and_loss_scale_at_their_edges():
    """A clip of 0 is what a norm without bound gives; a loss scale may be any positive number of 32 bits."""
    assert StepValues(clip=0.0, loss_scale=2.0**-149).clip == 0.0
    assert StepValues(clip=3.4028234663852886e38, loss_scale=3.4028234663852886e38).loss_scale > 3.4e38
    assert StepValues(clip=1.0, loss_scale=1).loss_scale == 1


# -- when two steps make the same ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other", "same"), [
    ({}, {}, True), ({"groups": ({"lr": 0.5},)}, {"groups": [{"lr": 0.5}]}, True),
    ({"groups": ({"lr": 0.5, "eps": 1e-8},)}, {"groups": ({"eps": 1e-8, "lr": 0.5},)}, True),
    ({"groups": ({"betas": [0.9, 0.99]},)}, {"groups": ({"betas": (0.9, 0.99)},)}, True),
    ({"groups": ({"betas": [0.9, 0.99]},)}, {"groups": ({"betas": [0.9, 0.999]},)}, False),
    ({"groups": ({"lr": 0.5},)}, {"groups": ({"lr": 0.5 + 2**-53},)}, False),
    ({"groups": ({"lr": 0.0},)}, {"groups": ({"lr": -0.0},)}, False), ({"clip": 0.0}, {"clip": -0.0}, False),
    ({"groups": ({"lr": 1},)}, {"groups": ({"lr": 1.0},)}, False),
    ({"groups": ({"amsgrad": True},)}, {"groups": ({"amsgrad": 1},)}, False),
    ({"groups": ({"lr": 0.5}, {"lr": 0.25})}, {"groups": ({"lr": 0.25}, {"lr": 0.5})}, False),
    ({"groups": ({"lr": torch.tensor(0.5)},)}, {"groups": ({"lr": torch.tensor(0.5)},)}, False),
    ({"groups": ({"lr": 0.5},)}, {"groups": ()}, False), ({"clip": 1.0}, {}, False), ({"loss_scale": 1.0}, {}, False),
    ({"skip": True}, {}, False), ({"groups": ({"lr": "0.5"},)}, {"groups": ({"lr": 0.5},)}, False),
    ({"buffers": {"mean": torch.zeros(1)}}, {}, True),
])
def test_which_values_make_the_same_of_gradients(one, other, same):
    assert StepValues(**one).updates_as(StepValues(**other)) is same
    assert StepValues(**other).updates_as(StepValues(**one)) is same
