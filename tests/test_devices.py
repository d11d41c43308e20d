"""CUDA devices, with stand-ins for torch's: no test here needs one."""

from __future__ import annotations

import pytest
import torch

from resihp import _devices
from resihp._devices import use_device, with_index
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


def test_a_background_thread_leaves_captures_alone_on_the_device_that_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(_devices, "ignore_captures", lambda: done.append("ignores captures"))
    use_device(torch.device("cpu"))
    assert not done
    use_device(torch.device("cuda", 3))
    assert done == [torch.device("cuda", 3), "ignores captures"]
