"""Our records go where `logging` sends them, at the level that is set there."""

import logging

import pytest

from service.logs import logger


def test_nothing_is_printed_unless_logging_is_asked_to(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = logger("resihp.test")
    with caplog.at_level(logging.WARNING):
        log.debug("request", path="/v1/jobs")
        log.info("sidecar ready")
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG):
        log.debug("request", path="/v1/jobs")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("resihp.test", "DEBUG")
    assert isinstance(record.msg, dict)
    assert record.msg["path"] == "/v1/jobs"
    assert capsys.readouterr().out == ""
