"""Places where a rank of an instrumented job hangs."""

from __future__ import annotations

import contextlib
import time

import pytest

from resihp.client import Client
from resihp.contracts import ServiceError, Status
from resihp.testing.local_ranks import LocalRanks
from service.launch import Sidecar
from tests.instrumentation.hanging_ranks import RANKS, train

PATIENCE_S = 250.0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("backward", "has been in backward of step"),
        ("collective", "has been waiting for other ranks in forward of step"),
    ],
)
def test_hanging_rank_is_named_with_its_place(tmp_path, where, words):
    with Sidecar(tmp_path / "sidecar") as sidecar, LocalRanks("hanging", tmp_path) as ranks:
        client = Client(sidecar.url)
        ranks.start(range(RANKS), train, sidecar.url, tmp_path)
        deadline = time.monotonic() + PATIENCE_S
        ordered, hanging = False, {}
        while not hanging:
            ranks.poll(0.2)
            assert not ranks.exit_codes, ranks.logs()
            assert time.monotonic() < deadline, ranks.logs()
            verdicts = []
            with contextlib.suppress(ServiceError):  # the job is registered after its first step
                verdicts = client.verdicts("hanging")
            if len(verdicts) == RANKS and (verdicts[2].step or 0) > 100 and not ordered:
                (tmp_path / f"{where}-2").write_text("300")
                ordered = True
            assert not [each for each in verdicts if each.status is Status.FAIL_STOP]
            hanging = {
                each.rank: each.evidence
                for each in verdicts
                if "training thread" in " ".join(each.evidence)
            }
        assert set(hanging) == {2}
        assert words in hanging[2][0]
        assert "3 other ranks wait" in hanging[2]
