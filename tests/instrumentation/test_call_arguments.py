"""Work of a forward pass, from the arguments of its call."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from resihp.hooks._workload import features
from resihp.instrumentation._call_arguments import argument_names, work_of_call

IDS = torch.zeros(2, 8, dtype=torch.long)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
CAUSAL = torch.ones(8, 8).tril().bool()
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])


class NamedBatch(NamedTuple):
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@dataclass
class DataBatch:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@pytest.mark.parametrize(
    ("args", "kwargs", "lengths"),
    [
        ((IDS,), {}, [8, 8]),
        ((), {"input_ids": IDS, "labels": IDS}, [8, 8]),
        (({"input_ids": IDS, "attention_mask": PADDED},), {}, [6, 4]),
        ((), {"input_ids": IDS, "attention_mask": PADDED}, [6, 4]),
        ((), {"input_ids": IDS[:1], "position_ids": PACKED}, [3, 5]),
        ((), {"input_ids": IDS[:1], "position_ids": PACKED[0]}, [3, 5]),
        ((), {"input_ids": IDS[:1], "position_ids": PACKED.expand(3, 1, 8)}, [3, 5]),
        ((), {"input_ids": IDS, "position_ids": torch.arange(8)}, [8, 8]),
        ((IDS,), {"position_ids": torch.arange(8)[None]}, [8, 8]),
        ((), {"inputs_embeds": torch.ones(2, 8, 4), "position_ids": PACKED}, [3, 5, 3, 5]),
        ((IDS,), {"position_ids": PACKED.expand(3, 1, 8)}, [3, 5, 3, 5]),
        ((IDS,), {"position_ids": torch.arange(8).expand(2, 8)}, [8, 8]),
        ((torch.ones(3, 4, 5),), {"position_ids": PACKED}, [3, 5]),
        ((IDS,), {"attention_mask": CAUSAL[None, None]}, [8, 8]),
        ((IDS,), {"attention_mask": CAUSAL.expand(2, 1, 8, 8)}, [8, 8]),
        ((), {"attention_mask": CAUSAL[None]}, [8]),
        ((IDS,), {"cu_seqlens": torch.tensor([0, 3, 8])}, [3, 5]),
        ((IDS,), {"cu_seq_lens_q": torch.tensor([0, 3, 8]), "attention_mask": None}, [3, 5]),
        ((IDS,), {"seq_lens": [3, 5]}, [3, 5]),
        ((torch.zeros(2, 8, 16),), {}, [8, 8]),
        ((torch.zeros(2, 3, 4, 5),), {}, [20, 20]),
        ((torch.zeros(2, 3, 4, 5, dtype=torch.uint8),), {}, [20, 20]),
        ((torch.zeros(2, 3, 2, 4, 5, dtype=torch.uint8),), {}, [40, 40]),
        ((), {"pixel_mask": IDS, "pixel_values": torch.ones(2, 3, 4, 5)}, [20, 20]),
        ((), {"labels": IDS[:1], "image": torch.ones(2, 3, 4, 5)}, [20, 20]),
        ((), {"input_values": torch.ones(2, 16_000)}, [16_000, 16_000]),
        ((), {"input_features": torch.ones(2, 80, 30)}, [80, 80]),
        ((), {"idx": IDS, "targets": IDS[:1]}, [8, 8]),
        ((), {"tgt": IDS[:1], "src": IDS}, [8, 8]),
        ((), {"batch": {"input_ids": IDS, "attention_mask": PADDED}}, [6, 4]),
        (({"input_ids": IDS}, PADDED), {}, [8, 8]),
        (((IDS, PADDED),), {}, [8, 8]),
        ((), {"batch": [IDS, PADDED]}, [8, 8]),
        ((NamedBatch(IDS, PADDED),), {}, [6, 4]),
        ((), {"batch": DataBatch(IDS, PADDED)}, [6, 4]),
        ((torch.zeros(2, 16),), {}, [1, 1]),
        ((torch.zeros(6, dtype=torch.long),), {}, [6]),
        (("not a tensor", IDS), {}, [8, 8]),
    ],
)
def test_work(args, kwargs, lengths):
    work = work_of_call(args, kwargs, None)
    assert work is not None
    found = features(work)
    assert found.tokens == sum(lengths)
    assert found.sequences == len(lengths)
    assert found.sum_sq_len == sum(length * length for length in lengths)
    assert found.max_len == max(lengths)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    rows = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=layout)
    ids = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=layout)
    for args, kwargs in (((rows,), {}), ((), {"input_ids": ids, "position_ids": ids})):
        work = work_of_call(args, kwargs, None)
        assert work is not None
        assert features(work) == (8, 2, 34, 5)


def test_a_nested_tensor_with_gaps():
    starts, lengths = torch.tensor([0, 2]), torch.tensor([3, 5])
    rows = torch.nested.narrow(torch.ones(2, 8, 4), 1, starts, lengths, layout=torch.jagged)
    work = work_of_call((rows,), {"position_ids": PACKED}, None)
    assert work is not None
    assert features(work)[:2] == (8, 2)
    work = work_of_call((rows,), {}, None)
    assert work is not None
    assert features(work) == (8, 2, 34, 5)


@pytest.mark.parametrize("shape", [(100_000, 1), (100_000, 3, 1), (0, 3, 1), (2, 0, 1)])
def test_the_work_of_a_shape_takes_little_memory(shape):
    work = work_of_call((torch.zeros(shape),), {}, None)
    assert work == features((torch.Size(shape[1:-1]).numel(),) * shape[0])
    assert sys.getsizeof(work) < 200


class Masked(torch.nn.Module):
    def forward(self, ids, attention_mask=None, *rest, labels=None):
        return ids


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper, partial(torch.compile, backend="eager")])
def test_positional_arguments_go_by_their_names(wrap):
    names = argument_names(wrap(Masked()))
    assert names == ("ids", "attention_mask")
    work = work_of_call((IDS, PADDED, CAUSAL), {}, None, names)
    assert work is not None
    assert features(work)[:2] == (10, 2)


def test_calls_that_tell_nothing():
    assert work_of_call((), {}, None) is None
    assert work_of_call((torch.tensor(1.0), "text"), {"labels": IDS}, None) is None


def test_the_users_function_comes_first():
    def lengths(args, kwargs):
        return np.array([len(args), len(kwargs)])

    work = work_of_call((IDS, IDS), {"attention_mask": PADDED}, lengths)
    assert work is not None
    assert features(work)[:2] == (3, 2)


def test_buffers_may_be_reused_after_the_call():
    mask = PADDED.clone()
    work = work_of_call((), {"attention_mask": mask}, None)
    mask.zero_()
    assert work is not None
    assert features(work).tokens == 10
