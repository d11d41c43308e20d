"""`ResiHPCallback` in the Trainer of transformers."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resihp.contracts import Op
from resihp.instrumentation._patches import lock

from .conftest import InProcessSidecar, Run, run_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("example", ["transformers_trainer.py", "trl_sft.py"])
def test_a_slow_rank_is_named(run: Run, example: str) -> None:
    training = run(example, "--slow-rank", "2")
    training.assert_named(2)
    assert "'resihp/verdict': 'rank 2 fail_slow" in training.output
    assert "'resihp/slowdown_max'" in training.output
    assert training.output.count("ResiHP: rank 2 fail_slow") == 1


def test_training_needs_no_sidecar(run: Run) -> None:
    options = ("--steps", "12")
    training = run("transformers_trainer.py", *options, ranks=2, sidecar="http://127.0.0.1:9")
    assert "'train_loss'" in training.output
    assert training.output.count("ResiHP: no verdict") == 1
    assert "resihp/" not in training.output


@pytest.fixture
def trainer_of(tmp_path: Path) -> Callable[..., Any]:
    """Function that makes a trainer of one rank with these callbacks, evaluating at each step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def make(*callbacks: Any, **arguments: Any) -> Any:
        torch.manual_seed(0)
        tokens = torch.randint(16, (24, 8))
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        config = LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        )  # fmt: skip
        given = {
            "output_dir": str(tmp_path / "trainer"), "max_steps": 4, "logging_steps": 1,
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
            "eval_strategy": "steps", "eval_steps": 1, "save_steps": 2, "report_to": "none",
            "use_cpu": True, "disable_tqdm": True, **arguments,
        }  # fmt: skip
        return Trainer(
            model=LlamaForCausalLM(config), args=TrainingArguments(**given), train_dataset=rows,
            eval_dataset=rows[:2], callbacks=list(callbacks),
        )  # fmt: skip

    return make


def passes(steps: range) -> list[tuple[int, int, Op]]:
    """Records of steps of three microbatches."""
    return [
        record
        for step in steps
        for record in (
            *((step, index, op) for index in range(3) for op in (Op.FORWARD, Op.BACKWARD)),
            (step, -1, Op.OPTIMIZER),
        )
    ]


def test_microbatches_are_recorded_and_evaluation_is_not(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.transformers import ResiHPCallback

    callback = ResiHPCallback(client=sidecar, job="own", heartbeat_s=0.0)
    trainer = trainer_of(callback)
    plain = type(trainer).log
    trainer.train()
    assert sidecar.passes() == passes(range(4))
    assert {1, 2, 3} <= sidecar.loaded_steps()
    assert [(job.name, job.microbatches) for job in sidecar.jobs] == [("own", 3)]
    assert callback.monitor.stats.failures == 0
    assert type(trainer).log is plain
    assert trainer.model._compiled_call_impl is None


def test_a_compiled_model_is_observed(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resihp.integrations.transformers import ResiHPCallback

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which the trainer sets
    callback = ResiHPCallback(client=sidecar, heartbeat_s=0.0)
    trainer = trainer_of(callback, torch_compile=True, torch_compile_backend="eager")
    trainer.train()
    assert sidecar.passes() == passes(range(4))
    assert callback.monitor.stats.failures == 0
    assert "_compiled_call_impl" not in vars(trainer.model_wrapped)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_is_observed(
    stage: int,
    world: Any,
    trainer_of: Callable[..., Any],
    sidecar: InProcessSidecar,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The optimizer of the trainer does nothing then: the engine updates the parameters."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from resihp.integrations.transformers import ResiHPCallback

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")  # which the trainer sets
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }  # fmt: skip
    callback = ResiHPCallback(client=sidecar, heartbeat_s=0.0)
    trainer_of(callback, deepspeed=config, use_cpu=False, save_strategy="no").train()
    unset_hf_deepspeed_config()  # or every model is loaded as ZeRO's from now on
    assert sidecar.passes() == passes(range(4))
    assert [job.microbatches for job in sidecar.jobs] == [3]
    assert callback.monitor.stats.failures == 0


def test_a_resumed_training_goes_on_counting(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.transformers import ResiHPCallback

    trainer_of(max_steps=2).train()
    callback = ResiHPCallback(client=sidecar, heartbeat_s=0.0)
    trainer_of(callback).train(resume_from_checkpoint=True)
    assert sidecar.passes() == passes(range(2, 4))


def test_what_is_logged_reaches_every_callback_and_the_history(
    trainer_of: Callable[..., Any],
    sidecar: InProcessSidecar,
    quick_verdicts: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import TrainerCallback

    from resihp.integrations.transformers import ResiHPCallback

    logged: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            deadline_s = time.monotonic() + 60.0
            while not callback._observer.metrics() and time.monotonic() < deadline_s:
                time.sleep(0.01)

        def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            logged.append(logs)

    callback = ResiHPCallback(client=sidecar, interval_s=0.01)
    trainer = trainer_of(Reporter(), callback)
    trainer.train()
    text = "rank 0 fail_slow 1.50x since step 3"
    for logs in (logged, trainer.state.log_history):
        losses = [entry for entry in logs if "loss" in entry]
        assert [entry["resihp/slowdown_max"] for entry in losses] == [1.5] * 4
        assert [entry["resihp/verdict"] for entry in losses] == [text] * 4
        assert not [e for e in logs if "eval_loss" in e and "resihp/verdict" in e]
    assert capsys.readouterr().out.count(f"ResiHP: {text}") == 1


def test_a_failure_of_the_callback_is_counted(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar, quick_verdicts: None
) -> None:
    from resihp.integrations.transformers import ResiHPCallback

    sidecar.error = RuntimeError("scripted")
    callback = ResiHPCallback(client=sidecar)
    trainer = trainer_of(callback)
    trainer.train()
    assert trainer.state.global_step == 4
    assert callback.monitor.stats.failures > 0


def test_an_error_of_the_users_is_reported_and_the_model_is_left_as_it_was(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from transformers import Trainer, TrainerCallback

    from resihp.integrations.transformers import ResiHPCallback

    class Fails(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            raise ValueError("scripted")

    log = Trainer.log
    callback = ResiHPCallback(client=sidecar)
    trainer = trainer_of(callback, Fails())
    with pytest.raises(ValueError, match="scripted"):
        trainer.train()
    assert trainer.model._compiled_call_impl is None
    assert Trainer.log is log
    assert "ValueError: scripted" in str(sidecar.heartbeats[-1])
    assert callback.monitor.stats.failures == 0


def test_a_callback_that_is_removed_amid_training_ends_with_it(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from transformers import Trainer, TrainerCallback

    from resihp.integrations.transformers import ResiHPCallback

    callback = ResiHPCallback(client=sidecar)

    class Removes(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.remove_callback(callback)

    log = Trainer.log
    trainer = trainer_of(callback, Removes())
    trainer.train()
    assert trainer.model._compiled_call_impl is None
    assert Trainer.log is log
    assert sidecar.heartbeats[-1].left


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_callback_amid_training_observes_its_own(
    copied: Callable[[Any], Any], trainer_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from transformers import TrainerCallback

    from resihp.integrations.transformers import ResiHPCallback

    copies = []

    class Copies(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            copies.append(copied(callback))

    callback = ResiHPCallback(client=sidecar, job="own", heartbeat_s=0.0)
    trainer_of(callback, Copies(), max_steps=1).train()
    (other,) = copies
    assert callback.monitor is not None
    assert other.monitor is None
    trainer_of(other).train()
    assert other._observer.client.passes()[-28:] == passes(range(4))
    assert other.monitor.stats.failures == 0


def test_a_callback_that_nobody_holds_leaves_the_trainer_as_it_was(
    sidecar: InProcessSidecar,
) -> None:
    from transformers import Trainer

    from resihp.integrations.transformers import ResiHPCallback

    callback = ResiHPCallback(client=sidecar)
    observed = Trainer.train
    with lock:  # as while this thread patches torch, where the garbage collector interrupts it
        del callback
        gc.collect()
        assert Trainer.train is observed
    deadline_s = time.monotonic() + 60.0
    while Trainer.train is observed and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert Trainer.train is not observed


def test_one_rank_has_no_quotas(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    from resihp.integrations.transformers import ResiHPCallback

    trainer = trainer_of(ResiHPCallback(quotas=True, client=sidecar, heartbeat_s=0.0))
    plain = type(trainer).get_batch_samples
    trainer.train()
    assert sidecar.passes() == passes(range(4))
    assert [job.actions for job in sidecar.jobs] == [("notify",)]
    assert caplog.text.count("no quotas in this training: there is one rank") == 1
    assert type(trainer).get_batch_samples is plain


RANKS = 3


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of the trainings with and without quotas."""
    folder = tmp_path_factory.mktemp("trainings")
    return folder, run_ranks(f"{__package__}.quota_trainings", folder, RANKS)


def kept(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each rank wrote down of a training."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]


def samples(of_ranks: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Samples of each step, over all ranks."""
    return {
        step: sorted(
            one for rank in of_ranks for microbatch in rank["taken"][step] for one in microbatch
        )
        for step in of_ranks[0]["taken"]
    }


def quotas_of(of_ranks: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Microbatches of each rank, by step."""
    return [tuple(len(rank["taken"][step]) for rank in of_ranks) for step in of_ranks[0]["taken"]]


@pytest.mark.parametrize(
    ("name", "plain", "last_quotas"),
    [
        ("quotas", "plain", (5, 3, 1)),
        ("resumed", "plain", (1, 2, 6)),
        ("quotas mean", "plain mean", (2, 1, 6)),
    ],
)
def test_quotas_train_what_the_undisturbed_job_trains(
    name: str, plain: str, last_quotas: tuple[int, ...], trainings: tuple[Path, str]
) -> None:
    """Losses are sums over the tokens of the step, or means; epochs end with a shorter step."""
    import torch

    folder, _ = trainings
    ours, theirs = kept(folder, name), kept(folder, plain)
    assert last_quotas in quotas_of(ours)
    assert ours[0]["told"] == [f"applied {last_quotas}"]
    undisturbed = samples(theirs)
    assert samples(ours) == {step: undisturbed[step] for step in ours[0]["taken"]}
    for rank in ours:
        assert rank["steps"] == theirs[0]["steps"]
        for entry, plain_entry in zip(rank["log"], theirs[0]["log"], strict=True):
            shared = {key: entry[key] for key in ("loss", "grad_norm", "learning_rate", "epoch")}
            assert shared == pytest.approx({key: plain_entry[key] for key in shared}, rel=1e-5)
    whole = torch.load(folder / f"{plain}-0.pt")
    for rank in range(RANKS):
        for key, tensor in torch.load(folder / f"{name}-{rank}.pt").items():
            torch.testing.assert_close(tensor, whole[key], rtol=1e-5, atol=1e-6)


def test_a_trainer_that_cannot_have_quotas_trains_without(trainings: tuple[Path, str]) -> None:
    """One that communicates in each microbatch is noticed in its first step."""
    folder, output = trainings
    for name in ("gathers", "own tokens"):
        assert set(quotas_of(kept(folder, name))) <= {(3, 3, 3), (1, 1, 1)}
    why = "its loss or training_step communicates in each microbatch"
    assert kept(folder, "gathers")[0]["told"] == [f"refused: {why}"]
    assert output.count(f"no quotas in this training: {why}") == 1
    assert output.count("set average_tokens_across_devices=True") == 1


def test_a_step_that_a_callback_leaves_is_no_error(trainings: tuple[Path, str]) -> None:
    """One step in the first of two epochs, and the four of the second one."""
    folder, _ = trainings
    assert {rank["steps"] for rank in kept(folder, "left")} == {1 + 4}


def test_the_quota_of_a_slow_rank_falls(run: Run) -> None:
    training = run("transformers_trainer.py", "--slow-rank", "2", "--quotas")
    training.assert_named(2)
    logged = re.findall(r"'resihp/quotas': '(\d+) (\d+) (\d+)'", training.output)
    assert logged[0] == ("4", "4", "4")
    assert int(logged[-1][2]) < 4, training.output
