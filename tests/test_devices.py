"""CUDA devices, with stand-ins for torch's: no test here needs one."""

from __future__ import annotations

import pytest
import torch

from resihp._devices import with_index
from resihp.contracts import ContractError
from resihp.elastic.step import Setup
from tests.elastic.engine_job import small_setup


def test_a_device_without_index_is_the_current_one_of_whoever_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device in ("cpu", "cuda:1", "meta"):
        assert with_index(torch.device(device)) == torch.device(device)
    known = small_setup()
    setup = Setup(known.model, known.optimizer, known.data, device=torch.device("cuda"))
    assert setup.device == torch.device("cuda", 3)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ContractError, match="this process has no CUDA device"):
        with_index(torch.device("cuda"))
