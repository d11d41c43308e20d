"""Restarts end where they do not help, and not before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.launch.restart_policy import (
    ATTEMPTS_WITHOUT_PROGRESS,
    SHORT_ATTEMPT_S,
    Failure,
    decide,
    error_line,
)

ERROR = "ValueError: no such sample"


def failed(status: int, message: str = "", step: int = -1, lasted_s: float = 0.0) -> Failure:
    return Failure(0, 0, status, message, step, lasted_s=lasted_s)


def test_an_error_of_the_script_gets_one_more_try() -> None:
    bug = failed(1, ERROR, 6)
    assert decide([bug]).restarts
    ended = decide([bug, bug])
    assert not ended.restarts
    assert ERROR in ended.why


def test_an_error_elsewhere_is_another_one() -> None:
    assert decide([failed(1, ERROR, 6), failed(1, ERROR, 9)]).restarts
    assert decide([failed(1, ERROR, 6), failed(1, "KeyError: 3", 6)]).restarts
    assert decide([failed(1, ERROR, 6), failed(-9, ERROR, 6)]).restarts


def test_an_error_of_the_device_is_not_the_scripts() -> None:
    device = failed(1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", 6)
    assert decide([device, device]).restarts
    assert not decide([device] * ATTEMPTS_WITHOUT_PROGRESS).restarts


@pytest.mark.parametrize(
    ("message", "is_of_device"),
    [
        ("RuntimeError: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", True),
        ("RuntimeError: the driver reports Xid 79", True),
        ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1, ncclSystemError", True),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("KeyError: 'taxid'", False),
        ("KeyError: 'taxid 79'", False),
        ("KeyError: 'xid'", False),
        ("ValueError: transaction xid=184467440", False),
        ("ValueError: no such table: accuda errors", False),
    ],
)
def test_the_words_of_a_broken_device_are_whole_words(message: str, is_of_device: bool) -> None:
    assert failed(1, message, 6).is_of_device == is_of_device


AFTER_AN_ASSERT = """\
/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:111: Assertion `index < sizes[i]` failed.
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 8, in <module>
[rank1]: torch.AcceleratorError: CUDA error: {}
[rank1]: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: {}

Exception raised from get at /pytorch/c10/cuda/CUDACachingAllocator.cpp:948
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f8f9597305d in libc10.so)
"""
"""Stderr of a rank whose process aborts at its end, as torch 2.11 left it on an H200."""


@pytest.mark.parametrize("status", [1, -6])
@pytest.mark.parametrize(
    ("error", "is_of_device"),
    [
        ("device-side assert triggered", False),
        ("out of memory", False),
        ("invalid configuration argument", False),
        ("invalid device ordinal", True),
        ("unspecified launch failure", True),
        ("uncorrectable ECC error encountered", True),
    ],
)
def test_an_error_of_cuda_is_found_before_the_abort_that_it_leads_to(
    status: int, error: str, is_of_device: bool
) -> None:
    message = error_line(AFTER_AN_ASSERT.format(error, error))
    assert message == f"torch.AcceleratorError: CUDA error: {error}"
    failure = failed(status, message, 6)
    assert failure.is_of_device == is_of_device
    assert failure.is_of_script != is_of_device
    assert decide([failure, failure]).restarts == is_of_device


NCCL = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 8, in <module>
[rank1]: torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:77, {}
[rank1]: {}
[rank1]: Last error:
[rank1]: {}
[rank1]:[W1126 12:00:00.123 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group()
"""


@pytest.mark.parametrize(
    ("error", "detail", "last", "expected"),
    [
        (
            "invalid usage (run with NCCL_DEBUG=WARN for details)",
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "script",
        ),
        (
            "invalid argument (run with NCCL_DEBUG=WARN for details)",
            "ncclInvalidArgument: Invalid value for an argument.",
            "Broadcast : invalid root 7 (root should be in the 0..2 range)",
            "script",
        ),
        (
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
            "socketStartConnect: Connect to 10.0.0.1<4000> failed : Connection refused",
            "peer",
        ),
        (
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
            "Call to recv from 10.0.0.1<4000> failed : Connection reset by peer",
            "peer",
        ),
        (
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error.",
            "socketProgress: Connection closed by remote peer node1<4000>",
            "peer",
        ),
        (
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
            "NET/IB : Got completion from peer with status=12: Invalid argument",
            "device",
        ),
        (
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 700 'an illegal memory access was encountered'",
            "unsure",
        ),
        (
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 214 'uncorrectable ECC error encountered'",
            "device",
        ),
        (
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 2 'out of memory'",
            "script",
        ),
    ],
)
def test_the_details_of_an_error_of_nccl_tell_its_cause(
    error: str, detail: str, last: str, expected: str
) -> None:
    message = error_line(NCCL.format(error, detail, last))
    assert message.startswith("torch.distributed.DistBackendError: NCCL error in: /pytorch/")
    assert message.endswith(f"{detail} Last error: {last}")
    for status in (1, -6):
        assert cause(failed(status, message, 6)) == expected


def cause(failure: Failure) -> str:
    if failure.is_of_device:
        return "unsure" if failure.is_unsure else "device"
    assert failure.is_of_script != failure.is_of_lost_peer
    return "script" if failure.is_of_script else "peer"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "unsure"),
        ("RuntimeError: CUDA error: an illegal instruction was encountered", "unsure"),
        ("RuntimeError: CUDA error: unspecified launch failure", "unsure"),
        ("RuntimeError: NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault", "unsure"),
        ("RuntimeError: the driver reports Xid 13", "unsure"),
        ("RuntimeError: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "device"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "device"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "script"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "script"),
        ("RuntimeError: [transport/tcp/pair.cc:553] writev: Broken pipe", "peer"),
    ],
)
def test_errors_that_a_kernel_of_the_script_makes_too_are_unsure(
    message: str, expected: str
) -> None:
    assert cause(failed(1, message, 6)) == expected


def test_an_abort_without_an_exception_is_not_the_scripts() -> None:
    abort = failed(-6, "terminate called without an active exception", 6)
    assert not abort.is_of_script
    assert not abort.is_of_device


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4021",
        "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly "
        "due to a network error or a remote process exiting prematurely.",
    ],
)
def test_the_loss_of_another_rank_is_neither_of_the_device_nor_of_the_script(message: str) -> None:
    failure = failed(1, message, 6)
    assert failure.is_of_lost_peer
    assert not failure.is_of_device
    assert decide([failure, failure]).restarts


def test_the_line_of_an_error_is_that_of_the_exception() -> None:
    text = (
        "Traceback (most recent call last):\n  File\n    raise\nmy.own.SampleError: none\n[W] c10d"
    )
    assert error_line(text) == "my.own.SampleError: none"
    assert error_line("a\nterminate called") == "terminate called"
    assert error_line("") == "no message"


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=8))
def test_kills_go_on_as_long_as_steps_are_kept(steps: list[int]) -> None:
    failures = [failed(-9, step=step) for step in steps]
    recent = steps[-ATTEMPTS_WITHOUT_PROGRESS:]
    is_stuck = len(recent) == ATTEMPTS_WITHOUT_PROGRESS and len(set(recent)) == 1
    assert decide(failures).restarts == (not is_stuck)


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=8), st.integers(0, 8))
def test_the_limit_of_the_user_holds(steps: list[int], limit: int) -> None:
    failures = [failed(-9, step=step) for step in steps]
    limited = decide(failures, max_restarts=limit)
    if len(failures) > limit:
        assert not limited.restarts
    elif steps[-1] < 0:
        assert limited.restarts, "no step is known, and the user has said how often"
    else:
        assert limited == decide(failures)


def test_attempts_of_an_unknown_step_are_without_progress_if_they_are_short() -> None:
    short, long = failed(-9, lasted_s=60.0), failed(-9, lasted_s=SHORT_ATTEMPT_S)
    assert not decide([short] * ATTEMPTS_WITHOUT_PROGRESS).restarts
    assert decide([short, long, short]).restarts
    assert decide([short] * ATTEMPTS_WITHOUT_PROGRESS, max_restarts=5).restarts


def test_an_error_of_an_unknown_step_that_comes_later_is_another_one() -> None:
    first = failed(1, ERROR, lasted_s=3600.0)
    assert not decide([first, failed(1, ERROR, lasted_s=400.0)]).restarts
    assert not decide([first, failed(1, ERROR, lasted_s=3700.0)]).restarts
    assert decide([first, failed(1, ERROR, lasted_s=7200.0)]).restarts
