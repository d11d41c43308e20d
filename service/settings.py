"""Settings of the sidecar: environment variables with the prefix `RESIHP_`, and CLI options."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1 << 20
PREFIX = "RESIHP_"
# What the training side, the tests and the notebooks read: a pod may set it for all.
OTHER_VARIABLES = (
    "DEMO_TRACE", "JOB", "JOIN", "NODE_MEMORY", "NODE_MEMORY_PEERS", "PLAN", "PREEMPTION_FILE",
    "PREEMPTION_SECONDS", "PREEMPTION_URL", "PROBES", "PROCESS_GROUPS", "SENSORS", "STACKS",
    "TRACES", "URL",
)  # fmt: skip
# Kubernetes tells every pod of a Service whose name begins with `resihp`.
_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)=|_PORT=\w+://")


def default_data_folder() -> Path:
    """Per-user state folder: `$XDG_STATE_HOME/resihp`, else `~/.local/state/resihp`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "resihp"


class Settings(BaseSettings):
    """Settings of API and worker. A request beyond a limit fails with an error of its own."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, populate_by_name=True, extra="ignore"
    )

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8700, ge=0, le=65535, description="port to bind; 0 picks a free one")
    token: SecretStr | None = Field(None, description="bearer token that every request must carry")
    redis_url: str | None = Field(
        None,
        validation_alias=AliasChoices("RESIHP_REDIS_URL", "REDIS_URL"),
        description="Redis to use; None starts an embedded one in the data folder",
    )
    data: Path = Field(default_factory=default_data_folder, description="data folder")
    processes: int = Field(1, gt=0, description="API processes on the port")
    worker: bool = Field(True, description="run a worker as well")
    parent: int | None = Field(None, description="process whose child it is, with which it ends")
    ready_file: Path | None = Field(None, description="file that announces url and pid when ready")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    max_body_bytes: int = Field(16 * MIB, gt=0, description="largest request body")
    max_records: int = Field(200_000, gt=0, description="most records of one telemetry message")
    max_jobs: int = Field(256, gt=0, description="most jobs registered at a time")
    keep_jobs_days: float = Field(
        30.0, gt=0, description="days without a message after which a job is deleted"
    )
    max_backlog: int = Field(20_000, gt=0, description="most unapplied messages of a job")
    max_backlog_bytes: int = Field(512 * MIB, gt=0, description="most unapplied bytes of a job")
    slow_down_lag_s: float = Field(
        0.75,
        gt=0,
        description="lag of a job from which on its senders are asked to send less often",
    )
    slow_down_busy: float = Field(
        0.65,
        gt=0,
        description="share of the time in which an API process has work to do, from which on "
        "senders are asked to send less often",
    )
    max_watchers: int = Field(2048, gt=0, description="most long polls and event streams at a time")
    max_wait_s: float = Field(60.0, gt=0, description="longest long poll")
    keep_events: int = Field(2_000, gt=0, description="events kept per job")
    keep_steps: int = Field(20_000, gt=0, description="step summaries kept per job")

    commit_every_s: float = Field(
        5.0, gt=0, description="least time between two saved states of a job without events"
    )
    lease_s: float = Field(
        10.0, gt=0, description="time after which a silent worker loses its jobs"
    )
    plan_time_limit_s: float = Field(5.0, gt=0, description="longest time that planning may take")

    # Of the detector; None: the default of `detector.DetectorSettings`.
    min_slowdown: float | None = Field(
        None, gt=1, description="smallest slowdown that makes a device fail_slow"
    )
    false_alarm_steps: int | None = Field(
        None, gt=0, description="mean number of steps of a job between two false alarms"
    )
    confirm_steps: int | None = Field(
        None, gt=0, description="consecutive slow steps before a device is fail_slow"
    )
    recover_steps: int | None = Field(
        None, gt=0, description="consecutive healthy steps before it is healthy again"
    )
    probes_per_minute: int | None = Field(
        None, ge=0, description="most probes of a job per minute; 0: none"
    )
    probation_probe_s: float | None = Field(
        None, ge=0, description="time between two probes of a slow device outside the layout"
    )

    @field_validator("port", mode="before")
    @classmethod
    def _port_of_kubernetes_is_none(cls, port: object) -> object:
        """In pods beside a Service named `resihp` the variable holds the Service's address."""
        is_address = isinstance(port, str) and "://" in port
        return cls.model_fields["port"].default if is_address else port

    @field_validator("token", mode="before")
    @classmethod
    def _token_without_white_space(cls, token: object) -> object:
        """Files of secrets end with a newline, which clients leave out as well."""
        return token.strip() if isinstance(token, str) else token

    @model_validator(mode="after")
    def _public_address_needs_a_token(self) -> Settings:
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("token: must not be empty")
        if self.token is not None and not _is_of_header(self.token.get_secret_value()):
            raise ValueError("token: must be of printable ASCII characters, as headers of HTTP are")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} is reachable from other machines; set a bearer token "
                "(--token or RESIHP_TOKEN), or bind 127.0.0.1"
            )
        return self


def _is_of_header(text: str) -> bool:
    return text.isascii() and text.isprintable()


def unknown_variables(variables: Mapping[str, str]) -> dict[str, str | None]:
    """The variables with the prefix that nothing of ResiHP reads, each with the nearest known name.

    None where no name is near.
    """
    known = [name.upper() for name in (*Settings.model_fields, *OTHER_VARIABLES)]
    unknown = {}
    for name, value in sorted(variables.items()):
        given = name.upper().removeprefix(PREFIX)
        of_others = given == name.upper() or _OF_KUBERNETES.search(f"{name.upper()}={value}")
        if not of_others and given not in known:
            near = get_close_matches(given, known, n=1)
            unknown[name] = PREFIX + near[0] if near else None
    return unknown


def is_loopback(host: str) -> bool:
    """True if `host` names only this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
